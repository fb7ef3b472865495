# SPDX-License-Identifier: Apache-2.0
"""Verdicts in, culprits out: for every stage of a step, and that consequences are not named."""

import dataclasses
import math
from collections.abc import Callable, Iterator

import pytest

from megatron_ttrace.diagnose.origins import owner
from megatron_ttrace.report.wording import UNKNOWN
from megatron_ttrace.trace.findings import Cause, Explanation, PartialSums
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import (
    MOMENTS,
    STEP_LEVEL,
    BufferIndex,
    Direction,
    Kind,
    Outcome,
    RoutingIndex,
    TraceKey,
)
from tests.diagnose.judged_by_hand import localise, verdict

LAYERS = ("decoder.layers.0", "decoder.layers.1")
ATTENTION = ("input_layernorm", "self_attention.linear_qkv", "self_attention.linear_proj")
MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
LEAVES = [f"{layer}.{leaf}" for layer in LAYERS for leaf in (*ATTENTION, *MLP)]
FORWARD = [
    *("embedding.word_embeddings", "embedding"),
    *(
        f"{layer}.{name}".rstrip(".")
        for layer in LAYERS
        for name in (*ATTENTION, "self_attention", *MLP, "mlp", "")
    ),
    *("output_layer", "model"),
]
"""Modules in the order of their outputs."""
FC1 = "decoder.layers.1.mlp.linear_fc1"
NORM = "decoder.layers.0.input_layernorm"

Test = Callable[[Kind, str], bool]
"""Whether a tensor fails."""


def is_in(name: str, other: str) -> bool:
    """Whether a module is another or lies in it."""
    return f"{name}.".startswith(f"{other}.")


def step(iteration: int, microbatches: int) -> Iterator[TraceKey]:
    """The keys of a whole step of a small model, in execution order."""

    def of_parameters(*kinds: Kind, index: int = 0) -> Iterator[TraceKey]:
        for kind in kinds:
            for leaf in LEAVES:
                yield TraceKey(iteration, STEP_LEVEL, kind, f"{leaf}.weight", index)

    yield from of_parameters(Kind.PARAM)
    for microbatch in range(microbatches):

        def key(kind: Kind, name: str, microbatch: int = microbatch) -> TraceKey:
            return TraceKey(iteration, microbatch, kind, name, 0)

        yield key(Kind.TOKENS, "tokens")
        entered: list[str] = []
        for name in FORWARD:
            for around in reversed(FORWARD):
                if (around == "model" or is_in(name, around)) and around not in entered:
                    entered.append(around)
                    yield key(Kind.INPUT, around)
            yield key(Kind.OUTPUT, name)
        for name in reversed(FORWARD):
            yield key(Kind.GRAD_OUTPUT, name)
            if name != "model" and not name.startswith("embedding"):
                yield key(Kind.GRAD_INPUT, name)
    yield from of_parameters(Kind.MAIN_GRAD, Kind.PARAM_DELTA, *MOMENTS)
    yield TraceKey(iteration, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0)
    yield TraceKey(iteration, STEP_LEVEL, Kind.LOSS, "lm loss", 0)
    yield from of_parameters(Kind.PARAM, index=1)


def run(
    *faulty: Test, outcome: Outcome = Outcome.DIVERGED, iteration: int = 1, microbatches: int = 1
) -> list[Judged]:
    """Verdicts of a step in which the tensors fail that any of ``faulty`` accepts."""
    verdicts = []
    for number, key in enumerate(step(iteration, microbatches)):
        is_after = key.kind is Kind.PARAM and key.index == 1
        kind = Kind.PARAM_DELTA if is_after else key.kind  # what a change changes
        bad = any(test(kind, key.name) for test in faulty)
        place = {"microbatch": key.microbatch, "iteration": iteration, "index": key.index}
        # Only the same tensor has the same error.
        what, margin = (outcome, 5.0 - 1e-6 * number) if bad else (Outcome.PASS, 0.1)
        verdicts.append(verdict(key.name, key.kind, what, margin=margin, **place))
    return verdicts


def is_(wanted: Kind, *names: str) -> Test:
    """Accepts tensors of one kind, of these names or of all."""
    return lambda kind, name: kind is wanted and (not names or name in names)


def after(first: str) -> Test:
    """Accepts everything that the wrong output of ``first`` spoils: the rest of the step."""
    begins = FORWARD.index(first)

    def spoiled(kind: Kind, name: str) -> bool:
        if kind in (Kind.TOKENS, Kind.PARAM):
            return False
        if kind not in (Kind.INPUT, Kind.OUTPUT):
            return True
        position = FORWARD.index(name)
        if kind is Kind.OUTPUT:
            return position >= begins
        inside = [other for other in FORWARD[: position + 1] if other.startswith(f"{name}.")]
        return FORWARD.index(inside[0]) > begins if inside else position > begins

    return lambda kind, name: spoiled(kind, name) and (kind, name) != (Kind.INPUT, "model")


