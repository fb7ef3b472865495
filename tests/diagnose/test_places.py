# SPDX-License-Identifier: Apache-2.0
"""Where to look follows from the cause and from what ran."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.trace.collectives import UNRECORDED, Collective, Ledger, Phase
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
    Miscounted,
    OtherTime,
)
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import ROOT, Kind, Outcome
from tests.diagnose.judged_by_hand import judged
from tests.diagnose.ran_by_hand import (
    LINEAR,
    MODEL,
    NORM,
    B,
    F,
    U,
    collective,
    large,
    lookup,
    record,
    where,
)

PARTIAL = Finding(Cause.PARTIAL, ("tp",))
WEIGHT = f"{LINEAR}.weight"
FORWARD = collective("reduce", module=LINEAR, direction=F)
SMALL = ConstantFactor(Cause.TOO_SMALL, ("tp", "dp"), ratio=0.5)
BUILDERS = "Linear.__init__", "Linear.reset_parameters", "Model.__init__"
MEANS = collective("reduce_norms", reduction="avg", bytes=640)
NORMS, GRADIENTS = collective("reduce_norms"), collective("sync_grads", "dp", bytes=640)


def places(
    kind: Kind,
    name: str,
    finding: Finding | None,
    *calls: Collective,
    ledger: Ledger | None = None,
    others: tuple[Judged, ...] = (),
    before: Judged | None = None,
) -> tuple[Place, ...]:
    """Of a failure in the step made by hand."""
    verdict = judged(kind, name, Outcome.DIVERGED)
    diagnosis = Diagnosis(
        name=name,
        direction=verdict.direction,
        grounds=Grounds.FIRST_FAILURE,
        verdict=verdict,
        why=Explanation(finding),
        before=before,
    )
    made = Places(ledger or record(*calls), [verdict, *others])
    return made.of(diagnosis).why.places


@pytest.mark.parametrize(
    ("kind", "name", "finding", "calls", "first", "clue"),
    [
        # A primitive that other modules call too: its caller.
        (Kind.OUTPUT, LINEAR, large("tp"), (FORWARD,), "Linear.forward", Clue.REDUCES),
        (Kind.MAIN_GRAD, WEIGHT, large("tp"), (NORMS, GRADIENTS), "reduce_norms", Clue.REDUCES),
        (Kind.MAIN_GRAD, WEIGHT, large("dp"), (NORMS, GRADIENTS), "sync_grads", Clue.REDUCES),
        # The parameter lacks the mark that the reduction selects by.
        (Kind.MAIN_GRAD, WEIGHT, PARTIAL, (NORMS,), "Linear.__init__", Clue.MARKS),
        # The scale is set by the schedule.
        (Kind.GRAD_OUTPUT, ROOT, large("microbatches"), (), "run", Clue.AXIS),
        # It is called after the factor.
        (Kind.GRAD_OUTPUT, ROOT, large("loss_scale"), (), "scale_loss", Clue.NAMES),
        # A mean where a sum is too small.
        (Kind.MAIN_GRAD, WEIGHT, SMALL, (MEANS, GRADIENTS), "reduce_norms", Clue.REDUCES),
        (Kind.MAIN_GRAD, WEIGHT, SMALL, (NORMS, GRADIENTS), "sync_grads", Clue.REDUCES),
        (Kind.PARAM, WEIGHT, Finding(Cause.LAYER_NUMBERS, ("pp",)), (), "offset", Clue.AXIS),
        # The model chooses its layers.
        (Kind.PARAM, WEIGHT, Finding(Cause.LAYERS), (), "pipeline_layers", Clue.NAMES),
        (Kind.EXP_AVG, WEIGHT, large("clipping"), (), "clip_by_norm", Clue.NAMES),
        (Kind.METRIC, "z_loss", large("layers"), (), "aggregate", Clue.NAMES),
        (
            Kind.GRAD_NORM,
            "grad_norm",
            None,
            (collective("clip_by_norm", direction=U),),
            *("clip_by_norm", Clue.REDUCES),
        ),
    ],
)
def test_first_place(
    kind: Kind,
    name: str,
    finding: Finding | None,
    calls: tuple[Collective, ...],
    first: str,
    clue: Clue,
) -> None:
    """The most likely function, with what speaks for it."""
    suspects = places(kind, name, finding, *calls)
    assert (suspects[0].function, suspects[0].clue) == (first, clue)
    assert len(suspects) <= 3


@pytest.mark.parametrize("kind", [Kind.INPUT, Kind.GRAD_OUTPUT])
@pytest.mark.parametrize(("sender", "is_sent"), [(1, True), (0, False)])
def test_what_another_stage_sent(kind: Kind, sender: int, is_sent: bool) -> None:
    """The schedule, if it was right there; what ran around it, if it was right on the same rank."""
    before = judged(Kind.OUTPUT, NORM, ranks=(sender,))
    found = places(kind, LINEAR, None, before=before)
    assert ([place.function for place in found] == ["run", "scale_loss"]) == is_sent


def test_data() -> None:
    """What reads it, and nothing that lays out gradients."""
    found = places(Kind.TOKENS, "loss_mask", None)
    assert not {"sync_grads", "reduce_norms"} & {place.function for place in found}


def test_a_marked_parameter() -> None:
    """What selects by the mark is then more likely than what sets it."""
    marks = {"decoder.layers.*.linear.weight": ("sequence_parallel",)}
    ledger = record(NORMS, marks=marks)
    suspects = places(Kind.MAIN_GRAD, WEIGHT, PARTIAL, ledger=ledger)
    assert suspects[0].function == "reduce_norms"


@pytest.mark.parametrize("others", [(), ("sequence_parallel",)])
def test_a_mark_that_only_what_fails_has(others: tuple[str, ...]) -> None:
    """What selects parameters by it, before what reduces all."""
    marks = {
        "decoder.layers.*.linear.weight": ("sequence_parallel",),
        "decoder.layers.*.norm.weight": others,
    }
    ledger = record(NORMS, GRADIENTS, marks=marks)
    first = places(Kind.MAIN_GRAD, WEIGHT, None, ledger=ledger)[0]
    assert (first.clue is Clue.SELECTS) is not bool(others)
    assert first.function == ("sync_grads" if others else "reduce_norms")


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
    first = places(kind, WEIGHT, None, ledger=dataclasses.replace(ledger, sources=sources))[0]
    assert ((first.function, first.clue) == ("Linear.__init__", Clue.MARKS)) is is_first


@pytest.mark.parametrize("outcome", [Outcome.PASS, Outcome.DIVERGED])
def test_a_choice_by_marks_explains_few(outcome: Outcome) -> None:
    """If most gradients lack the reduction, it is not one that selects parameters."""
    others = tuple(
        judged(Kind.MAIN_GRAD, f"decoder.layers.0.{name}.weight", outcome) for name in "abc"
    )
    suspects = places(Kind.MAIN_GRAD, WEIGHT, PARTIAL, ledger=record(GRADIENTS), others=others)
    selecting = [place.function for place in suspects if place.clue is Clue.SELECTS]
    assert ("reduce_norms" in selecting) is (outcome is Outcome.PASS)


def test_what_selects_by_marks_for_another_axis() -> None:
    """What it selects is not what is missing."""
    finding = Finding(Cause.PARTIAL, ("dp",))
    marks = {
        f"decoder.layers.*.{name}.weight": ("sequence_parallel",) for name in ("linear", "norm")
    }
    suspects = places(Kind.MAIN_GRAD, WEIGHT, finding, ledger=record(GRADIENTS, marks=marks))
    assert "reduce_norms" not in {
        place.function for place in suspects if place.clue is Clue.SELECTS
    }


@pytest.mark.parametrize("few", [False, True])
def test_what_passes_over_some(few: bool) -> None:
    """The reduction reduced the others: what goes through all of them comes first."""
    others = tuple(judged(Kind.MAIN_GRAD, name) for name in "abc" if few)
    copies = Finding(Cause.COPY, ("dp",))
    suspects = places(Kind.MAIN_GRAD, WEIGHT, copies, GRADIENTS, others=others)
    assert suspects[0].function == ("finalize" if few else "sync_grads")


@pytest.mark.parametrize(
    ("lack", "few", "first", "clue"),
    [
        (Lack.UNGROUPED, True, "divide_parameters", Clue.SELECTS),
        (Lack.UNFILLED, True, "copy_grads", Clue.NAMES),
        (Lack.LEFT_OUT, True, "is_shared", Clue.SELECTS),
        # Marks select some: not if all are left out.
        (Lack.LEFT_OUT, False, "filter_grads", Clue.NAMES),
        (Lack.LOST, True, "clip_by_norm", Clue.REDUCES),
        (None, True, "clip_by_norm", Clue.REDUCES),
    ],
)
def test_what_a_norm_lacks(lack: Lack | None, few: bool, first: str, clue: Clue) -> None:
    """What divides parameters, copies gradients, filters these, or adds up ranks."""
    failure = judged(Kind.COUNTED, WEIGHT, Outcome.DIVERGED)
    others = [judged(Kind.MAIN_GRAD, name) for name in "abc" if few]
    finding = Miscounted(
        Cause.NEVER_COUNTED, statistic=Statistic.GRAD_NORM, least=0, most=0, names=(), lack=lack
    )
    made = Places(record(collective("clip_by_norm", direction=U)), [failure, *others])
    place = made.ranked(failure, finding)[0][1]
    assert (place.function, place.clue) == (first, clue)


def test_a_count_of_zeros() -> None:
    """The sum that counts them, not that of the norm."""
    calls = [collective(name, direction=U) for name in ("clip_by_norm", "count_zeros")]
    zeros = judged(Kind.COUNTED, WEIGHT, Outcome.DIVERGED, index=Statistic.NUM_ZEROS.number)
    twice = Finding(Cause.COUNTED_TWICE)
    assert Places(record(*calls), [zeros]).ranked(zeros, twice)[0][1].function == "count_zeros"


@pytest.mark.parametrize("last", [4, 6])
def test_parameters_that_were_not_sent(last: int) -> None:
    """Each rank has the right values of its own part, and nothing sent parameters."""
    spans = (0, (5, 9), 10), (1, (0, last), 10)
    stale = OtherTime(Cause.OTHER_TIME)
    failure = judged(Kind.PARAM, WEIGHT, Outcome.DIVERGED, index=1)
    finding = InPart(Cause.OTHER_TIME, fault=stale, spans=spans)
    first = Places(record(), [failure]).ranked(failure, finding)[0][1]
    assert ((first.function, first.clue) == ("sync_params", Clue.SILENT)) is (last < 5)


@pytest.mark.parametrize("few", [False, True])
def test_initial_values_of_most_parameters(few: bool) -> None:
    """What holds all parameters, not the constructor of one module."""
    others = tuple(judged(Kind.INITIAL, name) for name in "abc" if few)
    suspects = places(Kind.INITIAL, WEIGHT, Finding(Cause.INITIAL_VALUES), others=others)
    built = {"Linear.__init__", "Linear.reset_parameters"}
    assert (suspects[0].function in built) is few
    if not few:
        assert suspects[0].function == "Buffer.__init__"


def test_what_built_a_parameter() -> None:
    """It did not run in the step; what it called is shown alike, if nothing else speaks for it."""
    failure = judged(Kind.PARAM, f"{MODEL}.weight", Outcome.DIVERGED)
    ranked = Places(record(), [failure]).ranked(failure, None)
    clues = {place.function: place.clue for _, place in ranked}
    assert (clues["Model.__init__"], clues["pipeline_layers"]) == (Clue.BUILT, Clue.BUILT)


def test_a_factor_that_a_setter_was_given() -> None:
    """The backward pass of its class did not apply it, or twice."""
    finding = ConstantFactor(Cause.TOO_LARGE, ratio=2.0)
    ledger = record(factors={"Product.set_scale": 0.5})
    first = places(Kind.GRAD_INPUT, LINEAR, finding, ledger=ledger)[0]
    assert (first.function, first.clue) == ("Product.backward", Clue.VALUE)


@pytest.mark.parametrize("fails", [False, True])
def test_a_logged_loss_that_is_wrong_as_well(fails: bool) -> None:
    """What is named for it, where the cause is not known."""
    metric = judged(Kind.METRIC, "z_loss", Outcome.DIVERGED if fails else Outcome.PASS)
    failure = judged(Kind.GRAD_INPUT, MODEL, Outcome.DIVERGED)
    ranked = Places(record(), [failure, metric]).ranked(failure, None)
    clues = {place.function: place.clue for _, place in ranked}
    assert (clues["router_loss"] is Clue.NAMES) is fails


@pytest.mark.parametrize("given", [2.0, 0.5, -2.0])
def test_a_factor_of_the_size_of_the_error(given: float) -> None:
    """What applies it comes first, whether it was applied twice or not at all."""
    finding = ConstantFactor(Cause.TOO_LARGE, ratio=2.0)
    ledger = record(factors={"Product.forward": given, "reduce": 3.0})
    suspects = places(Kind.OUTPUT, LINEAR, finding, ledger=ledger)
    assert (suspects[0].function, suspects[0].clue) == ("Product.forward", Clue.VALUE)
    without = places(Kind.OUTPUT, LINEAR, finding, ledger=record())
    assert without[0].function != "Product.forward"


def test_a_factor_that_all_parameters_have() -> None:
    """It is not what is wrong if most gradients are right."""
    finding = ConstantFactor(Cause.TOO_LARGE, ("dp",), ratio=2.0)
    ledger = record(GRADIENTS, factors={"sync_grads": 2.0})
    others = tuple(judged(Kind.MAIN_GRAD, name, Outcome.PASS) for name in "abc")
    few = places(Kind.MAIN_GRAD, WEIGHT, finding, ledger=ledger, others=others)
    assert Clue.VALUE not in {place.clue for place in few}
    all_wrong = places(Kind.MAIN_GRAD, WEIGHT, finding, ledger=ledger)
    assert Clue.VALUE in {place.clue for place in all_wrong}


@pytest.mark.parametrize("given", [0.5, 1.0])
def test_a_number_that_the_reference_does_not_have(given: float) -> None:
    """What passed it on comes first, if it is off by the size of the error."""
    finding = ConstantFactor(Cause.TOO_LARGE, ratio=2.0)
    failure = judged(Kind.MAIN_GRAD, WEIGHT, Outcome.DIVERGED)
    ledger = record(GRADIENTS, factors={"sync_grads": given})
    expected = {where("sync_grads"): {"scaling_factor": (1.0,)}}
    first = Places(ledger, [failure], expected).ranked(failure, finding)[0][1]
    assert ((first.function, first.clue) == ("finalize", Clue.ORIGIN)) is (given == 0.5)


def test_groups_over_other_axes() -> None:
    """A function that names the axis of a missing reduction chose no group over it."""
    finding = Finding(Cause.PARTIAL, ("dp",))
    failure = judged(Kind.MAIN_GRAD, WEIGHT, Outcome.DIVERGED)
    for group, clue in (("tp", Clue.GROUP), ("dp", None)):
        ranked = Places(record(lookups=(lookup("sync_grads", group),)), [failure])
        places = {place.function: place for _, place in ranked.ranked(failure, finding)}
        assert (places["sync_grads"].clue is Clue.GROUP) is (clue is Clue.GROUP)
        # Where it is chosen, not where the function starts.
        assert places["sync_grads"].line == (7 if clue else 1)


@pytest.mark.parametrize("torn", [False, True])
def test_a_parameter_with_torn_shards(torn: bool) -> None:
    """What divided it among the ranks comes first."""
    ledger = record()
    sources = dataclasses.replace(ledger.sources, sharding=where("build_groups"))
    ledger = dataclasses.replace(ledger, sources=sources, torn=(WEIGHT,) * torn)
    failure = judged(Kind.PARAM_DELTA, WEIGHT, Outcome.DIVERGED)
    first = Places(ledger, [failure]).ranked(failure, None)[0][1]
    assert ((first.function, first.clue) == ("build_groups", Clue.DIVIDES)) is torn


def test_what_the_reduction_never_counts() -> None:
    """The reduction, not the norm, which is a sum too."""
    calls = GRADIENTS, collective("clip_by_norm", direction=U)
    verdict = judged(Kind.COUNTED, WEIGHT, Outcome.DIVERGED, index=Statistic.REDUCED.number)
    ranked = Places(record(*calls), [verdict]).ranked(
        verdict, Finding(Cause.NEVER_COUNTED, ("dp",))
    )
    assert ranked[0][1].function == "sync_grads"
    norm = judged(Kind.COUNTED, WEIGHT, Outcome.DIVERGED, index=Statistic.GRAD_NORM.number)
    ranked = Places(record(*calls), [norm]).ranked(norm, Finding(Cause.NEVER_COUNTED, ("dp",)))
    assert ranked[0][1].function == "clip_by_norm"


def test_the_line_of_a_call() -> None:
    """A function that calls the collective itself is shown with that line."""
    suspects = places(Kind.MAIN_GRAD, WEIGHT, large("dp"), GRADIENTS)
    assert str(suspects[0]) == "m.py:7 (sync_grads)"


def test_what_also_ran_where_all_is_right() -> None:
    """The same primitive made the right output of another module."""
    right = judged(Kind.OUTPUT, NORM)
    ranked = [
        Places(record(FORWARD), [judged(Kind.OUTPUT, LINEAR, Outcome.DIVERGED), *others]).ranked(
            judged(Kind.OUTPUT, LINEAR, Outcome.DIVERGED), large("tp")
        )
        for others in ((), (right,))
    ]
    before, after = (
        next(score for score, place in each if place.function == "reduce") for each in ranked
    )
    assert after < before


@pytest.mark.parametrize("ran", [False, True])
def test_silence(ran: bool) -> None:
    """A function communicates by its name, and did not, while others did over its axis."""
    gathered = collective("gather", module=LINEAR, direction=B)
    calls = [collective("reduce", module=NORM, direction=F), *[gathered] * ran]
    failure = judged(Kind.GRAD_INPUT, LINEAR, Outcome.DIVERGED)
    ranked = Places(record(*calls), [failure]).ranked(failure, None)
    clues = {place.function: place.clue for _, place in ranked}
    assert (clues["gather"] is Clue.SILENT) is not ran
    # It is known by its caller that this would be over the axis.
    assert (clues["all_to_all_heads"] is Clue.SILENT) is not ran


def test_what_is_too_large_lacks_nothing() -> None:
    """What did not communicate is not to blame."""
    failure = judged(Kind.GRAD_INPUT, LINEAR, Outcome.DIVERGED)
    calls = record(collective("reduce", module=NORM, direction=F))
    ranked = Places(calls, [failure]).ranked(failure, large("tp"))
    assert Clue.SILENT not in {place.clue for _, place in ranked}


def test_the_share_of_a_loss() -> None:
    """What sets the scale of the loss, or computes it, before what applies it."""
    share = LossShare(Cause.TOO_LARGE, losses=(Loss.Z,), fault=large("microbatches"))
    suspects = places(Kind.GRAD_INPUT, LINEAR, share)
    assert suspects[0].function == "run"


def test_what_is_named_for_another_loss() -> None:
    """It counts less than where it is named for the loss."""
    failure = judged(Kind.GRAD_INPUT, MODEL, Outcome.DIVERGED)
    of_loss, of_other = (
        next(
            score
            for score, place in Places(record(), [failure]).ranked(
                failure, LossShare(Cause.TOO_LARGE, losses=(loss,), fault=large("auxiliary"))
            )
            if place.function == "apply_aux_loss"
        )
        for loss in (Loss.AUXILIARY, Loss.GLOBAL)
    )
    assert of_other < 0.5 * of_loss


def test_code_that_is_not_megatrons() -> None:
    """A script's own function was not recorded, but it surely ran."""
    suspects = places(Kind.TOKENS, "tokens", None)
    assert suspects[0] == Place("script.py", 1, "forward_step", Clue.RAN)


