# SPDX-License-Identifier: Apache-2.0
"""What a right diagnosis is."""

import dataclasses
from typing import Any

import pytest

from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Culprit, Kind, Outcome
from tests.assay.mutants.operators import MARKS, OPERATORS
from tests.assay.mutants.records import Mutant, Phase, Ran
from tests.assay.mutants.source import Span
from tests.assay.mutants.truth import implied, right_cause, right_module

ROUTER = Ran(("decoder.layers.*.mlp.router",))
HEAD = Ran(("model",))


def culprit(name: str, kind: Kind = Kind.OUTPUT, **more: Any) -> Culprit:
    values = {"reason": "", "iteration": 0, "explanation": "", "microbatch": 0, "index": 0}
    values |= {"ranks": (0,), "rel_err_eps": 1.0, "tolerance": 0.1, "margin": 10.0}
    values |= {"direction": kind.direction, "verdict": Outcome.DIVERGED, "rel_err": 1.0, **more}
    return Culprit(name=name, kind=kind, **values)


def mutant(operator: str = "lost-scale", statement: str = "") -> Mutant:
    span = Span(1, 0, 1, 1)
    module = "megatron.core.tensor_parallel.x"
    return Mutant("m:f:o:0", module, "f", operator, span, statement, "y", statement)


@pytest.mark.parametrize(
    ("ran", "name", "kind", "right"),
    [
        (ROUTER, "decoder.layers.7.mlp.router", Kind.GRAD_INPUT, True),
        (ROUTER, "decoder.layers.7.mlp", Kind.OUTPUT, True),
        (ROUTER, "decoder.layers.7.mlp.router.weight", Kind.COUNTED, True),
        (ROUTER, "decoder.layers.7", Kind.OUTPUT, False),
        (ROUTER, "decoder.layers.7.mlp.shared_experts", Kind.OUTPUT, False),
        (HEAD, "output_layer", Kind.GRAD_OUTPUT, True),
        (HEAD, "decoder.layers.0", Kind.OUTPUT, False),
        (Ran(("decoder",)), "decoder.layers.0", Kind.OUTPUT, True),
        # Not names of modules.
        (HEAD, "grad_norm", Kind.GRAD_NORM, False),
        (HEAD, "load_balancing_loss", Kind.METRIC, False),
        (Ran(), "decoder", Kind.OUTPUT, False),
    ],
)
def test_modules(ran: Ran, name: str, kind: Kind, right: bool) -> None:
    """The module that runs the function, the one around it, and the ones in it."""
    assert right_module(mutant(), ran, [culprit(name, kind)]) is right


@pytest.mark.parametrize(
    ("phase", "name", "kind", "right"),
    [
        (Phase.GRADIENTS, "decoder.layers.0.mlp.linear_fc1", Kind.MAIN_GRAD, True),
        (Phase.GRADIENTS, "decoder.layers.0.mlp.linear_fc1", Kind.GRAD_INPUT, False),
        (Phase.OPTIMIZER, "embedding.word_embeddings", Kind.EXP_AVG, True),
        (Phase.OPTIMIZER, "embedding.word_embeddings", Kind.MAIN_GRAD, False),
        (Phase.SCHEDULE, "decoder.layers.1", Kind.GRAD_OUTPUT, True),
        (Phase.SCHEDULE, "decoder.layers.1.mlp", Kind.GRAD_OUTPUT, False),
        (Phase.SCHEDULE, "lm loss", Kind.LOSS, True),
        (Phase.SETUP, "decoder.layers.1.mlp.linear_fc1", Kind.INITIAL, True),
        (Phase.LOGGING, "load_balancing_loss", Kind.METRIC, True),
        (Phase.LOGGING, "embedding.word_embeddings", Kind.MAIN_GRAD, False),
    ],
)
def test_phases(phase: Phase, name: str, kind: Kind, right: bool) -> None:
    """Outside of modules, what the phase makes."""
    assert right_module(mutant(), Ran((), (phase,)), [culprit(name, kind)]) is right


