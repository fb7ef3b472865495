# SPDX-License-Identifier: Apache-2.0
"""Which functions may have made what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.diagnose.anchors import anchor_of
from megatron_ttrace.diagnose.code import Code
from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.diagnose.suspects import Suspects
from megatron_ttrace.trace.collectives import FunctionCall, Ledger, Phase, pattern
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Explanation,
    Finding,
    Lack,
    Loss,
    LossShare,
    OtherSetting,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.places import Clue
from megatron_ttrace.trace.records import ROOT, Kind, LoadedIndex, Outcome
from tests.diagnose.judged_by_hand import diagnosed, judged
from tests.diagnose.ran_by_hand import (
    CODES,
    FUNCTIONS,
    LAYER,
    LINEAR,
    MODEL,
    NORM,
    WEIGHT,
    large,
    never,
    record,
    where,
    wrong,
)

NAMES = list(FUNCTIONS)


def suspects(
    failure: Judged,
    finding: Finding | None = None,
    *,
    few: bool = False,
    whole: bool = False,
    logged: Mapping[str, bool] = MappingProxyType({}),
    failing: Collection[str] = (),
    ledger: Ledger | None = None,
) -> Suspects:
    """Of a failure in the step made by hand."""
    outcomes: Any = SimpleNamespace(
        share=lambda _: 0.1 if few else 1.0,
        failed=lambda *_: whole,
        losses=lambda: logged,
        names=lambda _: failing,
        is_repeated=False,
    )
    known = ledger or record()
    return Suspects(Code(known), known, outcomes, failure, finding, sent=False)


def weights(failure: Judged, finding: Finding | None = None, **more: Any) -> dict[str, float]:
    """Of the suspects, by name."""
    found = suspects(failure, finding, **more).weights
    assert all(found.values()), "what has no weight would be one as soon as the user changes it"
    return {NAMES[number]: weight for number, weight in found.items()}


@pytest.mark.parametrize(
    ("failure", "suspected", "others"),
    [
        (
            *(wrong(Kind.OUTPUT, LINEAR), "Linear.forward reduce Product.forward hook"),
            "Norm.forward run Model.__init__",
        ),
        # What contains a module of another package gave it its sizes.
        (wrong(Kind.OUTPUT, NORM), "Model.__init__", ""),
        (
            wrong(Kind.GRAD_INPUT, LINEAR),
            # It is computed from what was recomputed.
            "Product.backward reduce Product.forward run checkpoint",
            "Norm.forward Linear.backward_dw",
        ),
        (wrong(Kind.GRAD_OUTPUT, ROOT), "run scale_loss", "step"),
        # A delayed gradient is computed after the backward pass, outside of the module's.
        (wrong(Kind.MAIN_GRAD), "finalize sync_grads reduce_norms run Linear.backward_dw", "step"),
        (wrong(Kind.PARAM_DELTA), "step clip_by_norm", "Linear.forward"),
        (wrong(Kind.GRAD_NORM, "grad_norm"), "step clip_by_norm", "Linear.forward"),
        (wrong(Kind.PARAM), "Linear.__init__ offset", "Linear.forward"),
        (wrong(Kind.METRIC, "z_loss"), "log Tracker.aggregate router_loss attach", "train"),
        (wrong(Kind.METRIC, "scheduled-samples"), "log train", "Scheduler.step"),
        (wrong(Kind.BUFFER, f"{LINEAR}.scale"), "finalize Linear.forward", "Norm.forward"),
        # What a model is called with was divided among ranks.
        (wrong(Kind.INPUT, ROOT), "run divide_batch", "step"),
        (wrong(Kind.INPUT, LINEAR), "Layer.forward prepare", "divide_batch router_loss"),
        # A context of FP8 is entered around layers, or where they are recomputed.
        (wrong(Kind.PRECISION, LINEAR), "Layer.forward checkpoint", "finalize"),
    ],
)
def test_suspects(failure: Judged, suspected: str, others: str) -> None:
    """What ran in that module and direction, or in that part of the step."""
    names = weights(failure).keys()
    assert names >= set(suspected.split())
    assert names.isdisjoint(others.split())


INSIDE, OUTSIDE = "Product.forward", "Layer.forward"
BACKWARD, FORWARD = "Product.backward", "Linear.forward"
PARTIAL, MARKED = Finding(Cause.PARTIAL, ("tp",)), record(marks={pattern(WEIGHT): ("shared",)})
CONSTRUCTORS = "Linear.__init__", "Buffer.__init__"


@pytest.mark.parametrize(
    ("failure", "finding", "more", "likelier", "other"),
    [
        # What froze a parameter ran while the model was built.
        (wrong(Kind.MAIN_GRAD), Finding(Cause.FROZEN), {}, "Linear.__init__", "finalize"),
        (wrong(Kind.MAIN_GRAD), Finding(Cause.THAWED), {}, "pipeline_layers", "finalize"),
        # What a module is given is made around it, or farther out; hardly inside.
        (wrong(Kind.INPUT, LINEAR), None, {}, OUTSIDE, INSIDE),
        (wrong(Kind.GRAD_INPUT, LINEAR, outcome=Outcome.MISSING), None, {}, OUTSIDE, INSIDE),
        (
            *(wrong(Kind.ROUTING, "decoder.layers.0.experts", outcome=Outcome.UNCOVERED), None),
            *({}, OUTSIDE, INSIDE),
        ),
        # If the weight's gradient is wrong too, so is the input of the last backward function.
        (wrong(Kind.GRAD_INPUT, LINEAR), large("tp"), {"whole": True}, BACKWARD, FORWARD),
        (wrong(Kind.GRAD_INPUT, LINEAR), None, {}, BACKWARD, FORWARD),
        (wrong(Kind.GRAD_INPUT, LINEAR), None, {"whole": True}, FORWARD, BACKWARD),
        # What built the optimizer before what updates other parameters, if it is never updated.
        *(
            (wrong(kind), Finding(cause), {}, "build_groups", "step")
            for kind, cause in (
                (Kind.PARAM_DELTA, Cause.NEVER_COUNTED),
                (Kind.HYPERPARAMETERS, Cause.HYPERPARAMETERS),
            )
        ),
        (wrong(Kind.PARAM_DELTA), large("dp"), {}, "step", "build_groups"),
        # What is called first after the model has not made its inputs.
        (wrong(Kind.INPUT, ROOT), None, {}, "get_batch", "loss_func"),
        (wrong(Kind.LOSS, ROOT), None, {}, "loss_func", "get_batch"),
        # What allocates the buffer of a gradient that was rounded, before what reduces it.
        (wrong(Kind.MAIN_GRAD), Finding(Cause.PRECISION), {}, "Buffer.__init__", "sync_grads"),
        # What reductions select by marks: a parameter that is copied has none, or one is not read.
        (wrong(Kind.MAIN_GRAD), PARTIAL, {"few": True}, "Linear.forward", "finalize"),
        (wrong(Kind.MAIN_GRAD), PARTIAL, {"few": True, "ledger": MARKED}, "finalize", FORWARD),
        (wrong(Kind.MAIN_GRAD), PARTIAL, {}, "finalize", "Linear.forward"),
        # What logs all numbers, or only this one.
        (wrong(Kind.METRIC, "z_loss"), None, {"few": True}, "attach", "Tracker.aggregate"),
        (wrong(Kind.METRIC, "z_loss"), None, {}, "Tracker.aggregate", "attach"),
        # Marks that most have lost were not forgotten by each constructor.
        (wrong(Kind.PARAM, outcome=Outcome.SHAPE), None, {"few": True}, *CONSTRUCTORS),
        (wrong(Kind.PARAM, outcome=Outcome.SHAPE), None, {}, *CONSTRUCTORS[::-1]),
    ],
)
def test_the_likelier_of_two(
    failure: Judged, finding: Finding | None, more: dict[str, Any], likelier: str, other: str
) -> None:
    """Both are suspects."""
    found = weights(failure, finding, **more)
    assert found[likelier] > found[other]


@pytest.mark.parametrize(("modules", "given"), [(1, set()), (2, {"Config.__post_init__"})])
def test_what_draws_initial_values(modules: int, given: set[str]) -> None:
    """If those of several modules are wrong, something that all were given; or nothing did."""
    failing = [WEIGHT, f"{NORM}.weight"][:modules]
    clues = suspects(wrong(Kind.INITIAL), failing=failing).clues
    assert {NAMES[n] for n, known in clues.items() if Clue.SETS in known} == given
    for nothing in (wrong(Kind.PARAM), wrong(Kind.INITIAL, outcome=Outcome.NONFINITE)):
        clues = suspects(nothing, failing=failing).clues
        assert not any(Clue.SETS in known for known in clues.values())


def test_gradients_where_the_outputs_are_right() -> None:
    """That the module's own outputs are right says nothing for its functions."""
    failure, right = wrong(Kind.MAIN_GRAD), judged(Kind.OUTPUT, LINEAR)
    before, after = (
        Places(record(), [failure, *others]).ranked(failure, PARTIAL) for others in ((), (right,))
    )
    assert before == after


