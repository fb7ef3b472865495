# SPDX-License-Identifier: Apache-2.0
"""Verdicts in, culprits out: for every stage of a step, and that consequences are not named."""

import itertools
import math

import pytest

from megatron_ttrace.diagnose.culprits import owner
from megatron_ttrace.report.wording import UNKNOWN
from megatron_ttrace.trace.findings import Cause, Explanation, PartialSums
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import STEP_LEVEL, Direction, Kind, Outcome
from tests.diagnose.judged_by_hand import judged, localise

LAYERS = ("decoder.layers.0", "decoder.layers.1")
LEAVES = (
    "input_layernorm",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


def verdict(
    name,
    kind=Kind.OUTPUT,
    outcome=Outcome.PASS,
    *,
    margin=0.1,
    microbatch=None,
    iteration=1,
    index=0,
):
    """A verdict with a margin."""
    if microbatch is None:
        microbatch = 0 if kind in ACTIVATIONS else STEP_LEVEL
    place = {"iteration": iteration, "microbatch": microbatch, "index": index}
    return judged(kind, name, outcome, margin=margin, **place)


ACTIVATIONS = (Kind.TOKENS, Kind.INPUT, Kind.OUTPUT, Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


def forward_names():
    """Module names in the order of their outputs."""
    names = ["embedding.word_embeddings", "embedding"]
    for layer in LAYERS:
        names += [f"{layer}.{leaf}" for leaf in LEAVES[:3]]
        names += [f"{layer}.self_attention"]
        names += [f"{layer}.{leaf}" for leaf in LEAVES[3:]]
        names += [f"{layer}.mlp", layer]
    return [*names, "output_layer", "model"]


def is_in(name, other):
    """Whether a module is another or lies in it."""
    return f"{name}.".startswith(f"{other}.")


def step(iteration=1, microbatches=1):
    """The keys of a whole step of a small model, in execution order."""
    parameters = [f"{layer}.{leaf}.weight" for layer in LAYERS for leaf in LEAVES]
    for name in parameters:
        yield iteration, STEP_LEVEL, Kind.PARAM, name, 0
    for microbatch in range(microbatches):
        yield iteration, microbatch, Kind.TOKENS, "tokens", 0
        entered = []
        for name in forward_names():
            around = [n for n in reversed(forward_names()) if n == "model" or is_in(name, n)]
            for entering in around:
                if entering not in entered:
                    entered.append(entering)
                    yield iteration, microbatch, Kind.INPUT, entering, 0
            yield iteration, microbatch, Kind.OUTPUT, name, 0
        for name in reversed(forward_names()):
            yield iteration, microbatch, Kind.GRAD_OUTPUT, name, 0
            if name != "model" and not name.startswith("embedding"):
                yield iteration, microbatch, Kind.GRAD_INPUT, name, 0
    for name in parameters:
        yield iteration, STEP_LEVEL, Kind.MAIN_GRAD, name, 0
    for kind in (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ):
        for name in parameters:
            yield iteration, STEP_LEVEL, kind, name, 0
    yield iteration, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0
    yield iteration, STEP_LEVEL, Kind.LOSS, "lm loss", 0
    for name in parameters:
        yield iteration, STEP_LEVEL, Kind.PARAM, name, 1


def run(*faulty, outcome=Outcome.DIVERGED, steps=1, microbatches=1):
    """Verdicts of a run in which the keys that any of ``faulty`` accepts fail."""
    found = []
    for keys in itertools.chain(*(step(i + 1, microbatches) for i in range(steps))):
        iteration, microbatch, kind, name, index = keys
        bad = any(test(kind, name, index) for test in faulty)
        found.append(
            verdict(
                name,
                kind,
                outcome if bad else Outcome.PASS,
                margin=5.0 if bad else 0.1,
                microbatch=microbatch,
                iteration=iteration,
                index=index,
            )
        )
    return found


def is_(wanted, *names):
    """Accepts these tensors of one kind."""
    return lambda kind, name, index: kind is wanted and name in names


def after(first):
    """Accepts everything that ``first``'s wrong output spoils: the rest of the step."""
    order = forward_names()
    begins = order.index(first)

    def spoiled(kind, name, index):
        if kind in (Kind.TOKENS,) or (kind is Kind.PARAM and index == 0):
            return False
        if kind not in (Kind.INPUT, Kind.OUTPUT):
            return True
        position = order.index(name)
        if kind is Kind.OUTPUT:
            return position >= begins
        inside = [n for n in order[: position + 1] if n.startswith(f"{name}.")]
        reads_from = order.index(inside[0]) if inside else position
        return reads_from > begins and name != "model"

    return spoiled


def names(verdicts):
    """Whom it accuses."""
    return [culprit.name for culprit in localise(verdicts)]


def test_a_healthy_run_has_no_culprits():
    """Nothing failed, nobody is named; blind tensors are no failures."""
    assert localise(run()) == []
    assert localise([verdict("a", outcome=Outcome.UNCHECKED)]) == []
    assert localise([]) == []


@pytest.mark.parametrize(
    "leaf",
    ["embedding.word_embeddings", "output_layer"]
    + [f"{layer}.{leaf}" for layer in LAYERS for leaf in LEAVES],
)
def test_forward_names_the_leaf_and_no_consequence(leaf):
    """A leaf's wrong output spoils all that follows and its parents; only the leaf is named."""
    [culprit] = localise(run(after(leaf)))
    assert (culprit.name, culprit.kind, culprit.direction) == (
        leaf,
        Kind.OUTPUT,
        Direction.FORWARD,
    )
    assert culprit.reason.startswith("all its inputs pass, its output does not")
    assert culprit.explanation == UNKNOWN
    assert (culprit.margin, culprit.ranks, culprit.microbatch) == (5.0, (0,), 0)


@pytest.mark.parametrize("parent", ["decoder.layers.0", "decoder.layers.1.mlp", "embedding"])
def test_forward_names_a_parent_whose_children_all_pass(parent):
    """What is computed between the children is the parent's own."""
    assert names(run(after(parent))) == [parent]


def test_forward_blames_what_lies_between_modules():
    """All outputs pass, the next input does not: a lost message between pipeline stages."""
    second = LAYERS[1]

    def spoiled(kind, name, index):
        if kind is Kind.INPUT:
            return name.startswith(second) or name == "output_layer"
        return kind is Kind.OUTPUT and (
            name.startswith(second) or name in ("output_layer", "model")
        )

    culprits = localise(run(spoiled))
    assert [c.name for c in culprits] == [second]
    assert culprits[0].kind is Kind.INPUT
    assert culprits[0].reason.startswith("this input fails although all outputs before it pass")


def test_the_model_is_named_when_nobody_else_can_be():
    """Its output fails and everything inside passes."""
    assert names(run(is_(Kind.OUTPUT, "model"))) == ["model"]


def test_a_module_without_inputs():
    """Rotary embeddings take no tensor; the reason says that they have no inputs."""
    verdicts = [verdict("rotary_pos_emb", outcome=Outcome.DIVERGED, margin=9.0)]
    [culprit] = localise(verdicts)
    assert culprit.reason.startswith("it has no traced inputs, and its output fails")


def test_a_second_call_is_no_other_place():
    """``name#1`` lies inside its parent as ``name`` does."""
    verdicts = [
        verdict("mtp.linear#1", Kind.INPUT),
        verdict("mtp.linear#1", outcome=Outcome.DIVERGED, margin=3.0),
        verdict("mtp#1", Kind.INPUT),
        verdict("mtp#1", outcome=Outcome.DIVERGED, margin=2.0),
        verdict("mtp", Kind.INPUT),
        verdict("mtp", outcome=Outcome.DIVERGED, margin=2.0),
    ]
    assert names(verdicts) == ["mtp.linear#1"]


def test_names_that_merely_begin_alike_are_strangers():
    """``layers.1`` is no parent of ``layers.10``."""
    verdicts = [
        verdict("decoder.layers.1", outcome=Outcome.DIVERGED, margin=2.0),
        verdict("decoder.layers.10", outcome=Outcome.DIVERGED, margin=2.0),
    ]
    assert names(verdicts) == ["decoder.layers.1", "decoder.layers.10"]


def test_several_culprits_in_execution_order():
    """The same bug in both layers, whose error rounding swallowed in between."""
    faulty = [f"{layer}.mlp.linear_fc1" for layer in LAYERS]
    assert names(run(is_(Kind.OUTPUT, *faulty))) == faulty


def test_routing_counts_as_an_output():
    """A router that sends tokens elsewhere although its input passes."""
    verdicts = [
        verdict("decoder.layers.0.mlp.router", Kind.INPUT),
        verdict("decoder.layers.0.mlp.router", Kind.ROUTING, Outcome.DIVERGED, microbatch=0),
    ]
    assert names(verdicts) == ["decoder.layers.0.mlp.router"]


@pytest.mark.parametrize(
    ("kind", "name", "index"), [(Kind.TOKENS, "tokens", 0), (Kind.PARAM, "w.weight", 0)]
)
def test_start_comes_first(kind, name, index):
    """Different data or parameters explain everything after them."""
    verdicts = [
        verdict(name, kind, Outcome.DIVERGED, index=index),
        *run(after("embedding.word_embeddings")),
    ]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.direction) == (name, Direction.START)
    assert culprit.reason.startswith("differs before anything was computed")


def test_a_parameter_after_the_step_is_no_start_value():
    """Index 1 is the parameter after the update."""
    [culprit] = localise([verdict("a.weight", Kind.PARAM, Outcome.DIVERGED, index=1)])
    assert (culprit.name, culprit.direction) == ("a", Direction.UPDATE)


@pytest.mark.parametrize("outcome", [Outcome.MISSING, Outcome.EXTRA, Outcome.UNCOVERED])
def test_absent_parameters_name_their_module(outcome):
    """One module per absent parameter; its activations and gradients are consequences."""
    gone = "decoder.layers.1.mlp.linear_fc2"

    def absent(kind, name, index):
        return name.startswith(gone)

    [culprit] = localise(run(absent, outcome=outcome))
    assert (culprit.name, culprit.kind, culprit.verdict) == (gone, Kind.PARAM, outcome)


def test_absent_activations_speak_where_no_parameter_does():
    """A norm that never ran, although its weight exists."""
    gone = "decoder.layers.0.input_layernorm"
    verdicts = run(lambda kind, name, index: kind in ACTIVATIONS and name == gone)
    verdicts = [
        Judged(**{**as_dict(v), "verdict": Outcome.MISSING}) if v.verdict.is_failure else v
        for v in verdicts
    ]
    assert names(verdicts) == [gone]


def as_dict(v):
    """A verdict's fields."""
    return {name: getattr(v, name) for name in Judged.__dataclass_fields__}


def test_the_loss_alone():
    """All modules pass, the number that is logged does not."""
    [culprit] = localise(run(is_(Kind.LOSS, "lm loss"), is_(Kind.MAIN_GRAD, "decoder")))
    assert (culprit.name, culprit.kind) == ("lm loss", Kind.LOSS)
    assert culprit.reason.startswith("every module's output passes, the reported loss does not")


def backward_after(first):
    """Accepts what a wrong input gradient of ``first`` spoils."""
    order = list(reversed(forward_names()))
    begins = order.index(first)

    def spoiled(kind, name, index):
        if kind in (Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ):
            return order.index(owner(name)) > begins
        if kind is Kind.GRAD_NORM:
            return True
        if kind is Kind.GRAD_INPUT:
            return order.index(name) >= begins or first.startswith(f"{name}.")
        around = first.startswith(f"{name}.")
        return kind is Kind.GRAD_OUTPUT and order.index(name) > begins and not around

    return spoiled


@pytest.mark.parametrize(
    "leaf",
    [
        "output_layer",
        "decoder.layers.1.mlp.linear_fc1",
        "decoder.layers.0.self_attention.linear_qkv",
    ],
)
def test_backward_names_the_leaf_and_no_consequence(leaf):
    """Forward passes; the module whose output gradients pass and whose input gradient does not."""
    [culprit] = localise(run(backward_after(leaf)))
    assert (culprit.name, culprit.kind, culprit.direction) == (
        leaf,
        Kind.GRAD_INPUT,
        Direction.BACKWARD,
    )
    assert "its input gradient does not" in culprit.reason


def test_backward_that_starts_wrong():
    """The very first gradient fails: the loss's own scale."""
    verdicts = run(lambda kind, name, index: kind in (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT))
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.kind, culprit.direction) == (
        "model",
        Kind.GRAD_OUTPUT,
        Direction.BACKWARD,
    )


