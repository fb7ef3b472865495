# SPDX-License-Identifier: Apache-2.0
"""Failed tensors made by hand: a reference, a layout, and what each rank holds instead."""

import dataclasses
from collections.abc import Callable, Mapping

import torch

from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.diagnose.search import search
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import Placements, plan
from megatron_ttrace.report.explanations import explanation_text, hint_text
from megatron_ttrace.trace.findings import Explanation, Finding
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey
from megatron_ttrace.trace.views import logical_view
from tests.diagnose.judged_by_hand import judged
from tests.placement.meshes import mesh_of

WEIGHT = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "decoder.layers.0.mlp.linear_fc1.weight", 0)
OUTPUT = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp.linear_fc2", 0)


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal values that a seed makes."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def meshes(world: int, **axes: int) -> list[Mesh]:
    """The mesh as every rank sees it."""
    return [mesh_of(rank, world, **axes) for rank in range(world)]


def evidence_of(
    reference: torch.Tensor,
    ranks: list[Mesh],
    held: Callable[[int, torch.Tensor], torch.Tensor] | Mapping[int, torch.Tensor],
    *,
    placement: Placements = (),
    key: TraceKey = WEIGHT,
    tolerance: float = 1e-4,
    trace: Mapping[TraceKey, torch.Tensor] | None = None,
    **more: object,
) -> Evidence:
    """Evidence of a tensor of which ranks hold ``held(rank, right)`` instead of ``right``.

    As in a trace, parts that pass were not kept.
    """
    finite = reference.float().nan_to_num(0.0, 0.0, 0.0)
    rms = float(finite.square().mean().sqrt())
    stored = trace or {}
    boxes_of = {mesh.rank: plan(reference.shape, placement, mesh) for mesh in ranks}
    parts = []
    for mesh in ranks:
        boxes = boxes_of[mesh.rank]
        if callable(held):
            right = torch.cat([logical_view(reference, box) for box in boxes])
            local = held(mesh.rank, right)
        else:
            local = held[mesh.rank]
        parts.append(FailedPart.of(local, mesh, boxes, 1.0))
    return Evidence(
        key=key,
        reference=reference,
        parts=parts,
        tolerance=Tolerance(tolerance, rms),
        meshes=ranks,
        held=boxes_of,
        whole=stored.get,
        **more,  # type: ignore[arg-type]
    )


def products(trace: Mapping[TraceKey, torch.Tensor], fed: str = "") -> list[torch.Tensor]:
    """Each microbatch's share of a linear layer's weight gradient, also with another's input."""
    return [
        gradient.flatten(0, -2).T
        @ trace[dataclasses.replace(key, kind=Kind.INPUT, name=fed or key.name)].flatten(0, -2)
        for key, gradient in trace.items()
        if key.kind is Kind.GRAD_OUTPUT
    ]


def explain(evidence: Evidence) -> Finding | None:
    """The simplest repair."""
    repairs = search(evidence)
    return repairs[0].finding if repairs else None


def failed(key: TraceKey, outcome: Outcome = Outcome.DIVERGED) -> Judged:
    """The verdict of a tensor that fails."""
    place = {"iteration": key.iteration, "microbatch": key.microbatch, "index": key.index}
    return judged(key.kind, key.name, outcome, margin=1e4, tolerance=1e-4, shape=(16, 8), **place)


def text(finding: Finding | None, key: TraceKey = WEIGHT) -> str:
    """The explanation of a finding."""
    assert finding is not None
    return explanation_text(Explanation(finding), failed(key))


def hint(finding: Finding | None, key: TraceKey = WEIGHT) -> str:
    """What a finding suggests."""
    assert finding is not None
    return hint_text(Explanation(finding), failed(key))
