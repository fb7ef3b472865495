# SPDX-License-Identifier: Apache-2.0
"""Compositions of repairs: a composed fault is found again, and noise is not a fault."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.diagnose import scaling, search
from megatron_ttrace.diagnose.evidence import Evidence, Work
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import (
    Composed,
    ConstantFactor,
    Finding,
    OffsetRows,
    PartialSums,
    RankFactors,
    ReorderedRows,
    Rounded,
    Transposed,
)
from megatron_ttrace.trace.records import Kind, TraceKey
from tests.diagnose.evidence_by_hand import evidence_of, explain, meshes, text, values

ROWS = 24
REFERENCE = values(ROWS, ROWS)
ROW_TYPES = {OffsetRows, ReorderedRows}

SIZES = st.sampled_from(
    [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 3), (2, 3, 1), (2, 1, 2), (1, 2, 3)]
)
Held = dict[int, torch.Tensor]


def layout(tp: int, cp: int, dp: int) -> list[Mesh]:
    return meshes(tp * cp * dp, tp=tp, cp=cp)


def test_a_few_integers() -> None:
    """They are zero, or another microbatch's, by chance."""
    key, ids = TraceKey(1, 1, Kind.TOKENS, "dataset_id", 0), torch.tensor([0, 1])
    assert explain(evidence_of(ids, meshes(1), {0: 0 * ids}, key=key)) is None
    assert explain(evidence_of(ids.repeat(8), meshes(1), {0: 0 * ids.repeat(8)}, key=key))


def right(ranks: list[Mesh], sharded: bool) -> Held:
    """What each rank should hold: all of it, or its tensor-parallel rank's rows."""
    return {
        mesh.rank: REFERENCE.chunk(mesh.size("tp"))[mesh.at("tp")] if sharded else REFERENCE
        for mesh in ranks
    }


def unreduced(held: Held, ranks: list[Mesh], axis: str) -> Held:
    """Each rank keeps a part of its own; those along the axis add up to what it should hold."""
    parts = {}
    for mesh in ranks:
        own = held[mesh.rank]
        rest = [values(*own.shape, seed=90 + number) for number in range(mesh.size(axis) - 1)]
        at = mesh.at(axis)
        parts[mesh.rank] = rest[at] if at < len(rest) else own - sum(rest)
    return parts


def everywhere(held: Held, change) -> Held:
    return {rank: change(own) for rank, own in held.items()}


@st.composite
def composed(draw) -> tuple[Evidence, set[frozenset[type]], int]:
    """A faulty tensor, the types of the repairs that make it right, and how many they are."""
    tp, cp, dp = draw(SIZES)
    ranks = layout(tp, cp, dp)
    sharded = tp > 1 and draw(st.booleans())
    axes = [axis for axis in ("tp", "cp", "dp") if ranks[0].size(axis) > 1]
    copies = [axis for axis in axes if not (sharded and axis == "tp")]
    held, types, size = right(ranks, sharded), set(), 0
    last = draw(st.sampled_from(("rows", "rounded", "transposed", "nothing")))
    if last == "rows":
        to = draw(st.permutations(range(ROWS // (tp if sharded else 1))))
        held = everywhere(held, lambda own: own[list(to)])
        types.add("rows")
        size += 1
    elif last == "rounded":
        held, size = everywhere(held, lambda own: own.bfloat16().float()), size + 1
        types.add(Rounded)
    elif last == "transposed" and not sharded:
        held, size = everywhere(held, lambda own: own.T.contiguous()), size + 1
        types.add(Transposed)
    if axes and draw(st.booleans()):
        by = draw(st.sets(st.sampled_from(axes), min_size=1))
        ratio = math.prod(ranks[0].size(axis) for axis in by) ** draw(st.sampled_from((-1, 1)))
        held, size = everywhere(held, lambda own: own * ratio), size + 1
        types.add(ConstantFactor)
    if copies and draw(st.booleans()):
        held, size = unreduced(held, ranks, draw(st.sampled_from(copies))), size + 1
        types.add(PartialSums)
    placement = (Step("tp", Shard(0)),) if sharded else ()
    return evidence_of(REFERENCE, ranks, held, placement=placement, tolerance=1e-5), types, size


def steps_of(finding: Finding) -> tuple[Finding, ...]:
    return finding.steps if isinstance(finding, Composed) else (finding,)


@settings(max_examples=40)
@given(composed())
def test_a_composed_fault_is_found(case: tuple[Evidence, set, int]) -> None:
    """By a repair of the same kinds, or a simpler one that makes the same values right."""
    evidence, types, size = case
    if not evidence.parts:
        return
    compositions = search.search(evidence)
    assert compositions
    steps = steps_of(compositions[0].finding)
    kinds = {type(step) for step in steps}
    if kinds & ROW_TYPES:
        kinds = kinds - ROW_TYPES | {"rows"}
    # A sum that is off by the size of its axis is a mean.
    assert kinds == types or (len(steps) < size and kinds < types), compositions[0]


def test_two_repairs_in_words() -> None:
    """Partial sums that were also scaled."""
    ranks = layout(2, 3, 1)
    held = everywhere(unreduced(right(ranks, False), ranks, "tp"), lambda own: own * 3)
    finding = explain(evidence_of(REFERENCE, ranks, held))
    assert finding is not None
    assert finding.axes == ("tp", "cp")
    assert text(finding) == (
        "partial sums over tp; with that repaired: 3.000 times too large = the size of cp"
    )


def test_multiples_are_no_partial_sums() -> None:
    """A sum of multiples of the reference is a multiple of it, too."""
    ranks = layout(1, 2, 1)
    held = {0: REFERENCE * 1.983, 1: REFERENCE * 2.017}
    finding = explain(evidence_of(REFERENCE, ranks, held))
    assert type(finding) is RankFactors
    assert "partial" not in text(finding)


def test_the_simpler_is_told_and_the_other_mentioned() -> None:
    """Unless it says the same: equal halves add up to the whole, as each rank's double does."""
    compositions = search.search(evidence_of(REFERENCE, layout(2, 1, 1), lambda _, own: own / 2))
    assert [type(composition.finding) for composition in compositions] == [
        ConstantFactor,
        RankFactors,
    ]
    assert search.alternative(compositions) is None
    both = [
        search.Composition(
            (), scaling.factor, ConstantFactor("too_large", ratio=2.0, sizes=(("tp",),))
        ),
        search.Composition((), scaling.rounded, PartialSums("partial_sums", ("tp",))),
    ]
    assert search.alternative(both) == both[1].finding
    assert search.alternative([both[0], both[0]]) is None


def test_a_search_ends_with_its_work() -> None:
    """Causes that were found until then are reported."""
    evidence = evidence_of(REFERENCE, layout(2, 2, 2), lambda rank, own: own + rank + 1)
    evidence.work = Work(1e6)
    assert search.search(evidence) == []
    assert evidence.work.left < 0