def test_gradient():
    """Activations and their gradients pass, one reduced gradient does not."""
    weight = "decoder.layers.0.input_layernorm.weight"
    verdicts = run(
        is_(Kind.MAIN_GRAD, weight),
        is_(Kind.GRAD_NORM, "grad_norm"),
        is_(Kind.PARAM_DELTA, weight),
        is_(Kind.EXP_AVG, weight),
    )
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.kind, culprit.direction) == (
        "decoder.layers.0.input_layernorm",
        Kind.MAIN_GRAD,
        Direction.GRADIENT,
    )
    assert weight in culprit.reason


def test_the_norm_of_the_gradients_alone():
    """It scales every update when gradients are clipped: the updates are its consequence."""
    verdicts = run(
        is_(Kind.GRAD_NORM, "grad_norm"), lambda kind, name, index: kind is Kind.PARAM_DELTA
    )
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.direction) == ("grad_norm", Direction.GRADIENT)
    assert culprit.reason.startswith("every main gradient passes, their norm does not")


@pytest.mark.parametrize("kind", [Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ, Kind.BUFFER])
def test_update(kind):
    """Gradients pass, what the optimizer makes of them does not."""
    verdicts = [*run(), verdict("decoder.layers.1.mlp.linear_fc1.weight", kind, Outcome.DIVERGED)]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.kind, culprit.direction) == (
        "decoder.layers.1.mlp.linear_fc1",
        kind,
        Direction.UPDATE,
    )


