# SPDX-License-Identifier: Apache-2.0
"""Which change is to blame, in words."""

import dataclasses

import pytest

from megatron_ttrace.report import blame, html
from megatron_ttrace.trace.blamed import Blame, BlamedChange, BlamedHunk, Blaming
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from tests.report.expected import text_of
from tests.report.synthetic_report import embedding_bug

HUNK = BlamedHunk(
    "megatron/core/layers.py",
    7,
    "A.forward",
    ("        x = 1\n",),
    ("        if y:\n", "            x = \x1b[31m2\n"),
    Execution.IN_CULPRIT,
)
CHANGE = BlamedChange((HUNK,), ("decoder",))
PROVEN = Blame(Blaming.PROVEN, "core_v0.19.2", (CHANGE,), hunks=61, idle=40, checks=7, seconds=31.4)


def test_a_hunk():
    """As a diff whose lines begin at the margin, without control characters."""
    assert blame.place(HUNK) == "megatron/core/layers.py:7 (A.forward)"
    first, second, third = blame.lines(HUNK)
    assert (first, second) == ("- x = 1", "+ if y:")
    assert third.startswith("+     x = ")
    assert "\x1b" not in third


def test_a_long_hunk():
    """Its beginning, and how much there is of it."""
    long = dataclasses.replace(HUNK, added=tuple(f"a = {number}\n" for number in range(40)))
    shown = blame.lines(long)
    assert len(shown) == blame.MOST_LINES
    assert shown[-1] == "  and 30 more lines"


@pytest.mark.parametrize("result", Blaming)
def test_every_result(result):
    """A sentence without gaps; with several hunks, and with several changes."""
    for changes in ((), (CHANGE,), (BlamedChange((HUNK, HUNK), ()),), (CHANGE, CHANGE)):
        text = blame.sentence(Blame(result, "v1", changes, reason="it crashed"))
        assert "{" not in text
        assert not text.startswith(" ")
    assert "v1" in text


def test_where_the_good_tree_diverges():
    """It is named, as far as the job diverges there without the changes, too."""
    text = blame.sentence(dataclasses.replace(PROVEN, reason="embedding"))
    assert text == f"{blame.sentence(PROVEN)}, except where core_v0.19.2 does, too: embedding"


def test_a_commit():
    """The first digits of its id."""
    since = dataclasses.replace(PROVEN, since=("0123456789ab" * 4)[:40] + "^1")
    for text in (blame.sentence(since), blame.effort(since)):
        assert "0123456789ab^1" in text.replace("core_v0.19.2", "")
        assert "0123456789ab0" not in text


def test_the_reports():
    """The hunk comes before the culprit, and nothing is wider than the terminal."""
    summary, verdicts = embedding_bug()
    summary = dataclasses.replace(summary, blame=PROVEN)
    text_of_log = text_of((summary, verdicts))
    assert max(map(len, text_of_log.splitlines())) <= 80
    assert text_of_log.index("layers.py:7 (A.forward)") < text_of_log.index("culprit  ")
    assert "(61 hunks since core_v0.19.2, 40 did not run; 7 checks, 31 s)" in text_of_log
    page = html.render(summary, verdicts)
    for text in ("The change to blame", "layers.py:7 (A.forward)", "+ if y:", "ran in the culprit"):
        assert text in page
    # One piece of advice is enough.
    assert "ttrace blame" not in text_of_log
    assert "--ttrace-isolate" not in text_of_log


@pytest.mark.parametrize("ran", Execution)
def test_the_suggestion(ran):
    """A job that diverges with changed code that may have run: one line."""
    summary, verdicts = embedding_bug()
    changed = ChangedCode("core_v0.19.2", (ChangedFunction("a.py", "f", 1, ran),))
    summary = dataclasses.replace(summary, changed_code=changed)
    printed = " ".join(text_of((summary, verdicts)).split())
    text = "ttrace blame --good core_v0.19.2 -- COMMAND finds the change to blame"
    assert (text in printed) == (ran is not Execution.NOT_RUN)
    assert blame.suggestion(None) == ""
