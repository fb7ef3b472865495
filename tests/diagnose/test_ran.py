# SPDX-License-Identifier: Apache-2.0
"""Culprits cite the collectives that ran in them; places are those of the code that ran."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ttrace.diagnose.ran import cite, in_culprits
from megatron_ttrace.report.explanations import culprit_of
from megatron_ttrace.trace.collectives import (
    UNRECORDED,
    Citation,
    Collective,
    Ledger,
    ModuleCode,
    Operation,
    Phase,
    Sources,
)
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Explanation,
    Finding,
    Loss,
    LossShare,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import Culprit, Direction, Kind, Outcome
from tests.diagnose.judged_by_hand import diagnosed, verdict
from tests.diagnose.ran_by_hand import collective

FC1 = "decoder.layers.{}.mlp.linear_fc1"
LINEAR = ModuleCode(
    "layers.py:1 (Column.forward)",
    "layers.py:2 (Linear.backward)",
    "w.py:3 (W)",
    "activation.py:1 (Fused.backward)",
    "layers.py:0 (Column.__init__)",
)
SOURCES = Sources(
    {"model": 1, "decoder": 1, "embedding": 1, "decoder.layers.0": 2}
    | {FC1.format(layer): 0 for layer in range(3)},
    (
        LINEAR,
        ModuleCode("block.py:4 (Block.forward)"),
        ModuleCode("layer.py:5 (Layer.forward)", built="layer.py:1 (Layer.__init__)"),
    ),
    optimizer="optimizer.py:5 (step)",
    finalize="finalize.py:6 (finalize)",
    step="pretrain.py:7 (forward_step)",
    metrics={"learning-rate": "training.py:1 (log)", "z_loss": "moe.py:1 (log)"},
)


def ran(module: str, direction: Phase, group: str = "tp") -> Collective:
    """A collective of the first iteration."""
    return collective("reduce", group, module=module, direction=direction)


def failed(kind: Kind, name: str) -> Judged:
    """A failure of which only kind and name matter."""
    return verdict(name, kind, Outcome.DIVERGED)


BACKWARD = [ran(FC1.format(layer), Phase.BACKWARD) for layer in range(3)]
PARTIAL = Finding(Cause.PARTIAL, ("tp",))
SHARE = LossShare(
    Cause.TOO_LARGE, losses=(Loss.AUXILIARY,), fault=ConstantFactor(Cause.TOO_LARGE, ratio=2.0)
)


def blamed(name: str, direction: Direction) -> Culprit:
    """A culprit."""
    failure = failed(Kind.OUTPUT, name)
    return culprit_of(diagnosed(failure, Explanation(), direction=direction))


def of(*calls: Collective, sources: Sources = SOURCES, unseen: tuple[str, ...] = ()) -> Ledger:
    """The record of these calls."""
    return Ledger(calls, sources=sources, unseen=unseen)


def gradients(group: str) -> Collective:
    """A reduction of gradients over a group."""
    return ran("", Phase.GRADIENTS, group=group)


INSIDE = ran(FC1.format(0), Phase.FORWARD)
LATER = dataclasses.replace(INSIDE, iteration=2)
OTHERS = (BACKWARD[0], BACKWARD[2])
"""What the siblings of the second layer's module ran."""
LACKING = ((Operation.ALL_REDUCE, "tp"),)
UNLIKE = dataclasses.replace(SOURCES, modules=SOURCES.modules | {FC1.format(1): 1})
MIXED = dataclasses.replace(
    SOURCES, modules=SOURCES.modules | {"decoder.layers.1": 2, "decoder.layers.1.mlp": 1}
)
LAST = dataclasses.replace(
    SOURCES,
    modules=SOURCES.modules | {FC1.format(2): 3},
    codes=(*SOURCES.codes, dataclasses.replace(LINEAR, user="norm.py:2 (Norm.backward)")),
)
WRONG = failed(Kind.GRAD_INPUT, FC1.format(1))
WEIGHT = failed(Kind.MAIN_GRAD, f"{FC1.format(0)}.weight")
B, G = Phase.BACKWARD, Phase.GRADIENTS


def small(axis: str) -> Finding:
    return Finding(Cause.TOO_SMALL, (axis,))