def backward_after(first: str) -> Test:
    """Accepts what a wrong input gradient of ``first`` spoils."""
    order = FORWARD[::-1]
    begins = order.index(first)

    def spoiled(kind: Kind, name: str) -> bool:
        around = first.startswith(f"{name}.")
        if kind in (Kind.MAIN_GRAD, Kind.PARAM_DELTA, *MOMENTS):
            return order.index(owner(name)) > begins
        if kind is Kind.GRAD_INPUT:
            return order.index(name) >= begins or around
        later = kind is Kind.GRAD_OUTPUT and order.index(name) > begins and not around
        return later or kind is Kind.GRAD_NORM

    return spoiled


def between(kind: Kind, name: str) -> bool:
    """A lost message between pipeline stages: all outputs pass, the next input does not."""
    second = name.startswith(LAYERS[1]) or name == "output_layer"
    return second if kind is Kind.INPUT else kind is Kind.OUTPUT and (second or name == "model")


def failing(*margins: tuple[str, Kind, float]) -> list[Judged]:
    """Tensors with these margins."""
    return [
        verdict(name, kind, Outcome.DIVERGED if margin > 1 else Outcome.PASS, margin=margin)
        for name, kind, margin in margins
    ]


def found(verdicts: list[Judged]) -> list[str]:
    """Whom it accuses."""
    return [culprit.name for culprit in localise(verdicts)]


@pytest.mark.parametrize(
    "verdicts", [run(), [verdict("a", outcome=Outcome.UNCHECKED)], []], ids=["run", "blind", "none"]
)
def test_a_healthy_run_has_no_culprits(verdicts: list[Judged]) -> None:
    assert localise(verdicts) == []


@pytest.mark.parametrize("leaf", ["embedding.word_embeddings", "output_layer", *LEAVES])
def test_forward_names_the_leaf_and_no_consequence(leaf: str) -> None:
    """A leaf's wrong output spoils all that follows and its parents; only the leaf is named."""
    [culprit] = localise(run(after(leaf)))
    place = culprit.name, culprit.kind, culprit.direction
    assert place == (leaf, Kind.OUTPUT, Direction.FORWARD)
    assert culprit.reason.startswith("all its inputs pass, its output does not")
    assert culprit.explanation == UNKNOWN
    assert culprit.margin == pytest.approx(5.0, rel=1e-3)
    assert (culprit.ranks, culprit.microbatch) == ((0,), 0)


@pytest.mark.parametrize("isolated", [False, True])
def test_a_module_in_another_precision(isolated: bool) -> None:
    """It is the culprit; what its rounding changes is a consequence, even with isolation."""
    wrong = [
        verdict("mlp.fc1", kind, Outcome.DIVERGED, margin=margin)
        for kind, margin in ((Kind.OUTPUT, 2.0), (Kind.GRAD_INPUT, 3.0), (Kind.PRECISION, 1e9))
    ]
    gradient = verdict("mlp.fc1.weight", Kind.MAIN_GRAD, Outcome.DIVERGED, margin=2.0)
    [culprit] = localise([*wrong, gradient], isolated=isolated)
    assert (culprit.name, culprit.kind) == ("mlp.fc1", Kind.PRECISION)
    assert culprit.reason.startswith("its precision is not that of the reference")