def test_what_passes_an_input() -> None:
    """What calls the module, and not what only enters it."""
    clues = suspects(wrong(Kind.INPUT, LINEAR)).clues
    assert [NAMES[n] for n, known in clues.items() if Clue.PASSES in known] == ["Layer.forward"]


def test_what_sets_a_scale() -> None:
    """The caller of another function of the class whose backward ran."""
    clues = suspects(wrong(Kind.GRAD_INPUT, LINEAR)).clues
    assert [NAMES[n] for n, known in clues.items() if Clue.SETS in known] == ["run"]


def test_backward_sets_nothing() -> None:
    """That a class's backward also ran in another module says nothing about what calls it."""
    known = record()
    calls = known.sources.calls
    elsewhere = FunctionCall(
        NAMES.index("Product.backward"), NAMES.index("step"), pattern(NORM), Phase.BACKWARD
    )
    calls = dataclasses.replace(calls, calls=(*calls.calls, elsewhere))
    known = dataclasses.replace(known, sources=dataclasses.replace(known.sources, calls=calls))
    clues = suspects(wrong(Kind.GRAD_INPUT, LINEAR), ledger=known).clues
    assert [NAMES[n] for n, known in clues.items() if Clue.SETS in known] == ["run"]


def test_a_recomputed_mask() -> None:
    """What recomputes, or keeps random states, rather than what draws the mask."""
    drawn, redrawn = (weights(wrong(Kind.DROPOUT, LINEAR, index)) for index in (0, 1))
    restoring = {"checkpoint", "get_rng_states"}
    assert not restoring & drawn.keys()
    assert {name for name, weight in redrawn.items() if weight == 1.0} == restoring
    # Initial states are right.
    assert "set_rng_seed" not in redrawn
    # A rank's own states are entered around the module that draws.
    clues = suspects(wrong(Kind.DROPOUT, LINEAR)).clues
    assert [NAMES[n] for n, known in clues.items() if Clue.DRAWS in known] == ["Layer.forward"]


