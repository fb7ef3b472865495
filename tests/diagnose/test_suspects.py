# SPDX-License-Identifier: Apache-2.0
"""Which functions may have made what is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.diagnose.anchors import anchor_of
from megatron_ttrace.diagnose.code import Code, Outcomes
from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.diagnose.suspects import Suspects
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import (
    Cause,
    Explanation,
    Finding,
    Lack,
    Loss,
    LossShare,
    Miscounted,
    OtherSetting,
)
from megatron_ttrace.trace.judged import Diagnosis
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.places import Clue
from megatron_ttrace.trace.records import ROOT, Kind, LoadedIndex, Outcome
from tests.diagnose.judged_by_hand import judged
from tests.diagnose.ran_by_hand import CODES, FUNCTIONS, LINEAR, NORM, large, record, where

NAMES = list(FUNCTIONS)


def suspects(
    kind: Kind,
    name: str,
    finding: Finding | None = None,
    *,
    few: bool = False,
    whole: bool = False,
    logged: Mapping[str, bool] = MappingProxyType({}),
    outcome: Outcome = Outcome.DIVERGED,
) -> Suspects:
    """Of a failure in the step made by hand."""
    ledger = record()
    verdict = judged(kind, name, outcome)
    outcomes: Any = SimpleNamespace(
        share=lambda _: 0.1 if few else 1.0, failed=lambda *_: whole, losses=lambda: logged
    )
    return Suspects(Code(ledger), ledger, outcomes, verdict, finding, sent=False)


def test_what_froze_a_parameter() -> None:
    """Rather what ran while the model was built than what reduces gradients."""
    weights = suspects(Kind.MAIN_GRAD, f"{LINEAR}.weight", Finding(Cause.FROZEN)).weights
    assert weights[NAMES.index("Linear.__init__")] == 1.0
    assert weights[NAMES.index("finalize")] < 1.0


@pytest.mark.parametrize(
    ("kind", "name", "outcome"),
    [
        (Kind.INPUT, LINEAR, Outcome.DIVERGED),
        (Kind.ROUTING, "decoder.layers.0.experts", Outcome.UNCOVERED),
        (Kind.GRAD_INPUT, LINEAR, Outcome.MISSING),
    ],
)
def test_what_a_module_is_given(kind: Kind, name: str, outcome: Outcome) -> None:
    """It is made around the module, or farther out; hardly inside."""
    weights = suspects(kind, name, outcome=outcome).weights
    assert weights[NAMES.index("Layer.forward")] == 1.0
    assert weights[NAMES.index("Product.forward")] < 0.5


@pytest.mark.parametrize(
    ("kind", "name", "suspected", "others"),
    [
        (Kind.OUTPUT, LINEAR, "Linear.forward reduce Product.forward hook", "Norm.forward run"),
        (Kind.GRAD_INPUT, LINEAR, "Product.backward reduce Product.forward run", "Norm.forward"),
        (Kind.GRAD_OUTPUT, ROOT, "run scale_loss", "step"),
        (Kind.MAIN_GRAD, f"{LINEAR}.weight", "finalize sync_grads reduce_norms run", "step"),
        (Kind.PARAM_DELTA, f"{LINEAR}.weight", "step clip_by_norm", "Linear.forward"),
        (Kind.GRAD_NORM, "grad_norm", "step clip_by_norm", "Linear.forward"),
        (Kind.PARAM, f"{LINEAR}.weight", "Linear.__init__ offset", "Linear.forward"),
        (Kind.METRIC, "z_loss", "log Tracker.aggregate router_loss attach", "step"),
        (Kind.BUFFER, f"{LINEAR}.scale", "finalize Linear.forward", "Norm.forward"),
        (Kind.INPUT, ROOT, "run", "step"),
    ],
)
def test_suspects(kind: Kind, name: str, suspected: str, others: str) -> None:
    """What ran in that module and direction, or in that part of the step."""
    weights = suspects(kind, name).weights
    assert all(weights.values()), "what has no weight would be one as soon as the user changes it"
    names = {NAMES[number] for number in weights}
    assert names >= set(suspected.split())
    assert not names & set(others.split())


def test_what_passes_an_input() -> None:
    """What calls the module, and not what only enters it."""
    clues = suspects(Kind.INPUT, LINEAR).clues
    assert [NAMES[n] for n, known in clues.items() if Clue.PASSES in known] == ["Layer.forward"]


def test_what_sets_a_scale() -> None:
    """The caller of another function of the class whose backward ran."""
    clues = suspects(Kind.GRAD_INPUT, LINEAR).clues
    assert [NAMES[n] for n, known in clues.items() if Clue.SETS in known] == ["run"]


@pytest.mark.parametrize(
    ("finding", "whole", "first"),
    [
        (large("tp"), True, "Product.backward"),
        (None, False, "Product.backward"),
        (None, True, "Linear.forward"),
    ],
)
def test_what_is_wrong_before_the_input(finding: Finding | None, whole: bool, first: str) -> None:
    """If the weight's gradient is wrong too, so is the input of the last backward function."""
    weights = suspects(Kind.GRAD_INPUT, LINEAR, finding, whole=whole).weights
    among = ("Product.backward", "Linear.forward")
    assert max(among, key=lambda name: weights[NAMES.index(name)]) == first


