# SPDX-License-Identifier: Apache-2.0
"""Findings are merged on their way to the rank that judges, and the verdicts stay the same."""

import dataclasses
import random

from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.gathered import Holding, failing, merge, of_rank, of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured, Problem
from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import Kind, Outcome, TraceKey

KEY = TraceKey(1, 0, Kind.OUTPUT, "a")
SHAPE = (4, 6)
TOLERANCES = Tolerances({KEY: Moved(24, 2.0, (1e-3,))}, {KEY: "float32"})


def part(rows: tuple[int, int], error: float = 0.0, checksum: int = 1, **more: object) -> Measured:
    first, last = rows
    box = Box((first, 0), (last - first, 6), (0, 0))
    n = box.numel
    sums = Sums(n, error**2 * n, float(n), float(n), float(n), checksum=checksum)
    one = Measured(KEY, "tp:Shard(0)", (box,), SHAPE, sums)
    return dataclasses.replace(one, **more)  # type: ignore[arg-type]


def verdicts(held: list[Holding]) -> list[object]:
    return list(judge([(KEY, SHAPE)], held, TOLERANCES, 1e-7))


TOP, BOTTOM, WHOLE = (0, 2), (2, 4), (0, 4)
parts = st.builds(
    part,
    st.sampled_from([TOP, TOP, BOTTOM, BOTTOM, WHOLE, (1, 3)]),
    st.sampled_from([0.0, 1e-4, 2e-4, 0.5]),
    st.sampled_from([1, 1, 1, 2]),
    note=st.sampled_from([None, None, None, Note(Remark.UNEVEN)]),
    problem=st.sampled_from([None] * 20 + [Problem.SHAPE]),
)


@given(st.lists(st.lists(parts, max_size=2), max_size=6), st.randoms())
def test_verdicts_stay(found: list[list[Measured]], dice: random.Random) -> None:
    """Whatever ranks found, in whatever order and groups it is merged."""
    plain = of_ranks(dict(enumerate(found)))
    failed = failing((one.measured for one in plain), TOLERANCES)
    groups = [of_rank(rank, one) for rank, one in enumerate(found)]
    dice.shuffle(groups)
    while len(groups) > 1:
        taken = [groups.pop() for _ in range(min(len(groups), dice.randint(2, 3)))]
        groups.append(merge([one for each in taken for one in each], TOLERANCES, failed))
    merged = groups[0] if groups else []
    [before], [after] = verdicts(plain), verdicts(merged)
    said = (before.verdict, before.rel_err, before.margin, before.shape, set(before.ranks))
    assert said == (after.verdict, after.rel_err, after.margin, after.shape, set(after.ranks))
    if before.verdict.is_failure:
        assert before == after
    assert sum(len(one.ranks) for one in merged) == len(plain)


def test_parts_become_one() -> None:
    """Two halves with two replicas each are one record, with the worst error."""
    held = of_ranks({0: [part(TOP)], 1: [part(BOTTOM, 2e-4)], 2: [part(TOP)]})
    held += of_rank(3, [part(BOTTOM, 2e-4)])
    [one] = merge(held, TOLERANCES)
    assert (one.ranks, one.copies, one.measured.region) == ((0, 1, 2, 3), 2, (((0, 0), SHAPE),))
    assert one.measured.sums is not None
    assert one.measured.sums.diff == part(BOTTOM, 2e-4).sums.diff  # type: ignore[union-attr]


def test_replicas_that_were_joined_apart() -> None:
    """Two groups of ranks join first; equal ones become one record, others stay two."""
    one, two = (
        merge(of_ranks({at: [part(TOP)], at + 1: [part(BOTTOM)]}), TOLERANCES) for at in (0, 2)
    )
    [both] = merge([*one, *two], TOLERANCES)
    assert (both.ranks, both.copies) == ((0, 1, 2, 3), 2)
    other = merge(of_ranks({2: [part(TOP)], 3: [part(BOTTOM, checksum=7)]}), TOLERANCES)
    assert len(merge([*one, *other], TOLERANCES)) == 2
    [verdict] = judge([(KEY, SHAPE)], merge([*one, *other], TOLERANCES), TOLERANCES, 1e-7)
    assert "replicas" in notes_text(verdict.notes)


def test_copies_of_a_weight_are_compared_across_groups() -> None:
    """Two ranks that have a whole weight between them, and a group of others with other bits."""
    key = dataclasses.replace(KEY, microbatch=-1, kind=Kind.PARAM, index=1)
    limits = Tolerances({key: Moved(24, 2.0, (1e-3,))}, {key: "float32"})
    found = [part(rows, checksum=bits, key=key) for bits in (1, 2, 2) for rows in (TOP, BOTTOM)]
    plain = of_ranks({rank: [one] for rank, one in enumerate([*found, found[-1]])})
    merged = merge([*merge(plain[:2], limits), *merge(plain[2:], limits)], limits)
    for held in (plain, merged):
        [verdict] = judge([(key, SHAPE)], held, limits, 1e-7)
        assert verdict.verdict is Outcome.REPLICA_CONFLICT


def test_what_fails_is_kept_apart() -> None:
    """So that the ranks that are wrong can be named; and so are parts of some kinds."""
    wrong = {0: [part(TOP)], 1: [part(BOTTOM, 0.5)]}
    [failed] = failing(wrong[1], TOLERANCES)
    assert failing(wrong[0], TOLERANCES) == []
    assert merge(of_ranks(wrong), TOLERANCES, {failed}) == of_ranks(wrong)
    fine = of_ranks({0: [part(TOP)], 1: [part(BOTTOM)]})
    assert merge(fine, TOLERANCES, (), {Kind.OUTPUT}) == fine
    assert len(merge(fine, TOLERANCES)) == 1