def test_marks_of_few_parameters() -> None:
    """They choose the ranks that reduce a gradient; what contains a module of others sets them."""
    reduced = wrong(Kind.COUNTED, index=Statistic.REDUCED.number)
    found = [weights(reduced, few=few).get("Linear.__init__") for few in (True, False)]
    assert found == [1.0, None]
    # Another module's constructor less likely lacks a mark of this one's parameters.
    assert weights(reduced, few=True)["divide_parameters"] == 0.6
    known = record()
    sources = dataclasses.replace(known.sources, modules={**known.sources.modules, LAYER: 0})
    known = dataclasses.replace(known, sources=sources)
    assert weights(wrong(Kind.MAIN_GRAD, f"{NORM}.weight"), few=True, ledger=known)[
        "Linear.__init__"
    ] == pytest.approx(0.8)


def test_what_chooses_groups_of_parameters() -> None:
    """Marks that optimizers read: few parameters that are in another group may lack one."""
    known = record()
    functions = [
        dataclasses.replace(f, marks=marks) if (marks := _GROUPING.get(f.name)) else f
        for f in known.sources.calls.functions
    ]
    calls = dataclasses.replace(known.sources.calls, functions=tuple(functions))
    sources = dataclasses.replace(known.sources, calls=calls)
    known = dataclasses.replace(known, sources=sources)
    failure, finding = wrong(Kind.HYPERPARAMETERS), Finding(Cause.HYPERPARAMETERS)
    clues = [suspects(failure, finding, few=few, ledger=known).clues for few in (True, False)]
    marking = [{NAMES[n] for n, found in by.items() if Clue.MARKS in found} for by in clues]
    assert marking == [{"set_seed", "Linear.__init__"}, set()]