def test_never_updated() -> None:
    """What built the optimizer before what updates other parameters."""
    for kind, cause in (
        (Kind.PARAM_DELTA, Cause.NEVER_COUNTED),
        (Kind.HYPERPARAMETERS, Cause.HYPERPARAMETERS),
    ):
        lost = suspects(kind, f"{LINEAR}.weight", Finding(cause)).weights
        assert lost[NAMES.index("build_groups")] > lost[NAMES.index("step")]
    wrong = suspects(Kind.PARAM_DELTA, f"{LINEAR}.weight", large("dp")).weights
    assert wrong[NAMES.index("build_groups")] < wrong[NAMES.index("step")]


def test_a_recomputed_mask() -> None:
    """What recomputes, or keeps random states, rather than what draws the mask."""
    ledger = record()
    outcomes: Any = SimpleNamespace(share=lambda _: 1.0, failed=lambda *_: False, losses=dict)
    verdicts = (judged(Kind.DROPOUT, LINEAR, Outcome.DIVERGED, index=index) for index in (0, 1))
    drawn, redrawn = (
        Suspects(Code(ledger), ledger, outcomes, verdict, None, sent=False).weights
        for verdict in verdicts
    )
    restoring = {NAMES.index("checkpoint"), NAMES.index("get_rng_states")}
    assert not restoring & drawn.keys()
    assert {number for number, weight in redrawn.items() if weight == 1.0} == restoring
    # Initial states are right.
    assert NAMES.index("set_rng_seed") not in redrawn


def test_a_module_of_another_package() -> None:
    """What contains it gave it its sizes."""
    assert NAMES.index("Model.__init__") in suspects(Kind.OUTPUT, NORM).weights
    assert NAMES.index("Model.__init__") not in suspects(Kind.OUTPUT, LINEAR).weights


def test_what_a_model_is_called_with() -> None:
    """It was divided among ranks."""
    assert NAMES.index("divide_batch") in suspects(Kind.INPUT, ROOT).weights
    assert NAMES.index("divide_batch") not in suspects(Kind.INPUT, LINEAR).weights


@pytest.mark.parametrize(
    ("kind", "likelier", "other"),
    [(Kind.INPUT, "get_batch", "loss_func"), (Kind.LOSS, "loss_func", "get_batch")],
)
def test_what_ran_before_the_model_or_after_it(kind: Kind, likelier: str, other: str) -> None:
    """What is called first after it has not made its inputs, and what is called before no loss."""
    weights = suspects(kind, ROOT).weights
    assert weights[NAMES.index(likelier)] == 1.0 > weights[NAMES.index(other)] > 0.0


