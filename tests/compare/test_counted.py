# SPDX-License-Identifier: Apache-2.0
"""Coverage of norms, counts and updates, judged from what ranks say they put in."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare.counted import Judgement, _covered, _stacked, judge
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import coverage
from megatron_ttrace.report.wording import note_text
from megatron_ttrace.trace.counted import (
    Counted,
    Counting,
    Hyperparameters,
    HyperparametersIndex,
    Part,
    Statistic,
    Sum,
    Term,
    runs_of,
)
from megatron_ttrace.trace.findings import Cause, Lack, Miscounted, OtherHyperparameters
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Outcome

NORM, WEIGHT, HALVES = "norm.weight", "fc.weight", ((0, 2), (2, 2))


def norm() -> Part:
    return Part(NORM, (4,), (Box((0,), (4,), (0,)),))


def weight(half: int) -> Part:
    """Two of the four rows of a weight that tensor parallelism divides."""
    start, size = HALVES[half]
    return Part(WEIGHT, (4, 3), (Box((start, 0), (size, 3), (0, 0)),))


def rank(
    at: int, group: range, *, parts: tuple[int, ...] = (0, 1), statistic=Statistic.GRAD_NORM, **more
) -> Counted:
    """Tensor-parallel rank ``at`` adds ``parts`` of (norm, weight) up over a group."""
    made = Sum(runs_of(group), 0, tuple(Term(part) for part in parts))
    counting = Counting(statistic, (made,), (), (Term(0),), **more)
    return Counted(1, (norm(), weight(at % 2)), (0, 1), (counting,))


def failures(found: Judgement) -> dict[str, tuple[Reason | None, tuple[int, ...]]]:
    bad = (one for one in found.verdicts if one.verdict is Outcome.DIVERGED)
    return {one.name: (one.reason, one.ranks) for one in bad}


def norms(at: int, *parts: tuple[int, ...], group: range = range(2)) -> Counted:
    """Tensor-parallel rank ``at`` computes the norm more than once, each time over some parts."""
    countings = tuple(
        Counting(
            Statistic.GRAD_NORM,
            (Sum(runs_of(group), number, tuple(map(Term, one))),),
            (),
            (Term(0),),
        )
        for number, one in enumerate(parts)
    )
    return Counted(1, (norm(), weight(at % 2)), (0, 1), countings)


TWICE, NEVER = Reason.COUNTED_TWICE, Reason.NEVER_COUNTED
ONCE = rank(0, range(999)), rank(1, range(999), parts=(1,))


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        # One rank leaves the replica out.
        ((rank(0, range(2)), rank(1, range(2), parts=(1,))), {}),
        # One norm is logged, another one clipped by: each has every element once.
        ((norms(0, (0, 1), (0, 1)), norms(1, (1,), (1,))), {}),
        # That of all is logged, and each optimizer clips by its own portion.
        ((norms(0, (0, 1), (0,), (1,)), norms(1, (1,), (), (1,))), {}),
        ((norms(0, (0, 1), (1,), (0,)), norms(1, (1,), (1,), ())), {}),
        # Chained optimizers each have a part of one norm; an element in two of them counts twice.
        ((norms(0, (0,), (1,)), norms(1, (), (1,))), {}),
        ((norms(0, (0,), (0, 1)), norms(1, (), (1,))), {NORM: (TWICE, (0, 1))}),
        # Both tensor-parallel ranks put the layer norm in, or one does not put its rows in.
        ((rank(0, range(2)), rank(1, range(2))), {NORM: (TWICE, (0, 1))}),
        ((rank(0, range(2)), rank(1, range(2), parts=())), {WEIGHT: (NEVER, (0, 1))}),
        # Each rank sums over itself: it lacks what the other has, the first one has the norm.
        (
            (rank(0, range(1)), rank(1, range(1, 2), parts=(1,))),
            {NORM: (NEVER, (1,)), WEIGHT: (NEVER, (0, 1))},
        ),
        # Summed over data-parallel replicas as well.
        (
            tuple(rank(at, range(4), parts=(1,) if at % 2 else (0, 1)) for at in range(4)),
            dict.fromkeys((NORM, WEIGHT), (TWICE, (0, 1, 2, 3))),
        ),
        # A result that all ranks share is added up once.
        ((*ONCE, *(rank(at, range(999), parts=()) for at in range(2, 999))), {}),
    ],
)
def test_a_norm(ranks, expected) -> None:
    found = judge((), {at: [counted] for at, counted in enumerate(ranks)})
    assert failures(found) == expected
    if not expected:
        assert [(one.name, one.verdict) for one in found.verdicts] == [("grad_norm", Outcome.PASS)]
    for name, finding in zip(expected, found.findings.values(), strict=True):
        assert isinstance(finding, Miscounted)
        assert finding.names == tuple(expected)
        twice = expected[name][0] is TWICE
        assert finding.cause is (Cause.COUNTED_TWICE if twice else Cause.NEVER_COUNTED)
        assert (finding.most == 2) if twice else (finding.least == 0)


@pytest.mark.parametrize("statistic", [Statistic.GRAD_NORM, Statistic.STEPPED])
@pytest.mark.parametrize("taken", [(0,), (0, 1), (1,)])
def test_copies_of_a_parameter_that_one_rank_holds(statistic: Statistic, taken) -> None:
    """Two chunks have it: an update takes each copy, a norm of the whole model one of them."""
    copies = norm(), dataclasses.replace(norm(), name=f"{NORM}#1")
    trusted = Counted(1, (norm(),), (0,), (Counting(statistic, (), (Term(0),)),))
    made = Counting(statistic, (), tuple(map(Term, taken)))
    found = judge((trusted,), {0: [Counted(1, copies, (0, 1), (made,))]})
    if statistic is Statistic.GRAD_NORM:
        assert failures(found) == ({NORM: (TWICE, (0,))} if len(taken) > 1 else {})
    else:
        missing = {copies[n].name: (NEVER, (0,)) for n in (0, 1) if n not in taken}
        assert failures(found) == missing


def test_two_collectives() -> None:
    """A sum over one group goes into a sum over another; nothing is counted twice."""
    ranks = {}
    for at in range(4):
        tp, dp = at % 2, at // 2
        # Data-parallel ranks have different rows of the norm, as with a sharded optimizer.
        part = Part(NORM, (4,), (Box((2 * dp,), (2,), (0,)),))
        inner = Sum(runs_of(range(tp, 4, 2)), 0, (Term(0),) if tp == 0 else ())
        outer = Sum(runs_of(range(2 * dp, 2 * dp + 2)), 0, (), (Term(0),))
        counting = Counting(Statistic.PARAMS_NORM, (inner, outer), (), (Term(1),))
        ranks[at] = [Counted(1, (part,), (0,), (counting,))]
    assert not failures(judge((), ranks))
    ranks[2] = [dataclasses.replace(ranks[2][0], parts=ranks[0][0].parts)]
    # The same rows twice, the others never: the worse is told.
    assert failures(judge((), ranks)) == {NORM: (Reason.COUNTED_TWICE, (0, 1, 2, 3))}


def test_what_the_reference_does_not_count() -> None:
    """It is not expected, unless the reference steps it: then it is wrong in both runs."""
    alone = Counting(Statistic.GRAD_NORM, (), (Term(1),))
    update = Counting(Statistic.STEPPED, (), (Term(0), Term(1)))
    reference = Counted(1, (norm(), Part(WEIGHT, (4, 3), ())), (0, 1), (alone,))
    stepped = dataclasses.replace(reference, countings=(alone, update))
    ranks = {0: [rank(0, range(2), parts=(1,))], 1: [rank(1, range(2), parts=(1,))]}
    assert not failures(judge((reference,), ranks))
    for known in ((), (stepped,)):
        assert failures(judge(known, ranks)) == {NORM: (Reason.NEVER_COUNTED, (0, 1))}
    assert not failures(judge((stepped,), {at: [one] for at, one in enumerate(ONCE)}))


@pytest.mark.parametrize(
    ("grouped", "stepped", "parts", "group", "lack"),
    [
        ((1,), (1,), (1,), range(2), Lack.UNGROUPED),
        ((0, 1), (1,), (1,), range(2), Lack.UNFILLED),
        ((0, 1), (0, 1), (1,), range(2), Lack.LEFT_OUT),
        ((0, 1), (0, 1), (0, 1), range(1), Lack.LOST),
    ],
)
def test_why_a_norm_lacks_elements(grouped, stepped, parts, group, lack: Lack) -> None:
    """No optimizer has them, or not their gradients; or no rank adds them, or not all ranks."""
    update = Counting(Statistic.STEPPED, (), tuple(map(Term, stepped)))
    ranks = {}
    for at in range(2):
        alone = range(at, at + 1) if group == range(1) else group
        counted = rank(at, alone, parts=parts if at == 0 else parts[-1:])
        groups = (Hyperparameters(tuple(map(Term, grouped)), ()),)
        countings = (*counted.countings, update)
        ranks[at] = [dataclasses.replace(counted, countings=countings, stepped=groups)]
    found = judge((), ranks)
    lacks = {f.lack for key, f in found.findings.items() if key.index == 0 and key.name == NORM}
    assert lacks == {lack}
    # A step that the optimizer skips shows neither its groups nor its gradients.
    for at, (counted,) in ranks.items():
        ranks[at] = [dataclasses.replace(counted, countings=counted.countings[:1], stepped=())]
    (key,) = (key for key in judge((), ranks).findings if key.name == NORM)
    skipped = judge((), ranks).findings[key].lack
    assert skipped is (Lack.LOST if lack is Lack.LOST else Lack.LEFT_OUT)


@pytest.mark.parametrize(
    ("statistic", "sums", "lack"),
    [
        (Statistic.CLIPPED, (), Lack.LEFT_OUT),
        (Statistic.STEPPED, (), Lack.LEFT_OUT),
        (Statistic.STEPPED, (Sum(runs_of([1]), 0),), Lack.LOST),
        (Statistic.GRAD_NORM, (), Lack.LOST),
    ],
)
def test_what_one_rank_leaves_out(statistic: Statistic, sums: tuple[Sum, ...], lack: Lack) -> None:
    """Nothing is lost on the way if each rank has to do it by itself."""
    whole, none = Counting(statistic, parts=(Term(0),)), Counting(statistic, made=sums)
    update = Counting(Statistic.STEPPED, parts=(Term(0),))
    more = (update,) * (statistic is not Statistic.STEPPED)
    groups = (Hyperparameters((Term(0),), ()),)
    each = [Counted(1, (norm(),), (0,), (*more, counting), groups) for counting in (whole, none)]
    found = judge((), {at: [counted] for at, counted in enumerate(each)})
    assert failures(found) == {NORM: (Reason.NEVER_COUNTED, (1,))}
    assert [finding.lack for finding in found.findings.values()] == [lack]


def test_an_update() -> None:
    """A rank needs its own elements only: once from one of the ranks that it gathers from."""
    step = Statistic.STEPPED
    shards = [Part(NORM, (4,), (Box((start,), (2,), (0,)),)) for start in (0, 2)]
    made = Sum(runs_of(range(2)), 0, (Term(1),))
    counting = Counting(step, (made,), (), (Term(0),))
    ranks = {at: [Counted(1, (norm(), shards[at]), (0,), (counting,))] for at in range(2)}
    assert not failures(judge((), ranks))
    again = dataclasses.replace(counting, parts=(Term(1),))
    ranks[1] = [dataclasses.replace(ranks[1][0], countings=(again,))]
    assert failures(judge((), ranks)) == {NORM: (Reason.COUNTED_TWICE, (1,))}


def reduced(at: int, *made: Sum, own: tuple[int, ...] = (), steps: tuple[int, int] = (0, 4)):
    """Data-parallel rank ``at`` of four reduces a layer norm and steps some of its elements."""
    gradient = Part(NORM, (4, 4), (Box((at, 0), (1, 4), (0, 0)),))
    start, size = steps
    shard = Part(NORM, (4,), (Box((start,), (size,), (0,)),))
    left = {term.number for one in made for term in one.sums}
    results = tuple(Term(number) for number in range(len(made)) if number not in left)
    reduction = Counting(Statistic.REDUCED, made, tuple(map(Term, own)), results)
    update = Counting(Statistic.STEPPED, (), (Term(1),))
    return [Counted(1, (gradient, shard), (1,), (reduction, update))]


def reductions(found: Judgement) -> dict[str, tuple[Reason | None, tuple[int, ...]]]:
    index = Statistic.REDUCED.number
    return failures(
        dataclasses.replace(
            found, verdicts=tuple(one for one in found.verdicts if one.index == index)
        )
    )


def test_a_reduction() -> None:
    """Each rank's gradient once; never where no collective ran, or over too few ranks."""
    every, first = Sum(runs_of(range(4)), 0, (Term(0),)), Sum(runs_of(range(2)), 0, (Term(0),))
    again = Sum(runs_of(range(4)), 1, (), (Term(0),))
    alone = Sum(((2, 2, 1),), 0, (Term(0),))
    assert not reductions(judge((), {at: reduced(at, every) for at in range(4)}))
    ranks = {at: reduced(at, every, again) for at in range(4)}
    assert reductions(judge((), ranks)) == {NORM: (Reason.COUNTED_TWICE, (0, 1, 2, 3))}
    ranks = {at: reduced(at, own=(0,)) for at in range(4)}
    assert reductions(judge((), ranks)) == {NORM: (Reason.NEVER_COUNTED, (0, 1, 2, 3))}
    ranks = {at: reduced(at, first if at < 2 else alone) for at in range(3)}
    assert reductions(judge((), ranks)) == {NORM: (Reason.NEVER_COUNTED, (0, 1, 2))}
    (failed,) = [v for v in judge((), ranks).verdicts if v.verdict is Outcome.DIVERGED]
    assert failed.shape == (4,)