@pytest.mark.parametrize(
    ("axes", "few", "known"), [("dp", 0, True), ("tp", 0, False), ("dp", 9, False)]
)
def test_what_computes_a_factor(axes: str, few: int, known: bool) -> None:
    """Before the step, from the axis concerned; not if the factor is right for most parameters."""
    others = [judged(Kind.MAIN_GRAD, f"{NORM}.a{n}x") for n in range(few)]
    failure = judged(Kind.MAIN_GRAD, WEIGHT, Outcome.DIVERGED)
    ranked = Places(record(GRADIENTS), [failure, *others]).ranked(failure, large(axes))
    clues = {place.function: place.clue for _, place in ranked}
    assert (clues.get("wrap") is Clue.SETS) is known
    assert clues.get("Buffer.__init__") is not Clue.SETS


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
    failure = judged(kind, name, Outcome.DIVERGED)
    module, phase = (LINEAR, F) if kind is Kind.OUTPUT else ("", Phase.GRADIENTS)
    places = {"Norm.forward": NORM, **dict.fromkeys(BUILDERS, "")}
    ran = [(edit, Execution.ELSEWHERE, (places.get(edit, module),)) for edit in changed]
    edits = [
        ChangedFunction("m.py", edit, 8 * bool(edit), *where, (phase,)) for edit, *where in ran
    ]
    ranked = Places(record(FORWARD), [failure], changed=edits).ranked(failure, PARTIAL)
    place = ranked[0][1]
    assert place.function == first
    assert (place.line == 8) == (first in changed)
    assert (place.clue in (Clue.CHANGED, Clue.FILE_CHANGED)) == (first in changed or "" in changed)