def test_one_culprit_per_module_stands_for_its_worst_tensor():
    """Weight and bias of one module fail; what cannot be measured is worst."""
    verdicts = [
        verdict("a.weight", Kind.MAIN_GRAD, Outcome.DIVERGED, margin=3.0),
        verdict("a.bias", Kind.MAIN_GRAD, Outcome.DIVERGED, margin=7.0),
    ]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.margin) == ("a", 7.0)
    for outcome in (Outcome.NONFINITE, Outcome.SHAPE):
        third = verdict("a.third", Kind.MAIN_GRAD, outcome, margin=None)
        [culprit] = localise([*verdicts, third])
        assert culprit.verdict is outcome
    infinite = verdict("a.fourth", Kind.MAIN_GRAD, Outcome.DIVERGED, margin=math.inf)
    assert localise([*verdicts, infinite])[0].margin == math.inf


def test_later_iterations_are_consequences():
    """The update of the first iteration is wrong, so everything of the second is."""
    verdicts = [
        *run(is_(Kind.PARAM_DELTA, "decoder.layers.0.mlp.linear_fc2.weight")),
        *[v for v in run(after("embedding"), steps=2) if v.iteration == 2],
    ]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.iteration) == ("decoder.layers.0.mlp.linear_fc2", 1)


def test_one_bad_microbatch():
    """Only the third microbatch of the leaf is wrong; it is named with its number."""
    leaf = "decoder.layers.0.mlp.linear_fc1"
    verdicts = run(microbatches=4)
    verdicts = [
        verdict(v.name, v.kind, Outcome.DIVERGED, microbatch=2, margin=4.0)
        if (v.name, v.kind, v.microbatch) == (leaf, Kind.OUTPUT, 2)
        else v
        for v in verdicts
    ]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.microbatch) == (leaf, 2)