def test_a_reduction_in_instances() -> None:
    """A reduce-scatter within an instance, then an all-reduce of each shard among instances."""
    ranks = {}
    for at in range(4):
        instance, shard = divmod(at, 2)
        inner = Sum(runs_of(range(2 * instance, 2 * instance + 2)), 0, (Term(0),))
        outer = Sum(runs_of(range(shard, 4, 2)), 0, (), (Term(0),))
        ranks[at] = reduced(at, inner, outer, steps=(2 * shard, 2))
    assert not reductions(judge((), ranks))
    ranks[3] = reduced(3, inner, steps=(2, 2))
    assert reductions(judge((), ranks)) == {NORM: (Reason.NEVER_COUNTED, (1, 3))}


def test_nothing_is_said_without_buckets() -> None:
    """FSDP reduces gradients in its own way."""
    reference = reduced(0, Sum(((0, 0, 1),), 0, (Term(0),)))
    assert judge(reference, {0: []}).not_judged == ()


def clipped(values: dict[str, float]) -> Counted:
    parts = tuple(Part(name, (1,), (Box((0,), (1,), (0,)),)) for name in values)
    countings = [
        Counting(Statistic.CLIPPED, (), (Term(number),), (), value)
        for number, value in enumerate(values.values())
    ]
    return Counted(1, parts, tuple(range(len(parts))), tuple(countings))