def test_a_factor_of_all_experts() -> None:
    """Experts have a factor of their own: most other gradients may be right."""
    expert = "decoder.layers.0.mlp.experts.linear.weight"
    others = [judged(Kind.MAIN_GRAD, f"{NORM}.a{n}x") for n in range(9)]
    failure = judged(Kind.MAIN_GRAD, expert, Outcome.DIVERGED)
    ranked = Places(record(GRADIENTS), [failure, *others]).ranked(failure, large("dp"))
    assert Clue.SETS in {place.clue for _, place in ranked}


def test_what_is_divided_by_a_coefficient() -> None:
    """What names the coefficient, and gives the value to what logs it."""
    assert places(Kind.METRIC, "z_loss", large("auxiliary"))[0].function == "attach"


def test_nothing_is_made_up() -> None:
    """Where nothing was recorded, nothing is known."""
    for kind in (Kind.OUTPUT, Kind.MAIN_GRAD, Kind.PARAM, Kind.METRIC, Kind.GRAD_NORM):
        assert places(kind, WEIGHT, PARTIAL, ledger=UNRECORDED) == ()
    tenth = judged(Kind.INPUT, LINEAR, Outcome.DIVERGED, index=9)  # that of no statistic
    assert Places(record(collective("reduce")), [tenth]).ranked(tenth, None) is not None


@pytest.mark.parametrize("kind", Kind)
def test_every_kind(kind: Kind) -> None:
    """Three places at most, most likely first, each once; B stands for what ran backwards."""
    suspects = places(kind, LINEAR, None, collective("reduce", module=LINEAR, direction=B))
    assert len({place.function for place in suspects}) == len(suspects) <= 3