def test_what_is_left_out_of_a_norm() -> None:
    """What sets marks may have set too few."""
    norm = Statistic.GRAD_NORM
    lacks = [
        Miscounted(Cause.NEVER_COUNTED, statistic=norm, least=0, most=0, names=(), lack=lack)
        for lack in (Lack.LEFT_OUT, Lack.LOST)
    ]
    found = [suspects(Kind.COUNTED, f"{LINEAR}.weight", lack).weights for lack in lacks]
    assert [NAMES.index("Linear.__init__") in weights for weights in found] == [True, False]
    clues = suspects(Kind.COUNTED, f"{LINEAR}.weight", lacks[0]).clues
    assert clues[NAMES.index("Linear.__init__")] == {Clue.MARKS: 1.5}


def test_the_norm_of_all_parameters() -> None:
    """What computes it runs outside of the step, whose norm is another one."""
    norm = judged(
        Kind.COUNTED, f"{LINEAR}.weight", Outcome.DIVERGED, index=Statistic.PARAMS_NORM.number
    )
    ledger, outcomes = record(), Outcomes([norm])
    found = Suspects(Code(ledger), ledger, outcomes, norm, None, sent=False).weights
    assert {NAMES[number] for number in found} == {"calc_params_norm", "sum_of_squares"}


def test_a_gradient_that_was_rounded() -> None:
    """What allocates its buffer, before what reduces it."""
    weights = suspects(Kind.MAIN_GRAD, f"{LINEAR}.weight", Finding(Cause.PRECISION)).weights
    assert weights[NAMES.index("Buffer.__init__")] > weights[NAMES.index("sync_grads")]
    assert NAMES.index("Linear.forward") not in weights


def test_random_states() -> None:
    """They are set by functions with such a name, and not by the constructor."""
    seeds = suspects(Kind.INITIAL, f"{LINEAR}.weight", Finding(Cause.RANDOM_STATE))
    names = {NAMES[number] for number in seeds.weights}
    assert names == {"set_seed", "set_rng_seed", "Linear.__init__"}
    assert seeds.weights[NAMES.index("set_seed")] > seeds.weights[NAMES.index("Linear.__init__")]


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        (Kind.OUTPUT, LINEAR, CODES[0].forward),
        (Kind.GRAD_INPUT, LINEAR, CODES[0].backward),
        (Kind.GRAD_OUTPUT, LINEAR, CODES[0].user),
        (Kind.PARAM, f"{LINEAR}.weight", CODES[0].built),
        (Kind.LOADED, f"{LINEAR}.weight", ""),
        (Kind.MAIN_GRAD, f"{LINEAR}.weight", where("finalize")),
        (Kind.EXP_AVG, f"{LINEAR}.weight", where("step")),
        (Kind.TOKENS, "tokens", "script.py:1 (forward_step)"),
        (Kind.METRIC, "z_loss", where("log")),
        (Kind.METRIC, "another", where("log")),
        (Kind.BUFFER, "unknown.bias", CODES[2].forward),
    ],
)
def test_anchor(kind: Kind, name: str, expected: str) -> None:
    """The function that surely ran."""
    assert anchor_of(record().sources, judged(kind, name, Outcome.DIVERGED)) == expected


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
    weights = suspects(Kind.GRAD_INPUT, LINEAR, share, logged=logged).weights
    backward, forward, setter = (
        weights[NAMES.index(name)] for name in ("Product.backward", "Linear.forward", "run")
    )
    assert (setter > forward) is (backward > forward) is of_scale


def test_lines_that_the_reference_did_not_run() -> None:
    """Of two functions that ran in a module, the one with such lines is more likely."""
    failure = judged(Kind.OUTPUT, LINEAR, Outcome.DIVERGED)
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
    failure = judged(Kind.TOKENS, "tokens", outcome)
    first = Places(record(), [failure]).ranked(failure, None)[0][1].function
    assert (first == "Calculator.update_microbatches") is (outcome is Outcome.EXTRA)


