# SPDX-License-Identifier: Apache-2.0
"""Where to look follows from the cause and from what ran."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.trace.collectives import (
    UNRECORDED,
    Calls,
    Function,
    FunctionCall,
    Ledger,
    Phase,
    Sources,
)
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import ChangedFunction, Execution
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Explanation,
    Finding,
    InPart,
    Lack,
    Loss,
    LossShare,
    OtherHyperparameters,
    OtherTime,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import ROOT, Kind, Outcome
from tests.diagnose.judged_by_hand import diagnosed, judged
from tests.diagnose.ran_by_hand import (
    LINEAR,
    MODEL,
    NORM,
    WEIGHT,
    B,
    C,
    F,
    U,
    collective,
    large,
    lookup,
    never,
    record,
    where,
    wrong,
)

PARTIAL, PARTS = Finding(Cause.PARTIAL, ("tp",)), Finding(Cause.PARTS, ("tp",))
TWICE = ConstantFactor(Cause.TOO_LARGE, ratio=2.0)

FORWARD = collective("reduce", module=LINEAR, direction=F)
SMALL = ConstantFactor(Cause.TOO_SMALL, ("tp", "dp"), ratio=0.5)
BUILDERS = "Linear.__init__", "Linear.reset_parameters", "Model.__init__"
MEANS = collective("reduce_norms", reduction="avg", bytes=640)
NORMS, GRADIENTS = collective("reduce_norms"), collective("sync_grads", "dp", bytes=640)
GATHERED = collective("gather", module=LINEAR, direction=B)
ELSEWHERE = collective("reduce", module=NORM, direction=F)
NORM_SUM, ZEROS = (collective(name, direction=U) for name in ("clip_by_norm", "count_zeros"))
PASSING = tuple(judged(Kind.MAIN_GRAD, name) for name in "abc")  # few gradients fail


def places(
    failure: Judged,
    finding: Finding | None = None,
    ledger: Ledger | None = None,
    *others: Judged,
    **more: Any,
) -> tuple[Place, ...]:
    """Of a failure in the step made by hand."""
    diagnosis = diagnosed(failure, Explanation(finding), **more)
    return Places(ledger or record(), [failure, *others]).of(diagnosis).why.places


def clues(
    failure: Judged,
    finding: Finding | None = None,
    ledger: Ledger | None = None,
    *others: Judged,
) -> dict[str, Clue]:
    """What speaks for each suspect."""
    ranked = Places(ledger or record(), [failure, *others]).ranked(failure, finding)
    return {place.function: place.clue for _, place in ranked}


def marking(*linear: str, norm: tuple[str, ...] = ()) -> dict[str, tuple[str, ...]]:
    """Marks of parameters."""
    return {"decoder.layers.*.linear.weight": linear, "decoder.layers.*.norm.weight": norm}


def stale(last: int) -> InPart:
    """Two ranks hold values from before the step in parts, the second up to an element."""
    spans = (0, (5, 9), 10), (1, (0, last), 10)
    return InPart(Cause.OTHER_TIME, fault=OtherTime(Cause.OTHER_TIME), spans=spans)


def torn(*names: str) -> Ledger:
    """The record of a step in which parameters have torn shards."""
    ledger = record()
    sources = dataclasses.replace(ledger.sources, sharding=where("build_groups"))
    return dataclasses.replace(ledger, sources=sources, torn=names)


G = wrong(Kind.MAIN_GRAD)


def hyperparameters(count: int) -> OtherHyperparameters:
    """So many that differ."""
    values = ("lr", 2.0, 1.0), ("weight_decay", 0.1, 0.0)
    return OtherHyperparameters(Cause.HYPERPARAMETERS, values=values[:count])


COUNTED = {of: wrong(Kind.COUNTED, index=of.number) for of in Statistic}
MARKED = "sequence_parallel"
SHARE = LossShare(Cause.TOO_LARGE, losses=(Loss.Z,), fault=large("microbatches"))
FIRST: list[tuple[Judged, Finding | None, Ledger, tuple[Judged, ...], str, Clue]] = [
    # A primitive that other modules call too: its caller.
    (
        *(wrong(Kind.OUTPUT, LINEAR), large("tp"), record(FORWARD), ()),
        *("Linear.forward", Clue.REDUCES),
    ),
    (G, large("tp"), record(NORMS, GRADIENTS), (), "reduce_norms", Clue.REDUCES),
    (G, large("dp"), record(NORMS, GRADIENTS), (), "sync_grads", Clue.REDUCES),
    # The parameter lacks the mark that the reduction selects by, or something selects by the mark.
    (G, PARTIAL, record(NORMS), (), "Linear.__init__", Clue.MARKS),
    (G, PARTIAL, record(NORMS, marks=marking(MARKED)), (), "reduce_norms", Clue.REDUCES),
    (G, PARTS, record(NORMS, marks=marking(MARKED)), (), "Linear.__init__", Clue.MARKS),
    # A mark that only what fails has.
    (G, None, record(NORMS, GRADIENTS, marks=marking(MARKED)), (), "reduce_norms", Clue.SELECTS),
    (
        *(G, None, record(NORMS, GRADIENTS, marks=marking(MARKED, norm=(MARKED,))), ()),
        *("sync_grads", Clue.NAMES),
    ),
    # The reduction reduced the others: what goes through all of them comes first.
    (G, Finding(Cause.COPY, ("dp",)), record(GRADIENTS), (), "sync_grads", Clue.REDUCES),
    (G, Finding(Cause.COPY, ("dp",)), record(GRADIENTS), PASSING, "finalize", Clue.REDUCES),
    # The scale is set by the schedule.
    (wrong(Kind.GRAD_OUTPUT, ROOT), large("microbatches"), record(), (), "run", Clue.AXIS),
    (wrong(Kind.GRAD_INPUT, LINEAR), SHARE, record(), (), "run", Clue.SETS),
    # It is called after the factor.
    (wrong(Kind.GRAD_OUTPUT, ROOT), large("loss_scale"), record(), (), "scale_loss", Clue.NAMES),
    # A mean where a sum is too small.
    (G, SMALL, record(MEANS, GRADIENTS), (), "reduce_norms", Clue.REDUCES),
    (G, SMALL, record(NORMS, GRADIENTS), (), "sync_grads", Clue.REDUCES),
    (wrong(Kind.PARAM), Finding(Cause.LAYER_NUMBERS, ("pp",)), record(), (), "offset", Clue.AXIS),
    (wrong(Kind.PARAM), Finding(Cause.LAYERS), record(), (), "pipeline_layers", Clue.NAMES),
    (wrong(Kind.LOADED, index=1), Finding(Cause.THAWED), record(), (), "freeze_layers", Clue.NAMES),
    (wrong(Kind.EXP_AVG), large("clipping"), record(), (), "clip_by_norm", Clue.NAMES),
    (wrong(Kind.METRIC, "z_loss"), large("layers"), record(), (), "aggregate", Clue.NAMES),
    # What names the coefficient, and gives the value to what logs it.
    (wrong(Kind.METRIC, "z_loss"), large("auxiliary"), record(), (), "attach", Clue.SCALES),
    (
        *(wrong(Kind.GRAD_NORM, "grad_norm"), None, record(NORM_SUM), ()),
        *("clip_by_norm", Clue.REDUCES),
    ),
    # What divides parameters, copies gradients, filters these, or adds up ranks.
    *(
        (COUNTED[Statistic.GRAD_NORM], never(lack), record(NORM_SUM), others, first, clue)
        for lack, others, first, clue in [
            (Lack.UNGROUPED, PASSING, "divide_parameters", Clue.SELECTS),
            (Lack.UNFILLED, PASSING, "copy_grads", Clue.NAMES),
            (Lack.LEFT_OUT, PASSING, "is_shared", Clue.SELECTS),
            # Marks select some: not if all are left out.
            (Lack.LEFT_OUT, (), "filter_grads", Clue.NAMES),
            (Lack.LOST, PASSING, "clip_by_norm", Clue.REDUCES),
            (None, PASSING, "clip_by_norm", Clue.REDUCES),
        ]
    ),
    # The sum that counts zeros, not that of the norm; the reduction, which is a sum too.
    *(
        (COUNTED[statistic], Finding(cause, axes), record(*calls), (), first, Clue.REDUCES)
        for statistic, cause, axes, calls, first in [
            *[(Statistic.NUM_ZEROS, Cause.COUNTED_TWICE, (), (NORM_SUM, ZEROS), "count_zeros")],
            *[
                (statistic, Cause.NEVER_COUNTED, ("dp",), (GRADIENTS, NORM_SUM), first)
                for statistic, first in (
                    (Statistic.REDUCED, "sync_grads"),
                    (Statistic.GRAD_NORM, "clip_by_norm"),
                )
            ],
        ]
    ),
    # Each rank has the right values of its own part, and nothing sent parameters.
    (wrong(Kind.PARAM, index=1), stale(4), record(), (), "sync_params", Clue.SILENT),
    (wrong(Kind.PARAM, index=1), stale(6), record(), (), "sync_params", Clue.NAMES),
    # The backward pass of its class did not apply the factor that a setter was given, or twice.
    (
        *(wrong(Kind.GRAD_INPUT, LINEAR), TWICE, record(factors={"Product.set_scale": 0.5}), ()),
        *("Product.backward", Clue.VALUE),
    ),
    # What applies a factor of the size of the error, whether it was applied twice or not at all.
    *(
        (
            *(wrong(Kind.OUTPUT, LINEAR), TWICE),
            *(record(factors={"Product.forward": given, "reduce": 3.0}), ()),
            *("Product.forward", Clue.VALUE),
        )
        for given in (2.0, 0.5, -2.0)
    ),
    (wrong(Kind.OUTPUT, LINEAR), TWICE, record(), (), "Linear.forward", Clue.RAN),
    # What divided a parameter with torn shards among the ranks.
    (wrong(Kind.PARAM_DELTA), None, torn(WEIGHT), (), "build_groups", Clue.DIVIDES),
    (wrong(Kind.PARAM_DELTA), None, torn(), (), "step", Clue.NAMES),
]


@pytest.mark.parametrize(("failure", "finding", "ledger", "others", "first", "clue"), FIRST)
def test_first_place(
    failure: Judged,
    finding: Finding | None,
    ledger: Ledger,
    others: tuple[Judged, ...],
    first: str,
    clue: Clue,
) -> None:
    """The most likely function, with what speaks for it."""
    suspects = places(failure, finding, ledger, *others)
    assert (suspects[0].function, suspects[0].clue) == (first, clue)
    assert len(suspects) <= 3


def in_part(few: int, outcome: Outcome = Outcome.PASS) -> tuple[Judged, ...]:
    """Other gradients of layers."""
    return tuple(judged(Kind.MAIN_GRAD, f"{NORM}.a{n}x", outcome) for n in range(few))


EXPERT = wrong(Kind.MAIN_GRAD, "decoder.layers.0.mlp.experts.linear.weight")
SPEAKS: list[tuple[Judged, Finding | None, Ledger, tuple[Judged, ...], str, Clue, bool]] = [
    # If most gradients lack the reduction, it is not one that selects parameters.
    (G, PARTIAL, record(GRADIENTS), in_part(3), "reduce_norms", Clue.SELECTS, True),
    *(
        (G, finding, ledger, others, "reduce_norms", Clue.SELECTS, False)
        for finding, ledger, others in (
            (PARTIAL, record(GRADIENTS), in_part(3, Outcome.DIVERGED)),
            # What it selects is not what is missing.
            (
                Finding(Cause.PARTIAL, ("dp",)),
                record(GRADIENTS, marks=marking(MARKED, norm=(MARKED,))),
                (),
            ),
        )
    ),
    # What built a parameter did not run in the step; what it called is shown alike.
    *(
        (wrong(Kind.PARAM, f"{MODEL}.weight"), None, record(), (), function, Clue.BUILT, True)
        for function in ("Model.__init__", "pipeline_layers")
    ),
    # What is named for a logged loss that is wrong as well, where the cause is not known.
    *(
        (
            *(wrong(Kind.GRAD_INPUT, MODEL), None, record()),
            *((judged(Kind.METRIC, "z_loss", outcome),), "router_loss", Clue.NAMES),
            outcome is Outcome.DIVERGED,
        )
        for outcome in (Outcome.DIVERGED, Outcome.PASS)
    ),
    # A factor that all parameters have is not what is wrong if most gradients are right.
    *(
        (
            *(
                G,
                dataclasses.replace(TWICE, axes=("dp",)),
                record(GRADIENTS, factors={"sync_grads": 2.0}),
            ),
            *(others, "sync_grads", Clue.VALUE, not others),
        )
        for others in (PASSING, ())
    ),
    # What communicates by its name did not, while others did over its axis: for all_to_all_heads
    # its caller knows that this would be over the axis. What is too large lacks nothing.
    *(
        (
            *(wrong(Kind.GRAD_INPUT, LINEAR), finding, record(ELSEWHERE, *calls), ()),
            *(function, Clue.SILENT, not calls and finding is None),
        )
        for finding, calls in ((None, ()), (None, (GATHERED,)), (large("tp"), ()))
        for function in ("gather", "all_to_all_heads")
    ),
    # What computes a factor before the step, from the axis concerned; not if the factor is right
    # for most parameters. Experts have a factor of their own: most other gradients may be right.
    *(
        (failure, large(axis), record(GRADIENTS), in_part(few), "wrap", Clue.SETS, known)
        for failure, axis, few, known in (
            (G, "dp", 0, True),
            (G, "tp", 0, False),
            (G, "dp", 9, False),
            (EXPERT, "dp", 9, True),
        )
    ),
    (G, large("dp"), record(GRADIENTS), (), "Buffer.__init__", Clue.SETS, False),
]


@pytest.mark.parametrize(
    ("failure", "finding", "ledger", "others", "function", "clue", "speaks"), SPEAKS
)
def test_what_speaks_for_a_function(
    failure: Judged,
    finding: Finding | None,
    ledger: Ledger,
    others: tuple[Judged, ...],
    function: str,
    clue: Clue,
    speaks: bool,
) -> None:
    """The clue that is worth most."""
    assert (clues(failure, finding, ledger, *others).get(function) is clue) is speaks


@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.GRAD_OUTPUT])
@pytest.mark.parametrize(("sender", "is_sent"), [(1, True), (0, False)])
def test_what_another_stage_sent(kind: Kind, sender: int, is_sent: bool) -> None:
    """The schedule, if it was right there; what ran around it, if it was right on the same rank."""
    before = judged(Kind.OUTPUT, NORM, ranks=(sender,))
    found = places(wrong(kind, LINEAR), before=before)
    assert ([place.function for place in found] == ["run", "scale_loss"]) == is_sent


def test_data() -> None:
    """What reads it, and nothing that lays out gradients."""
    found = places(wrong(Kind.TOKENS, "loss_mask"))
    assert not {"sync_grads", "reduce_norms"} & {place.function for place in found}


@pytest.mark.parametrize("kind", [Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.HYPERPARAMETERS])
@pytest.mark.parametrize(
    ("mark", "is_first"), [("sequence_parallel", True), ("shared", False), ("allreduce", False)]
)
def test_a_mark_that_only_some_ranks_have_set(kind: Kind, mark: str, is_first: bool) -> None:
    """What names it before the step, unless copies differ in it by design."""
    ledger = record(GRADIENTS)
    calls = dataclasses.replace(
        ledger.sources.calls, partial={"decoder.layers.*.linear.weight": (mark,)}
    )
    sources = dataclasses.replace(ledger.sources, calls=calls)
    first = places(wrong(kind), None, dataclasses.replace(ledger, sources=sources))[0]
    assert ((first.function, first.clue) == ("Linear.__init__", Clue.MARKS)) is is_first


@pytest.mark.parametrize("given", [0.5, 1.0])
def test_a_number_that_the_reference_does_not_have(given: float) -> None:
    """What passed it on comes first, if it is off by the size of the error."""
    ledger = record(GRADIENTS, factors={"sync_grads": given})
    expected = {where("sync_grads"): {"scaling_factor": (1.0,)}}
    first = Places(ledger, [G], expected).ranked(G, TWICE)[0][1]
    assert ((first.function, first.clue) == ("finalize", Clue.ORIGIN)) is (given == 0.5)


def test_groups_over_other_axes() -> None:
    """A function that names the axis of a missing reduction chose no group over it."""
    finding = Finding(Cause.PARTIAL, ("dp",))
    for group, is_clue in (("tp", True), ("dp", False)):
        ranked = Places(record(lookups=(lookup("sync_grads", group),)), [G]).ranked(G, finding)
        (place,) = (place for _, place in ranked if place.function == "sync_grads")
        assert (place.clue is Clue.GROUP) is is_clue
        # Where it is chosen, not where the function starts.
        assert place.line == (7 if is_clue else 1)


def test_the_line_of_a_call() -> None:
    """A function that calls the collective itself is shown with that line."""
    assert str(places(G, large("dp"), record(GRADIENTS))[0]) == "m.py:7 (sync_grads)"


def test_what_also_ran_where_all_is_right() -> None:
    """The same primitive made the right output of another module."""
    failure, right = wrong(Kind.OUTPUT, LINEAR), judged(Kind.OUTPUT, NORM)
    before, after = (
        score
        for others in ((), (right,))
        for score, place in Places(record(FORWARD), [failure, *others]).ranked(failure, large("tp"))
        if place.function == "reduce"
    )
    assert after < before


def test_what_is_named_for_another_loss() -> None:
    """It counts less than where it is named for the loss."""
    failure = wrong(Kind.GRAD_INPUT, MODEL)
    of_loss, of_other = (
        score
        for loss in (Loss.AUXILIARY, Loss.GLOBAL)
        for score, place in Places(record(), [failure]).ranked(
            failure, LossShare(Cause.TOO_LARGE, losses=(loss,), fault=large("auxiliary"))
        )
        if place.function == "apply_aux_loss"
    )
    assert of_other < 0.5 * of_loss


def test_code_that_is_not_megatrons() -> None:
    """A script's own function was not recorded, but it surely ran."""
    assert places(wrong(Kind.TOKENS, "tokens"))[0] == Place(
        "script.py", 1, "forward_step", Clue.RAN
    )


