# SPDX-License-Identifier: Apache-2.0
"""The record of the hunt: nothing in it is open, and docs/hunt.md counts what it has."""

import re
from collections import Counter
from pathlib import Path

from megatron_ttrace.evaluation.hunt.combinations import table
from megatron_ttrace.evaluation.recipes.collect import Answer
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from tests.findings import hunted

VALUES, LINES = hunted.read()
PAGE = (Path(__file__).parents[2] / "docs" / "hunt.md").read_text(encoding="utf-8")


def test_combinations():
    """They are different, of known options, and a value of each dimension at most."""
    assert len(LINES) == len(hunted.RECORD.read_text(encoding="utf-8").splitlines()) - 1
    assert len(VALUES) == len(set(VALUES))
    dimensions = {value: each.name for each in table().dimension for value in each.values}
    assert len(dimensions) == sum(len(each.values) for each in table().dimension)
    for value in VALUES:
        flags = CommandFlags.parse(value.replace(" | ", " ").split()).flags if "--" in value else ()
        assert all(flag.option for flag in flags), value
    for line in LINES.values():
        values = [VALUES[number] for number in line["values"]]
        names = [dimensions[value] for value in values if value in dimensions]
        assert len(names) == len(set(names)), values
        assert len(values) == len(set(values)) <= 13


def test_nothing_is_open():
    """What diverged is a finding; what has no result has a known reason."""
    findings = hunted.PAGE.read_text(encoding="utf-8")
    for line in LINES.values():
        answer = Answer(line["answer"])
        if answer is Answer.EQUIVALENT:
            assert line["tensors"] > 0
        elif answer is Answer.DIVERGED:
            assert re.search(rf"^## {line['finding']}\. ", findings, re.MULTILINE), line
        else:
            assert sum(error in line["error"] for error in hunted.ERRORS) == 1, line


def test_the_page():
    """It has the number of combinations by result."""
    counts = Counter(line["answer"] for line in LINES.values())
    assert f"{len(LINES)} combinations" in PAGE
    for answer in Answer:
        written = re.search(rf"^\| {answer} \| (\d+) \|", PAGE, re.MULTILINE)
        assert (int(written[1]) if written else 0) == counts[answer], answer