def test_clipped_by_another_norm() -> None:
    """The norms' values do not matter, only which parameters share one."""
    reference = clipped({"a": 2.0, "b": 2.0, "mtp": 5.0})
    assert not failures(judge((reference,), {0: [clipped({"a": 2.1, "b": 2.1, "mtp": 4.9})]}))
    found = judge((reference,), {0: [clipped({"a": 2.1, "b": 2.1000001, "mtp": 4.9})]})
    assert failures(found) == {"b": (Reason.OTHER_NORM, (0,))}
    found = judge((reference,), {0: [clipped({"a": 2.1, "b": 2.1, "mtp": 2.1})]})
    assert failures(found) == {"mtp": (Reason.OTHER_NORM, (0,))}


def test_what_is_unknown_is_said() -> None:
    """An optimizer whose division is not known is not judged, by name."""
    ranks = {0: [rank(0, range(2), parts=(), unknown="Muon")], 1: [rank(1, range(2), parts=())]}
    found = judge((), ranks)
    assert not found.verdicts
    assert found.not_judged == ((Statistic.GRAD_NORM, "Muon"),)
    silent = {0: [dataclasses.replace(ranks[0][0], countings=())]}
    found = judge(ranks[1], silent)
    assert found.not_judged == ((Statistic.GRAD_NORM, "how it is computed"),)