def test_a_parameter_without_an_optimizer() -> None:
    """It has no main gradient, which is the optimizer's doing; a wrong one is not."""
    ran = Ran((), (Phase.OPTIMIZER,))
    assert right_module(mutant(), ran, [culprit("decoder", Kind.MAIN_GRAD, rel_err=None)])


@pytest.mark.parametrize(
    ("phase", "changed", "right"),
    [
        # A schedule that reduces gradients.
        (Phase.SCHEDULE, {"statement": "enable_grad_sync()"}, True),
        (Phase.SCHEDULE, {"statement": "total_num_tokens += num_tokens"}, True),
        (Phase.SCHEDULE, {"statement": "output_tensor /= num_tokens"}, False),
        # What an optimizer leaves in gradients is in the next ones; other functions read them.
        (Phase.OPTIMIZER, {"qualname": "_zero_grad_group_helper"}, True),
        (Phase.OPTIMIZER, {}, False),
    ],
)
def test_gradients(phase: Phase, changed: dict[str, str], right: bool) -> None:
    """They are also wrong if the changed code of another phase fills them."""
    changes = dataclasses.replace(mutant(), **changed)
    wrong = [culprit("output_layer", Kind.MAIN_GRAD)]
    assert right_module(changes, Ran((), (phase,)), wrong) is right


def test_groups_of_culprits() -> None:
    """Others with the first one's cause count; others do not."""
    first = culprit("output_layer", group=1)
    assert right_module(mutant(), ROUTER, [first, culprit("decoder.layers.0.mlp.router", group=1)])
    assert not right_module(
        mutant(), ROUTER, [first, culprit("decoder.layers.0.mlp.router", group=2)]
    )
    assert not right_module(mutant(), ROUTER, [])


@pytest.mark.parametrize("operator", OPERATORS)
def test_every_operator_implies_some_causes_and_not_all(operator: str) -> None:
    """The table has each, and none of them allows everything."""
    marks = [f"setattr(w, '{mark}', x)" for mark in MARKS]
    for statement in marks if operator.endswith("-mark") else [""]:
        causes = implied(mutant(operator, statement))
        assert 0 < len(causes) < len(Cause) / 2
    # A symptom explains nothing, except where something is simply left out.
    assert (Cause.ZERO in causes) == (operator in ("skip-item", "stale-buffer"))


REDUCE = "torch.distributed.all_reduce(x, group=self.tp_group)"


@pytest.mark.parametrize(
    ("operator", "statement", "cause", "axes", "right"),
    [
        ("lost-scale", "x / n", Cause.TOO_LARGE, ("dp",), True),
        ("lost-scale", "x / n", Cause.ZERO, (), False),
        ("lost-scale", "x / n", None, (), None),
        ("drop-collective", REDUCE, Cause.PARTIAL, ("tp",), True),
        ("drop-collective", REDUCE, Cause.PARTIAL, ("dp",), False),
        ("drop-collective", "_reduce(x)", Cause.PARTIAL, ("dp",), True),
        ("drop-collective", REDUCE, Cause.TOO_LARGE, ("tp",), False),
        ("double-collective", REDUCE, Cause.TOO_LARGE, ("tp", "dp"), True),
        ("wrong-group", REDUCE, Cause.PARTIAL, ("dp",), True),
        ("lost-mark", "setattr(w, 'sequence_parallel', x)", Cause.PARTIAL, ("tp",), True),
        ("lost-mark", "setattr(w, 'tensor_model_parallel', x)", Cause.PARTIAL, ("tp",), False),
    ],
)
def test_causes(
    operator: str, statement: str, cause: Cause | None, axes: tuple[str, ...], right: bool | None
) -> None:
    """Told causes against the change; sums over an axis that the group does not have are wrong."""
    told = [culprit("decoder", cause=cause, axes=axes)]
    assert right_cause(mutant(operator, statement), told) is right