_GROUPING = {
    "set_seed": ("is_embedding_parameter", "shared"),
    "Linear.__init__": ("is_embedding_parameter",),
    # Of another module, or nothing that an optimizer reads.
    "Buffer.__init__": ("is_embedding_parameter",),
    "Model.__init__": ("allreduce",),
}


def test_gradients_that_are_computed_late() -> None:
    """If one is zero, the modules around it may not call what computes it."""
    clues = [
        suspects(wrong(Kind.MAIN_GRAD), Finding(cause)).clues for cause in (Cause.ZERO, Cause.ORDER)
    ]
    late = NAMES.index("Linear.backward_dw")
    assert [Clue.NAMES in by.get(late, {}) for by in clues] == [True, False]


def test_what_divides_by_microbatches() -> None:
    """If nothing was divided by their number."""
    whole = ConstantFactor(Cause.TOO_SMALL, ("dp",), ratio=0.5, unscaled=True)
    findings = whole, dataclasses.replace(whole, unscaled=False)
    clues = [suspects(wrong(Kind.GRAD_OUTPUT, LINEAR), finding).clues for finding in findings]
    assert [Clue.AXIS in by.get(NAMES.index("run"), {}) for by in clues] == [True, False]


def test_what_computes_a_logged_statistic() -> None:
    """It has the statistic's name, and passes it on to what logs it."""
    logged = [weights(wrong(Kind.METRIC, name)) for name in ("num-zeros", "z_loss")]
    assert [names.get("count_zeros") for names in logged] == [1.0, None]


def test_what_is_left_out_of_a_norm() -> None:
    """What sets marks may have set too few."""
    assert "Linear.__init__" not in weights(wrong(Kind.COUNTED), never(Lack.LOST))
    clues = suspects(wrong(Kind.COUNTED), never(Lack.LEFT_OUT)).clues
    assert clues[NAMES.index("Linear.__init__")] == {Clue.MARKS: 1.5}
    # If few are counted twice, what counts all of them is right; their copies lack a mark.
    twice = dataclasses.replace(never(None), cause=Cause.COUNTED_TWICE, least=2, most=2)
    found = [weights(wrong(Kind.COUNTED), twice, few=few) for few in (True, False)]
    assert [names.get("Linear.__init__") for names in found] == [1.0, None]
    # No mark makes some elements of a parameter count instead of others.
    overlapping = dataclasses.replace(twice, least=0)
    assert "Linear.__init__" not in weights(wrong(Kind.COUNTED), overlapping, few=True)


def test_the_norm_of_all_parameters() -> None:
    """What computes it runs outside of the step, whose norm is another one."""
    norm = wrong(Kind.COUNTED, index=Statistic.PARAMS_NORM.number)
    assert weights(norm).keys() == {"calc_params_norm", "sum_of_squares"}