@st.composite
def box_in(draw, shape):
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    sizes = [draw(st.integers(1, size - start)) for start, size in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(sizes), (0,) * len(shape))


@given(st.lists(box_in((3, 4)), max_size=4), st.lists(box_in((3, 4)), max_size=3), st.booleans())
def test_what_need_not_be_counted(boxes: list[Box], needed: list[Box], same: bool) -> None:
    """The usual cases have the answer that counting has, and so have stacks of ranks' pieces."""
    needed = boxes if same else needed
    shape = 3, 4
    assert _covered(shape, boxes, needed) == coverage(shape, boxes, needed)
    pieces = [dataclasses.replace(box, extent=(1, box.extent[1])) for box in boxes]
    for some in (boxes, pieces):
        assert coverage(shape, _stacked(some), needed) == coverage(shape, some, needed)
    ranks = [Box((rank, 0), (1, 4), (0, 0)) for rank in range(3)]
    assert _stacked(ranks) == [Box((0, 0), (3, 4), (0, 0))]


def stepped(*values: tuple[str, float], parts: tuple[int, ...] = (0,)) -> Hyperparameters:
    return Hyperparameters(tuple(map(Term, parts)), values)


def test_hyperparameters_of_each_parameter() -> None:
    """A parameter in a wrong group is named with both values; other groupings do not matter."""
    reference = Counted(
        *(1, (norm(), weight(0)), (0, 1), ()),
        (stepped(("lr", 1e-3), ("weight_decay", 0.0)), stepped(("lr", 1e-3), parts=(1,))),
    )
    eps = "eps", 1.0
    right, wrong = (
        Counted(1, (weight(0), norm()), (0, 1), (), (stepped(("lr", lr), eps, parts=(0, 1)),))
        for lr in (1e-3, 5e-3)
    )
    found = judge([reference], {0: [right], 1: [right]})
    assert [(one.name, one.verdict) for one in found.verdicts] == [
        ("hyperparameters", Outcome.PASS)
    ]
    found = judge([reference], {0: [right], 1: [wrong]})
    assert {(one.name, one.ranks) for one in found.verdicts if one.verdict.is_failure} == {
        (NORM, (1,)),
        (WEIGHT, (1,)),
    }
    assert set(found.findings.values()) == {
        OtherHyperparameters(Cause.HYPERPARAMETERS, values=(("lr", 5e-3, 1e-3),))
    }


def test_hyperparameters_of_the_next_step() -> None:
    """What the schedule sets after the step is compared by itself."""
    group = stepped(("lr", 1e-3))
    right, wrong = (
        Counted(1, (weight(0),), (0,), (), (dataclasses.replace(group, following=(("lr", lr),)),))
        for lr in (9e-4, 1e-3)
    )
    found = judge([right], {0: [right]})
    assert [(one.index, one.verdict) for one in found.verdicts] == [
        (HyperparametersIndex.STEP, Outcome.PASS),
        (HyperparametersIndex.NEXT, Outcome.PASS),
    ]
    found = judge([right], {0: [right], 1: [wrong]})
    failed = [one for one in found.verdicts if one.verdict.is_failure]
    assert [(one.name, one.index, one.ranks) for one in failed] == [
        (WEIGHT, HyperparametersIndex.NEXT, (1,))
    ]
    values = (("lr", 1e-3, 9e-4),)
    finding = OtherHyperparameters(Cause.HYPERPARAMETERS, values=values, following=True)
    assert [*found.findings.values()] == [finding]
    assert note_text(failed[0].notes[0]) == "its next step has lr 0.001 instead of 0.0009"
