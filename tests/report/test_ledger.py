# SPDX-License-Identifier: Apache-2.0
"""Sentences about collectives, their table in the page, and their file."""

import dataclasses
import json
from pathlib import Path

import pytest

from megatron_ttrace.report import html
from megatron_ttrace.report.ledger import citation_text, finding_text
from megatron_ttrace.trace import files
from megatron_ttrace.trace.collectives import (
    Citation,
    Collective,
    LedgerFault,
    LedgerFinding,
    Operation,
    Phase,
    RanHere,
)
from megatron_ttrace.trace.records import Summary
from tests.report.expected import published
from tests.report.synthetic_report import COUNT, ROW, healthy_verdicts, make_summary
from tests.trace.test_sanitise import parse

RAN = Collective(
    iteration=1,
    operation=Operation.ALL_GATHER,
    reduction="",
    group="tp",
    size=2,
    dtype="bfloat16",
    bytes=4096,
    module="decoder.layers.0.mlp.linear_fc1",
    direction=Phase.FORWARD,
    where="megatron/core/a.py:1 (gather)",
    count=2,
    ranks=(0, 1),
)


@pytest.mark.parametrize(
    ("cited", "text"),
    [
        (None, ""),
        (Citation(Phase.FORWARD), "no collective ran in its forward pass"),
        (Citation(Phase.BACKWARD, (), ("tp",)), "no reduction over tp ran in its backward pass"),
        (
            Citation(Phase.FORWARD, (RAN, RAN), ("tp",), ((Operation.REDUCE, "ep"),), 3),
            "collectives in its forward pass: all_gather over tp (bfloat16); no reduction over "
            "tp; all 3 of its siblings in other layers ran reduce over ep",
        ),
        (
            Citation(Phase.GRADIENTS, (dataclasses.replace(RAN, group="dp"),)),
            "collectives in the reduction of gradients: all_gather over dp (bfloat16)",
        ),
    ],
)
def test_citation(cited: Citation | None, text: str) -> None:
    """What ran, what did not, what others ran."""
    assert citation_text(cited) == text


@pytest.mark.parametrize(
    ("finding", "text"),
    [
        (
            COUNT,
            "all_reduce sum float32, 64 bytes over tp (ranks 0, 1) ran unequally often: 2 times on "
            "rank 0 in decoder.layers.0 at a.py:1 (f); never on rank 1",
        ),
        (
            LedgerFinding(
                fault=LedgerFault.ORDER,
                group="dp",
                members=(0, 2),
                ran=(RanHere((0,), 0), RanHere((2,), 1)),
                groups=2,
            ),
            "the same collectives over dp (ranks 0, 2) and 1 more such group ran in different "
            "orders: rank 0 and rank 2 disagree",
        ),
        (
            dataclasses.replace(
                COUNT, fault=LedgerFault.PRECISION, dtype="bfloat16", expected="float32"
            ),
            "all_reduce sum bfloat16 over tp (ranks 0, 1), 64 bytes in decoder.layers.0 at "
            "a.py:1 (f): a lower precision than expected (float32)",
        ),
        (
            dataclasses.replace(
                COUNT,
                group="pp",
                operation=Operation.SEND,
                reduction="",
                bytes=2048,
                ran=(RanHere((0,), 1), RanHere((1,), 0)),
            ),
            "message float32, 2.0 kB from rank 0 to rank 1: sent once, received never",
        ),
    ],
)
def test_finding(finding: LedgerFinding, text: str) -> None:
    """One sentence that names operation, group, ranks and place."""
    assert finding_text(finding) == text


def summary() -> Summary:
    """An equivalent run with a row, and a finding."""
    made = make_summary(healthy_verdicts())
    return dataclasses.replace(made, collectives=(ROW,), collective_findings=(COUNT,))


def test_the_page() -> None:
    """The finding is on top, the row in a table; neither is there without a record."""
    text = " ".join("\n".join(parse(html.render(summary(), [])).texts).split())
    assert finding_text(COUNT) in text[: text.index("Margin of every tensor")]
    row = "gradient reduction - 1 reduce_scatter sum dp-cp (4) float32 512 bytes to 3.1 MB 3 "
    assert row in text
    assert "Collectives of the traced steps" not in html.render(make_summary([]), [])


def test_files(tmp_path: Path) -> None:
    """A line per collective, with the id of the run; the summary is the same when read again."""
    log = published((summary(), healthy_verdicts()), tmp_path, collectives=[RAN])
    (line,) = (tmp_path / files.COLLECTIVES).read_text().splitlines()
    document = json.loads(line)
    assert set(document) == {field.name for field in dataclasses.fields(Collective)} | {"run"}
    assert Collective.from_json(document) == RAN
    read, _ = files.load_report(tmp_path)
    assert (read.collectives, read.collective_findings) == ((ROW,), (COUNT,))
    assert "ran unequally often" in " ".join(log.split())