MISSING = Outcome.MISSING
STAGES = {
    # What is computed between the children is the parent's own.
    "a parent of a layer": (run(after(LAYERS[0])), LAYERS[0], Kind.OUTPUT, "all its inputs pass"),
    "a parent": (run(after("embedding")), "embedding", Kind.OUTPUT, "all its inputs pass"),
    "between modules": (run(between), LAYERS[1], Kind.INPUT, "this input fails although all out"),
    "nobody else": (run(is_(Kind.OUTPUT, "model")), "model", Kind.OUTPUT, ""),
    "data": (run(is_(Kind.TOKENS), after(FC1)), "tokens", Kind.TOKENS, "differs before anything"),
    "start": (
        [verdict("w.weight", Kind.PARAM, Outcome.DIVERGED), *run(after("embedding"))],
        *("w.weight", Kind.PARAM, "differs before anything was computed"),
    ),
    "bias": (
        [
            verdict("r.expert_bias", Kind.BUFFER, Outcome.DIVERGED, index=BufferIndex.BEFORE),
            *run(after("embedding")),
        ],
        *("r.expert_bias", Kind.BUFFER, "differs before anything was computed"),
    ),
    "after the step": (
        [verdict("a.w", Kind.PARAM, Outcome.DIVERGED, index=1)],
        "a",
        Kind.PARAM,
        "",
    ),
    "loss": (
        run(is_(Kind.LOSS), is_(Kind.MAIN_GRAD, "decoder")),
        *("lm loss", Kind.LOSS, "every module's output passes, the reported loss does not"),
    ),
    "backward head": (run(backward_after("output_layer")), "output_layer", Kind.GRAD_INPUT, ""),
    "backward": (run(backward_after(FC1)), FC1, Kind.GRAD_INPUT, "its input gradient does not"),
    # One of two modules with the same input, whose own output gradient fails: the other one's
    # gradient of it is the same tensor. What makes the first gradient is the code around them.
    "a shared input": (
        failing(
            *(("layer", Kind.GRAD_OUTPUT, 0.1), ("layer.attention", Kind.GRAD_OUTPUT, 0.1)),
            *(
                ("layer.attention.q", Kind.GRAD_OUTPUT, 0.1),
                ("layer.attention.k", Kind.GRAD_OUTPUT, 8.0),
            ),
            ("layer.attention.k.w", Kind.MAIN_GRAD, 7.0),
            *((f"layer.attention.{name}", Kind.GRAD_INPUT, 3.0) for name in ("q", "k")),
            # What leaves the attention is a gradient inside of the layer.
            ("layer.norm", Kind.GRAD_OUTPUT, 3.0),
        ),
        *("layer.attention", Kind.GRAD_OUTPUT, ""),
    ),
    "first gradient": (
        run(is_(Kind.GRAD_OUTPUT), is_(Kind.GRAD_INPUT)),
        *("model", Kind.GRAD_OUTPUT, ""),
    ),
    "gradient": (
        run(
            is_(Kind.GRAD_NORM),
            *(is_(k, f"{NORM}.weight") for k in (Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.EXP_AVG)),
        ),
        *(NORM, Kind.MAIN_GRAD, ""),
    ),
    # It scales every update when gradients are clipped.
    "norm": (
        run(is_(Kind.GRAD_NORM), is_(Kind.PARAM_DELTA)),
        *("grad_norm", Kind.GRAD_NORM, "every main gradient passes, their norm does not"),
    ),
    # A wrong norm would scale all updates.
    "an optimizer's gradient": (
        run(is_(Kind.GRAD_NORM), is_(Kind.EXP_AVG, f"{NORM}.weight")),
        *(NORM, Kind.EXP_AVG, ""),
    ),
    **{
        kind: ([*run(), verdict(f"{FC1}.weight", kind, Outcome.DIVERGED)], FC1, kind, "")
        for kind in (Kind.PARAM_DELTA, *MOMENTS, Kind.BUFFER)
    },
    # Where one bias is not updated, no load is known of any: the values tell which it is.
    "a bias that stays": (
        [
            *(
                verdict(f"{name}.expert_bias", Kind.BUFFER, MISSING, index=BufferIndex.LOADS)
                for name in "ab"
            ),
            verdict("b.expert_bias", Kind.BUFFER, Outcome.DIVERGED),
        ],
        *("b", Kind.BUFFER, ""),
    ),
    # The change of a parameter is computed from its moments.
    "moments": (
        run(*(is_(kind, f"{FC1}.weight") for kind in (Kind.PARAM_DELTA, *MOMENTS))),
        *(FC1, Kind.EXP_AVG, ""),
    ),
    "a later iteration": (
        [*run(is_(Kind.PARAM_DELTA, f"{FC1}.weight")), *run(after("embedding"), iteration=2)],
        *(FC1, Kind.PARAM_DELTA, ""),
    ),
    # Rotary embeddings take no tensor.
    "no inputs": (
        [verdict("rotary", outcome=Outcome.DIVERGED, margin=9.0)],
        *("rotary", Kind.OUTPUT, "it has no traced inputs, and its output fails"),
    ),
    # A router that sends tokens elsewhere although its input passes.
    "routing": (
        [
            verdict("mlp.router", Kind.INPUT),
            verdict("mlp.router", Kind.ROUTING, Outcome.DIVERGED, microbatch=0),
        ],
        *("mlp.router", Kind.ROUTING, ""),
    ),
    # A main gradient that is only absent: what each optimizer steps says more.
    "never counted": (
        [
            *(*run(), verdict("norm.bias", Kind.MAIN_GRAD, MISSING)),
            verdict("norm.bias", Kind.COUNTED, Outcome.DIVERGED, index=4),
        ],
        *("norm.bias", Kind.COUNTED, ""),
    ),
    # Masks are drawn, not applied: inputs and outputs of the module pass.
    "a mask": (
        failing(("a", Kind.INPUT, 0.1), ("a", Kind.OUTPUT, 0.1), ("a", Kind.DROPOUT, 1e15)),
        *("a", Kind.DROPOUT, "the dropout mask that it draws is wrong"),
    ),
    # A router's bias is updated beside the optimizer.
    "a buffer": (
        failing(("router.bias", Kind.BUFFER, 3.0)),
        *("router", Kind.BUFFER, "but not the buffer router.bias after the step"),
    ),
    # A router shares its input with the experts: wrong weights' gradients speak for the router, the
    # common input's gradient alone does not.
    **{
        f"the input of {name}": (
            [
                verdict("mlp.router", Kind.ROUTING, microbatch=0, index=RoutingIndex.CHOICE),
                *failing(*((module, Kind.GRAD_OUTPUT, 0.1) for module in ("mlp", "mlp.router"))),
                *failing(*((module, Kind.GRAD_INPUT, 5.0) for module in ("mlp", "mlp.router"))),
                *failing(("mlp.router.weight", Kind.MAIN_GRAD, margin)),
            ],
            *(name, Kind.GRAD_INPUT, ""),
        )
        for margin, name in ((0.1, "mlp"), (9.0, "mlp.router"))
    },
    # A gradient arrives wrong, and falls below the tolerance once more on its way.
    "what arrives": (
        failing(
            *(("layers.1", Kind.GRAD_OUTPUT, 2.0), ("layers.0", Kind.GRAD_OUTPUT, 0.97)),
            ("layers.0", Kind.GRAD_INPUT, 1.1),
        ),
        *("layers.1", Kind.GRAD_OUTPUT, "the first gradient"),
    ),
    # Two stages hold other layers under one number: the number is wrong, not the values.
    "a claimed layer": (
        [
            verdict(f"{FC1}.weight", Kind.INITIAL, Outcome.REPLICA_CONFLICT),
            verdict(f"{FC1}.weight", Kind.PARAM, Outcome.EXTRA),
        ],
        *(FC1, Kind.PARAM, ""),
    ),
}