def test_random_states() -> None:
    """They are set by functions with such a name, and not by the constructor."""
    seeds = weights(wrong(Kind.INITIAL), Finding(Cause.RANDOM_STATE))
    assert seeds.keys() == {"set_seed", "set_rng_seed", "Linear.__init__"}
    assert seeds["set_seed"] > seeds["Linear.__init__"]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (Kind.OUTPUT, LINEAR, CODES[0].forward),
        (Kind.GRAD_INPUT, LINEAR, CODES[0].backward),
        (Kind.GRAD_OUTPUT, LINEAR, CODES[0].user),
        (Kind.PARAM, WEIGHT, CODES[0].built),
        (Kind.LOADED, WEIGHT, ""),
        (Kind.MAIN_GRAD, WEIGHT, where("finalize")),
        (Kind.EXP_AVG, WEIGHT, where("step")),
        (Kind.TOKENS, "tokens", "script.py:1 (forward_step)"),
        (Kind.METRIC, "z_loss", where("log")),
        (Kind.METRIC, "another", where("log")),
        (Kind.BUFFER, "unknown.bias", CODES[2].forward),
    ],
)
def test_anchor(kind: Kind, name: str, expected: str) -> None:
    """The function that surely ran."""
    assert anchor_of(record().sources, wrong(kind, name)) == expected


@pytest.mark.parametrize(
    ("logged", "of_scale"),
    [
        ({"z_loss": True}, True),
        ({"z_loss": False}, False),
        # The scale that all losses have is right if the share of another one is.
        ({"z_loss": True, "load_balancing_loss": True}, False),
    ],
)
def test_the_share_of_a_logged_loss(logged: dict[str, bool], of_scale: bool) -> None:
    """Right in the log: what scales its gradient; wrong there too: what computes it."""
    share = LossShare(Cause.TOO_LARGE, losses=(Loss.Z,), fault=large("microbatches"))
    found = weights(wrong(Kind.GRAD_INPUT, LINEAR), share, logged=logged)
    backward, forward, setter = (found[name] for name in (BACKWARD, FORWARD, "run"))
    assert (setter > forward) is (backward > forward) is of_scale


def test_lines_that_the_reference_did_not_run() -> None:
    """Of two functions that ran in a module, the one with such lines is more likely."""
    failure = wrong(Kind.OUTPUT, LINEAR)
    ran = Places(record(), [failure]).ranked(failure, None)
    last = ran[-1][1]
    ledger = dataclasses.replace(record(), apart=(where(last.function),))
    now = {
        place.function: score for score, place in Places(ledger, [failure]).ranked(failure, None)
    }
    assert now.pop(last.function) > ran[-1][0]
    assert now == {place.function: score for score, place in ran[:-1]}


@pytest.mark.parametrize("outcome", [Outcome.EXTRA, Outcome.DIVERGED])
def test_batches_that_only_one_run_has(outcome: Outcome) -> None:
    """What counts them; other data in the same batches has another cause."""
    failure = wrong(Kind.TOKENS, "tokens", outcome=outcome)
    first = Places(record(), [failure]).ranked(failure, None)[0][1].function
    assert (first == "Calculator.update_microbatches") is (outcome is Outcome.EXTRA)


def test_batches_that_are_there_twice() -> None:
    """They are as many as they should be: what reads them, and not what counts them."""
    failures = [wrong(kind, ROOT, outcome=Outcome.MISSING) for kind in (Kind.TOKENS, Kind.INPUT)]
    twice = wrong(Kind.INPUT, ROOT, outcome=Outcome.EXTRA)
    for others, counts in (([], True), ([twice], False)):
        ranked = Places(record(), [*failures, *others]).ranked(failures[0], None)
        assert (ranked[0][1].function == "Calculator.update_microbatches") is counts


def test_what_makes_main_weights_from_loaded_ones() -> None:
    """Where weights are loaded without an optimizer's state; else what describes that."""
    ledger = record()
    rounded, stored = (
        wrong(Kind.LOADED, index=index) for index in (LoadedIndex.ROUNDED, LoadedIndex.MAIN)
    )
    assert "_copy_model_params" in anchor_of(ledger.sources, rounded, Code(ledger))
    assert anchor_of(ledger.sources, stored, Code(ledger)) == ledger.sources.optimizer_state
    assert anchor_of(ledger.sources, rounded) == ledger.sources.optimizer_state