@pytest.mark.parametrize(
    ("kind", "name", "changed", "first"),
    [
        (Kind.OUTPUT, LINEAR, ["Product.forward"], "Product.forward"),
        (Kind.OUTPUT, LINEAR, ["Norm.forward", "reduce"], "reduce"),
        # It ran in another module, or not at all.
        (Kind.OUTPUT, LINEAR, ["Norm.forward", "absent"], "Linear.forward"),
        (Kind.OUTPUT, LINEAR, ["Norm.forward", "Model.__init__"], "Linear.forward"),
        (Kind.MAIN_GRAD, WEIGHT, ["Model.__init__"], "Model.__init__"),
        (Kind.OUTPUT, LINEAR, ["Linear.__init__"], "Linear.__init__"),
        (Kind.MAIN_GRAD, WEIGHT, ["finalize"], "finalize"),
        # Any function of the file may be the changed one.
        (Kind.OUTPUT, LINEAR, [""], "Linear.forward"),
        # Among several changes, other evidence counts more.
        (Kind.OUTPUT, LINEAR, ["Product.forward", "Linear.reset_parameters"], "Linear.forward"),
    ],
)
def test_what_the_user_changed(kind: Kind, name: str, changed: list[str], first: str) -> None:
    """It is the first to look at if it ran in the culprit, or else if it built the model."""
    failure = wrong(kind, name)
    module, phase = (LINEAR, F) if kind is Kind.OUTPUT else ("", Phase.GRADIENTS)
    places = {"Norm.forward": NORM, **dict.fromkeys(BUILDERS, "")}
    ran = [(edit, Execution.ELSEWHERE, (places.get(edit, module),)) for edit in changed]
    edits = [
        ChangedFunction("m.py", edit, 8 * bool(edit), *where, (phase,)) for edit, *where in ran
    ]
    place = Places(record(FORWARD), [failure], changed=edits).ranked(failure, PARTIAL)[0][1]
    assert place.function == first
    assert (place.line == 8) == (first in changed)
    assert (place.clue in (Clue.CHANGED, Clue.FILE_CHANGED)) == (first in changed or "" in changed)