def test_what_makes_main_weights_from_loaded_ones() -> None:
    """Where weights are loaded without an optimizer's state; else what describes that."""
    ledger, name = record(), f"{LINEAR}.weight"
    rounded, stored = (
        judged(Kind.LOADED, name, Outcome.DIVERGED, index=index)
        for index in (LoadedIndex.ROUNDED, LoadedIndex.MAIN)
    )
    assert "_copy_model_params" in anchor_of(ledger.sources, rounded, Code(ledger))
    assert anchor_of(ledger.sources, stored, Code(ledger)) == ledger.sources.optimizer_state
    assert anchor_of(ledger.sources, rounded) == ledger.sources.optimizer_state


def test_a_delayed_gradient() -> None:
    """It is computed after the backward pass, outside of the module's."""
    assert NAMES.index("Linear.backward_dw") in suspects(Kind.MAIN_GRAD, f"{LINEAR}.weight").weights
    assert NAMES.index("Linear.backward_dw") not in suspects(Kind.GRAD_INPUT, LINEAR).weights


def test_a_context_of_fp8() -> None:
    """It is entered around layers, or where they are recomputed."""
    ledger, verdict = record(), judged(Kind.PRECISION, LINEAR, Outcome.DIVERGED)
    outcomes = Outcomes([verdict])
    found = Suspects(Code(ledger), ledger, outcomes, verdict, None, sent=False).weights
    assert {NAMES.index("Layer.forward"), NAMES.index("checkpoint")} <= found.keys()
    assert NAMES.index("finalize") not in found


@pytest.mark.parametrize("calls", [False, True])
def test_a_loop_that_has_to_finalize_gradients(calls: bool) -> None:
    """Where nothing did, it is the script's own code."""
    ledger = record()
    sources = dataclasses.replace(ledger.sources, finalize=ledger.sources.finalize * calls)
    verdict = judged(
        Kind.COUNTED, f"{LINEAR}.weight", Outcome.DIVERGED, index=Statistic.REDUCED.number
    )
    verdicts = Outcomes([verdict])
    ledger = dataclasses.replace(ledger, sources=sources)
    found = Suspects(Code(ledger), ledger, verdicts, verdict, None, sent=False).weights
    assert (NAMES.index("get_batch") in found) is not calls
    assert (NAMES.index("finalize") in found) is calls


@pytest.mark.parametrize("few", [False, True])
def test_shapes_of_most_parameters(few: bool) -> None:
    """Marks that most have lost were not forgotten by each constructor."""
    name, shape = f"{LINEAR}.weight", Outcome.SHAPE
    weights = suspects(Kind.PARAM, name, few=few, outcome=shape).weights
    built, wrapped = (weights[NAMES.index(f"{of}.__init__")] for of in ("Linear", "Buffer"))
    assert (built > wrapped) is few


@pytest.mark.parametrize("kind", [Kind.OUTPUT, Kind.GRAD_INPUT])
def test_a_number_that_a_module_was_built_with(kind: Kind) -> None:
    """What built it, not what ran in it; ``layer_number`` is usually given by what contains it."""
    setting = OtherSetting(
        Cause.SETTING, module=LINEAR, attribute="layer_number", value=2.0, expected=4.0
    )
    verdict = judged(kind, LINEAR, Outcome.DIVERGED)
    diagnosis = Diagnosis(
        name=LINEAR,
        direction=verdict.direction,
        grounds=Grounds.FIRST_FAILURE,
        verdict=verdict,
        why=Explanation(observed=setting),
    )
    first = Places(record(), [verdict]).of(diagnosis).why.places[0]
    assert (first.function, first.clue) == ("Linear.__init__", Clue.BUILT)