@pytest.mark.parametrize("calls", [False, True])
def test_a_loop_that_has_to_finalize_gradients(calls: bool) -> None:
    """Where nothing did, it is the script's own code."""
    ledger = record()
    sources = dataclasses.replace(ledger.sources, finalize=ledger.sources.finalize * calls)
    ledger = dataclasses.replace(ledger, sources=sources)
    found = weights(wrong(Kind.COUNTED, index=Statistic.REDUCED.number), ledger=ledger)
    assert ("get_batch" in found) is not calls
    assert ("finalize" in found) is calls


@pytest.mark.parametrize("kind", [Kind.OUTPUT, Kind.GRAD_INPUT])
def test_a_number_that_a_module_was_built_with(kind: Kind) -> None:
    """What built it, not what ran in it; ``layer_number`` is usually given by what contains it."""
    setting = OtherSetting(
        Cause.SETTING, module=LINEAR, attribute="layer_number", value=2.0, expected=4.0
    )
    failure = wrong(kind, LINEAR)
    diagnosis = diagnosed(failure, Explanation(observed=setting))
    first = Places(record(), [failure]).of(diagnosis).why.places[0]
    assert (first.function, first.clue) == ("Linear.__init__", Clue.BUILT)


@pytest.mark.parametrize(
    ("failure", "clue"),
    [
        (wrong(Kind.TOKENS, "tokens"), Clue.RAN),
        (wrong(Kind.PARAM, f"{MODEL}.weight"), Clue.BUILT),
    ],
)
def test_what_built_it(failure: Judged, clue: Clue) -> None:
    """Data are read, by a function that ran."""
    known, code = record(), where("loss_func")
    built = tuple(dataclasses.replace(c, built=code) for c in known.sources.codes)
    known = dataclasses.replace(
        known, sources=dataclasses.replace(known.sources, step=code, codes=built)
    )
    clues = suspects(failure, ledger=known).clues[NAMES.index("loss_func")]
    assert {Clue.RAN, Clue.BUILT} & {*clues} == {clue}


@pytest.mark.parametrize(("finalize", "weight"), [("", 1.0), (where("finalize"), 0.6)])
def test_a_loop_that_reduces_gradients_itself(finalize: str, weight: float) -> None:
    """Its own code is as likely as Megatron's, which nothing calls unless it does."""
    known = record()
    known = dataclasses.replace(
        known, sources=dataclasses.replace(known.sources, finalize=finalize)
    )
    assert weights(wrong(Kind.MAIN_GRAD), ledger=known)["get_batch"] == weight


@pytest.mark.parametrize("is_silent", [True, False])
@pytest.mark.parametrize("is_apart", [True, False])
@pytest.mark.parametrize("serves", [True, False])
def test_what_uses_an_autograd_function(serves: bool, is_apart: bool, is_silent: bool) -> None:
    """What calls one that serves other modules too, from another file, may use the wrong one.

    If it is silent, whatever is known.
    """
    known = record()
    calls = known.sources.calls
    elsewhere = FunctionCall(NAMES.index("Product.backward"), -1, pattern(NORM), Phase.BACKWARD)
    calls = dataclasses.replace(calls, calls=(*calls.calls, *[elsewhere] * serves))
    functions = tuple(
        dataclasses.replace(f, file="n.py") if is_apart and "Product" in f.name else f
        for f in calls.functions
    )
    calls = dataclasses.replace(calls, functions=functions)
    known = dataclasses.replace(known, sources=dataclasses.replace(known.sources, calls=calls))
    failure = wrong(Kind.GRAD_INPUT, LINEAR)
    found = suspects(failure, large("tp") if is_silent else None, ledger=known)
    if is_silent:
        found.is_silent(NAMES.index("Product.backward"))
    clue = Clue.CALLS if is_silent else Clue.USES
    users = {NAMES[number] for number, clues in found.clues.items() if clue in clues}
    assert users == ({"Linear.forward"} if is_apart and (serves or is_silent) else set())