@pytest.mark.parametrize(
    ("failure", "finding", "phase", "functions", "first"),
    [
        # What marks parameters, not only what made them.
        (G, PARTIAL, C, {"make": {}, "tie": {"marks": ("shared",)}}, "tie"),
        # What a sample holds is right, if it is another rank's.
        (
            *(wrong(Kind.TOKENS, "tokens"), OtherTime(Cause.OTHER_TIME, microbatch=2)),
            *(Phase.SCRIPT, {"Rows.__getitem__": {"moves": True}, "Dealt.ranks": {}}),
            "Dealt.ranks",
        ),
        # Several numbers are those of another group: nothing was scaled.
        *(
            (
                *(wrong(Kind.HYPERPARAMETERS), hyperparameters(count)),
                *(
                    C,
                    {
                        "scale_group": {"part": U, "scales": True},
                        "groups": {"part": U, "size": 200},
                    },
                ),
                first,
            )
            for count, first in ((1, "scale_group"), (2, "groups"))
        ),
    ],
)
def test_functions_of_a_script(
    failure: Judged,
    finding: Finding,
    phase: Phase,
    functions: dict[str, dict[str, Any]],
    first: str,
) -> None:
    """Each is the user's own; one fits the failure best."""
    known = {"part": Phase.SCRIPT, "own": True, "size": 100}
    ran = tuple(Function("own.py", 1, name, **known | more) for name, more in functions.items())
    calls = tuple(FunctionCall(number, -1, "", phase) for number in range(len(ran)))
    ledger = Ledger(sources=Sources(calls=Calls(ran, calls)))
    assert Places(ledger, [failure, *PASSING]).ranked(failure, finding)[0][1].function == first


def test_nothing_is_made_up() -> None:
    """Where nothing was recorded, nothing is known."""
    for kind in (Kind.OUTPUT, Kind.MAIN_GRAD, Kind.PARAM, Kind.METRIC, Kind.GRAD_NORM):
        assert places(wrong(kind), PARTIAL, UNRECORDED) == ()


@pytest.mark.parametrize("few", [False, True])
def test_initial_values_of_most_parameters(few: bool) -> None:
    """What holds all parameters, not the constructor of one module."""
    others = [judged(Kind.INITIAL, name) for name in "abc" if few]
    first = places(wrong(Kind.INITIAL), Finding(Cause.INITIAL_VALUES), None, *others)[0].function
    assert first == ("Linear.__init__" if few else "Buffer.__init__")


@pytest.mark.parametrize(("kind", "index"), [*((kind, 0) for kind in Kind), (Kind.INPUT, 9)])
def test_every_kind(kind: Kind, index: int) -> None:
    """Three places at most, most likely first, each once; an index may be that of no statistic."""
    backward = collective("reduce", module=LINEAR, direction=B)
    suspects = places(wrong(kind, LINEAR, index), None, record(backward))
    assert len({place.function for place in suspects}) == len(suspects) <= 3
