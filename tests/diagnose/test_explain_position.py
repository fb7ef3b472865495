# SPDX-License-Identifier: Apache-2.0
"""Right values in wrong places, wrong rows among right ones, another tensor's values."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from megatron_ttrace.diagnose import position, region, sources, summands
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Cause, OtherTime
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, TraceKey
from tests.diagnose.evidence_by_hand import OUTPUT, evidence_of, explain, meshes, text, values


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x.roll(-3, 0), "another order"),
        (lambda x: x.flip(0), "reverse order"),
        (lambda x: torch.cat([x[16:], x[:16]]), "two halves of its rows are swapped"),
        (lambda x: x[:1].expand_as(x), "some of them twice"),
        (lambda x: x[torch.randperm(32, generator=torch.Generator().manual_seed(0))], "order"),
    ],
)
def test_rows_elsewhere(change: Callable[[torch.Tensor], torch.Tensor], words: str) -> None:
    """Rows in another order, by the sort of order."""
    found = position.rows(evidence_of(values(32, 12), meshes(1), lambda _, right: change(right)))
    assert found is not None
    assert words in text(found)


def test_another_ranks_slice() -> None:
    """Ranks that hold each other's shards."""
    reference = values(32, 12)
    found = position.rows(
        evidence_of(
            reference,
            meshes(2, tp=2),
            {0: reference[16:], 1: reference[:16]},
            placement=(Step("tp", Shard(0)),),
        )
    )
    assert found is not None
    assert "rank 0 holds rows 16..31" in text(found)
    assert (found.cause, found.axes) == (Cause.OFFSET, ("tp",))


def test_shifted_slice() -> None:
    """A slice that begins two rows late."""
    reference = values(32, 12)
    found = position.rows(
        evidence_of(
            reference,
            meshes(2, tp=2),
            {0: reference[2:18], 1: reference[16:]},
            placement=(Step("tp", Shard(0)),),
        )
    )
    assert found is not None
    assert "shifted by 2" in text(found)


def test_columns_elsewhere() -> None:
    """The last dim counts as well: gate and up swapped in an activation."""
    found = position.rows(
        evidence_of(values(12, 2, 8), meshes(1), lambda _, x: x.roll(4, 2), key=OUTPUT)
    )
    assert found is not None
    assert "halves of its columns" in text(found)


def test_other_rows_are_not_elsewhere() -> None:
    """Rows that the reference has nowhere stay unknown."""
    evidence = evidence_of(values(32, 12), meshes(1), lambda _, right: values(32, 12, seed=5))
    assert position.rows(evidence) is None
    assert explain(evidence) is None


def test_transposed() -> None:
    """A square block laid down the other way."""
    found = explain(evidence_of(values(9, 9), meshes(1), lambda _, x: x.T.contiguous()))
    assert found is not None
    assert "transposed" in text(found)


def test_some_rows() -> None:
    """Three rows are zero, the rest right."""

    def held(_: int, right: torch.Tensor) -> torch.Tensor:
        changed = right.clone()
        changed[4:7] = 0
        return changed

    found = region.dropped_rows(evidence_of(values(32, 12), meshes(1), held))
    assert found is not None
    assert "rows 4..6 (9%) are zero, the rest right" in text(found)


def test_slice_of_a_rank() -> None:
    """Wrong rows that are just one rank's part name its axis; what they hold is not known."""

    def held(_: int, right: torch.Tensor) -> torch.Tensor:
        changed = right.clone()
        changed[24:] = values(8, 12, seed=4)
        return changed

    evidence = evidence_of(values(32, 12), meshes(4, tp=4), held)
    assert explain(evidence) is None
    found = region.extent(evidence)
    assert found is not None
    assert "slice of tp 3" in text(found)
    assert found.axes == ("tp",)


def test_garbage_is_not_some_rows() -> None:
    """Where all rows are wrong, no row is to blame."""
    evidence = evidence_of(values(32, 12), meshes(1), lambda _, right: right + 1)
    assert region.extent(evidence) is None


def test_token_ids() -> None:
    """An embedding that gives foreign ids the table's first row."""
    key = dataclasses.replace(OUTPUT, name="embedding.word_embeddings")
    table, ids = values(16, 12), torch.arange(16).reshape(2, 8)
    trace = {
        TraceKey(1, 0, Kind.INPUT, ROOT, 0): ids,
        TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{key.name}.weight", 0): table,
    }
    wrong = torch.where(ids < 8, ids, 0)
    found = explain(
        evidence_of(table[ids], meshes(2, tp=2), lambda *_: table[wrong], key=key, trace=trace)
    )
    assert found is not None
    assert "token id lies in 8..15 (the part of tp 1)" in text(found)
    assert "row 0 of the table" in text(found)


def test_stale_value() -> None:
    """The value of the microbatch before."""
    other = values(6, 12, seed=8)
    key = dataclasses.replace(OUTPUT, microbatch=1)
    stale = OtherTime(Cause.OTHER_TIME, microbatch=0)
    evidence = evidence_of(
        values(6, 12),
        meshes(1),
        lambda *_: other,
        key=key,
        trace={OUTPUT: other},
        others=lambda: [(stale, OUTPUT)],
    )
    found = sources.elsewhere(evidence)
    assert found is not None
    assert text(found) == "holds the value of microbatch 0"
    evidence.whole = {OUTPUT: values(6, 12, seed=9)}.get
    assert sources.elsewhere(evidence) is None


@pytest.mark.parametrize(("times", "words"), [(1, "added 2 times"), (-1, "is missing")])
def test_bias(times: int, words: str) -> None:
    """A bias added on every tensor-parallel rank, or on none."""
    bias = values(12, seed=3)
    trace = {TraceKey(1, STEP_LEVEL, Kind.PARAM, f"{OUTPUT.name}.bias", 0): bias}
    found = summands.addend(
        evidence_of(
            values(6, 2, 12), meshes(2), lambda _, x: x + times * bias, key=OUTPUT, trace=trace
        )
    )
    assert found is not None
    assert words in text(found)