def test_what_no_stage_explains_is_named_all_the_same():
    """Nothing that failed goes unmentioned."""
    for kind in Kind:
        failed = verdict("a.weight", kind, Outcome.DIVERGED, margin=2.0)
        assert len(localise([failed])) == 1, kind


def test_the_explanation_is_asked_for_every_culprit():
    """With the verdict that stands for it."""
    asked = []

    def explain(v):
        asked.append(v)
        return Explanation(PartialSums(Cause.PARTIAL, ("tp",)), "there")

    verdicts = run(is_(Kind.OUTPUT, "decoder.layers.0.mlp.linear_fc1"))
    [culprit] = localise(verdicts, explain)
    assert culprit.explanation == "partial sums over tp: their sum is the reference"
    assert (culprit.hint, culprit.where) == ("a missing reduction over tp", "there")
    assert (culprit.cause, culprit.axes) == (Cause.PARTIAL, ("tp",))
    assert [v.name for v in asked] == [culprit.name]


@pytest.mark.parametrize(
    ("parameter", "module"),
    [("a.b.weight", "a.b"), ("weight", "weight"), ("a.experts.weight3", "a.experts")],
)
def test_owner(parameter, module):
    """The module that a parameter belongs to."""
    assert owner(parameter) == module


def test_parameters_the_optimizer_never_saw():
    """Their moments are missing; the wrong norm, and all clipped updates, are consequences."""
    verdicts = [
        verdict("a.weight", Kind.MAIN_GRAD),
        verdict("b.weight", Kind.MAIN_GRAD),
        verdict("grad_norm", Kind.GRAD_NORM, Outcome.DIVERGED),
        verdict("a.weight", Kind.PARAM_DELTA, Outcome.DIVERGED),
        verdict("a.weight", Kind.EXP_AVG, Outcome.DIVERGED),
        verdict("b.weight", Kind.PARAM_DELTA, Outcome.DIVERGED),
        verdict("b.weight", Kind.EXP_AVG, Outcome.MISSING),
    ]
    found = localise(verdicts)
    assert [(c.name, c.kind, c.direction) for c in found] == [
        ("b", Kind.PARAM_DELTA, Direction.UPDATE)
    ]


def test_an_error_that_surfaces_again_is_no_culprit():
    """Inputs that pass, but nearly as far off as the output, make no second birthplace."""
    verdicts = [
        verdict("first", Kind.OUTPUT, Outcome.DIVERGED, margin=60.0),
        verdict("later", Kind.INPUT, margin=0.83),
        verdict("later", Kind.OUTPUT, Outcome.DIVERGED, margin=1.24),
        verdict("other", Kind.INPUT, margin=0.1),
        verdict("other", Kind.OUTPUT, Outcome.DIVERGED, margin=50.0),
    ]
    assert [c.name for c in localise(verdicts)] == ["first", "other"]


def test_initial_values_of_a_claimed_layer():
    """Two stages hold other layers under one number: the number is wrong, not the values."""
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    initial = verdict(name, Kind.INITIAL, Outcome.REPLICA_CONFLICT)
    (found,) = localise([initial, verdict(name, Kind.PARAM, Outcome.EXTRA)])
    assert found.kind is Kind.PARAM