@pytest.mark.parametrize(("verdicts", "name", "kind", "reason"), STAGES.values(), ids=STAGES)
def test_stages(verdicts: list[Judged], name: str, kind: Kind, reason: str) -> None:
    """The only culprit, whatever else fails because of it."""
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.kind) == (name, kind)
    direction = TraceKey(1, STEP_LEVEL, kind, name, culprit.index).direction
    is_absent = culprit.verdict in (MISSING, Outcome.EXTRA)
    assert culprit.direction is (Direction.FORWARD if is_absent else direction)
    assert reason in culprit.reason


@pytest.mark.parametrize("outcome", [MISSING, Outcome.EXTRA, Outcome.UNCOVERED])
def test_absent_parameters_name_their_module(outcome: Outcome) -> None:
    """One module per absent parameter; its activations and gradients are consequences."""
    [culprit] = localise(run(lambda _, name: name.startswith(FC1), outcome=outcome))
    assert (culprit.name, culprit.kind, culprit.verdict) == (FC1, Kind.PARAM, outcome)


@pytest.mark.parametrize(
    ("verdicts", "names"),
    [
        # ``name#1`` lies inside its parent as ``name`` does.
        (
            failing(
                *(("mtp.linear#1", Kind.INPUT, 0.1), ("mtp.linear#1", Kind.OUTPUT, 3.0)),
                *(("mtp#1", Kind.INPUT, 0.1), ("mtp#1", Kind.OUTPUT, 2.0)),
                *(("mtp", Kind.INPUT, 0.1), ("mtp", Kind.OUTPUT, 2.0)),
            ),
            ["mtp.linear#1"],
        ),
        # No run of a module lies inside another run of it.
        (
            failing(
                *(("embedding", Kind.INPUT, 0.1), ("embedding", Kind.OUTPUT, 50.0)),
                *(("decoder", Kind.INPUT, 50.0), ("decoder", Kind.OUTPUT, 50.0)),
                *(("embedding#1", Kind.INPUT, 0.1), ("embedding#1", Kind.OUTPUT, 50.0)),
            ),
            ["embedding", "embedding#1"],
        ),
        # ``layers.1`` is not a parent of ``layers.10``.
        (failing(*((n, Kind.OUTPUT, 2.0) for n in ("a.1", "a.10"))), ["a.1", "a.10"]),
        # The same bug in both layers, whose error rounding swallowed in between.
        (run(is_(Kind.OUTPUT, *LEAVES[::5])), LEAVES[::5]),
        # Inputs that pass, but nearly as far off as the output, make no second birthplace.
        (
            failing(
                *(("first", Kind.OUTPUT, 60.0), ("later", Kind.INPUT, 0.83)),
                *(("later", Kind.OUTPUT, 1.24), ("other", Kind.INPUT, 0.1)),
                ("other", Kind.OUTPUT, 50.0),
            ),
            ["first", "other"],
        ),
        # A layer that is never called: neither are the modules inside it.
        (
            [
                verdict(name, kind, Outcome.MISSING, margin=None)
                for name in (LAYERS[1], f"{LAYERS[1]}.mlp", FC1)
                for kind in (Kind.INPUT, Kind.OUTPUT)
            ],
            [LAYERS[1]],
        ),
        # A layer that is not called a second time: neither are the modules inside it.
        (
            [
                verdict(f"{name}#1", kind, Outcome.MISSING, margin=None)
                for name in (LAYERS[1], f"{LAYERS[1]}.mlp", FC1)
                for kind in (Kind.INPUT, Kind.OUTPUT)
            ],
            [f"{LAYERS[1]}#1"],
        ),
        # Moments are missing: the wrong norm, and all clipped updates, are consequences.
        (
            [
                *failing(("a.w", Kind.MAIN_GRAD, 0.1), ("b.w", Kind.MAIN_GRAD, 0.1)),
                *failing(("grad_norm", Kind.GRAD_NORM, 9.0), ("a.w", Kind.PARAM_DELTA, 9.0)),
                *failing(("a.w", Kind.EXP_AVG, 9.0), ("b.w", Kind.PARAM_DELTA, 9.0)),
                verdict("b.w", Kind.EXP_AVG, MISSING),
            ],
            ["b"],
        ),
    ],
)
def test_several_tensors(verdicts: list[Judged], names: list[str]) -> None:
    assert found(verdicts) == names