@pytest.mark.parametrize(
    ("ledger", "verdict", "finding", "expected"),
    [
        # All siblings ran it, the culprit did not; also without a finding.
        (of(*OTHERS), WRONG, PARTIAL, Citation(B, (), ("tp",), LACKING, 2)),
        (of(*OTHERS), WRONG, None, Citation(B, (), (), LACKING, 2)),
        # One sibling without it, and nothing is unusual about the culprit.
        (of(OTHERS[0]), WRONG, PARTIAL, Citation(B, (), ("tp",), (), 2)),
        # A layer of another class may communicate differently.
        (of(OTHERS[0], sources=UNLIKE), WRONG, None, Citation(B)),
        # So may a layer of the same class with other modules in it.
        (
            of(ran("decoder.layers.1.mlp", Phase.FORWARD), sources=MIXED),
            *(failed(Kind.OUTPUT, "decoder.layers.0"), None, Citation(Phase.FORWARD)),
        ),
        # The last layer's output goes to a norm; the layer communicates like the others.
        (
            of(*BACKWARD, sources=LAST),
            *(failed(Kind.GRAD_INPUT, FC1.format(2)), None),
            Citation(B, (BACKWARD[2],), siblings=2),
        ),
        # In the modules inside a container, in this direction and iteration only.
        (
            of(INSIDE, ran(FC1.format(10), Phase.FORWARD), LATER, *BACKWARD),
            *(failed(Kind.OUTPUT, "decoder.layers.0"), None, Citation(Phase.FORWARD, (INSIDE,))),
        ),
        # The reductions of gradients over the axes of the finding.
        *(
            (
                *(of(gradients(group)), WEIGHT, small(axis)),
                Citation(G, (gradients(group),)) if runs else Citation(G, (), (axis,)),
            )
            for group, axis, runs in [
                *(("tp", "tp", True), ("dp-cp", "cp", True), ("embedding", "pp", True)),
                *(("dp", "tp", False), ("etp", "tp", False)),
            ]
        ),
        (of(gradients("dp")), WEIGHT, Finding(Cause.ROWS), None),
        # User buffers reduce over tp without a process group: what may run unseen is not missed.
        (of(gradients("dp"), unseen=("tp",)), WRONG, PARTIAL, None),
        (
            of(gradients("dp"), unseen=("tp",)),
            *(WEIGHT, Finding(Cause.PARTIAL, ("tp", "cp")), Citation(G, (), ("cp",))),
        ),
        # Without a record, and for what is wrong before the step.
        (UNRECORDED, WRONG, PARTIAL, None),
        (Ledger(), WRONG, PARTIAL, None),
        (of(*BACKWARD), failed(Kind.TOKENS, "tokens"), None, None),
        # What was made outside of modules: what ran in the model had no part in it.
        *(
            (of(ran("model", Phase.FORWARD)), failed(*made), None, None)
            for made in ((Kind.INPUT, "model"), (Kind.LOSS, "lm loss"))
        ),
    ],
)
def test_cited(
    ledger: Ledger, verdict: Judged, finding: Finding | None, expected: Citation | None
) -> None:
    assert cite(verdict, finding, ledger) == expected


@pytest.mark.parametrize(
    ("name", "direction", "modules", "phases", "expected"),
    [
        ("decoder.layers.3.mlp", Direction.FORWARD, ("decoder.layers.*.mlp",), (), True),
        ("decoder.layers.3.mlp", Direction.FORWARD, ("decoder.layers.*.mlp.fc1",), (), True),
        ("decoder.layers.3.mlp", Direction.BACKWARD, ("decoder.layers.*",), (), False),
        ("decoder.layers.3.mlp", Direction.FORWARD, ("decoder.layers.*.mlp2",), (), False),
        ("decoder.layers.3.mlp.weight", Direction.GRADIENT, ("decoder.layers.*.mlp",), (), True),
        ("a.weight", Direction.GRADIENT, (), (Phase.GRADIENTS,), True),
        ("a.weight", Direction.UPDATE, (), (Phase.OPTIMIZER,), True),
        ("a", Direction.FORWARD, (), (Phase.OPTIMIZER,), False),
        ("a", Direction.FORWARD, (), (), False),
    ],
)
def test_changed_code_in_a_culprit(
    name: str,
    direction: Direction,
    modules: tuple[str, ...],
    phases: tuple[Phase, ...],
    expected: bool,
) -> None:
    """Where it ran in the culprit, inside it, or in its part of the step; then it is first."""
    ran = ChangedFunction(
        file="a.py", function="f", line=1, ran=Execution.ELSEWHERE, modules=modules, phases=phases
    )
    idle = ChangedFunction("a.py", "g", 9, Execution.NOT_RUN)
    changed = in_culprits(ChangedCode("v1", (idle, ran)), [blamed(name, direction)])
    state = Execution.IN_CULPRIT if expected else Execution.ELSEWHERE
    assert changed.functions == (dataclasses.replace(ran, ran=state), idle)
    assert in_culprits(ChangedCode("v1", (idle,)), []).functions == (idle,)