def test_one_culprit_per_module_stands_for_its_worst_tensor() -> None:
    """Weight and bias of one module fail; what cannot be measured is worst."""
    verdicts = failing(("a.weight", Kind.MAIN_GRAD, 3.0), ("a.bias", Kind.MAIN_GRAD, 7.0))
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.margin) == ("a", 7.0)
    for outcome in (Outcome.NONFINITE, Outcome.SHAPE):
        third = verdict("a.third", Kind.MAIN_GRAD, outcome, margin=None)
        assert localise([*verdicts, third])[0].verdict is outcome
    infinite = failing(("a.fourth", Kind.MAIN_GRAD, math.inf))
    assert localise([*verdicts, *infinite])[0].margin == math.inf


def test_one_bad_microbatch() -> None:
    """Only the third microbatch of the leaf is wrong; it is named with its number."""
    verdicts = [
        dataclasses.replace(v, verdict=Outcome.DIVERGED, margin=4.0)
        if (v.name, v.kind, v.microbatch) == (FC1, Kind.OUTPUT, 2)
        else v
        for v in run(microbatches=4)
    ]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.microbatch) == (FC1, 2)


@pytest.mark.parametrize("kind", Kind)
def test_what_no_stage_explains_is_named_all_the_same(kind: Kind) -> None:
    assert len(localise(failing(("a.weight", kind, 2.0)))) == 1


def test_the_explanation_is_asked_for_every_culprit() -> None:
    """With the verdict that represents it."""
    asked = []

    def explain(v: Judged) -> Explanation:
        asked.append(v.name)
        return Explanation(PartialSums(Cause.PARTIAL, ("tp",)), (Place("a.py", 3, "f", Clue.RAN),))

    [culprit] = localise(run(is_(Kind.OUTPUT, FC1)), explain)
    assert culprit.explanation == "partial sums over tp: their sum is the reference"
    assert (culprit.hint, culprit.where) == ("a missing reduction over tp", "a.py:3 (f)")
    assert (culprit.cause, culprit.axes) == (Cause.PARTIAL, ("tp",))
    assert asked == [culprit.name]


def test_no_optimizer_has_a_gradient() -> None:
    """Some parameters' gradients are absent, others' only wrong."""
    [culprit, _] = localise(
        [
            verdict("a.weight", Kind.MAIN_GRAD, MISSING, margin=None),
            verdict("b.weight", Kind.MAIN_GRAD, Outcome.DIVERGED, margin=3.0),
        ]
    )
    assert (culprit.name, culprit.verdict) == ("a", MISSING)
    assert "no optimizer has a gradient of a.weight, or it requires none" in culprit.reason
