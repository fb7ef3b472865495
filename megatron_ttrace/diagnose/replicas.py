# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about replicas: partial sums, averages that were not taken, copies that drifted."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, Part, axis_combinations, dot, ranges
from megatron_ttrace.diagnose.scaling import describe_factor, sizes
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause, Finding


def partial(evidence: Evidence) -> Finding | None:
    """Ranks that differ along some axes only. The repair: sum (or average) over these axes.

    A rank whose copy passed was not kept: the reference's slice is its value.
    """
    failing = {part.rank: part for part in evidence.parts}
    for axes in axis_combinations(evidence.axes):
        if not evidence.in_time:
            return None
        sums = {}
        for part in evidence.parts:
            together = _sum(evidence, part, _group(evidence, part.mesh, axes), failing, axes)
            if together is None:
                break
            sums[part.rank] = together
        else:
            found = _named(evidence, axes, sums)
            if found is not None:
                return found
    return None


def _named(
    evidence: Evidence, axes: tuple[str, ...], sums: dict[int, list[torch.Tensor]]
) -> Finding | None:
    cross, size = dot((sums[part.rank], evidence.expected(part)) for part in evidence.parts)
    if not size or cross == 0.0:
        return None
    over = " and ".join(axes)
    ratio = cross / size
    count = 1
    for axis in axes:
        count *= evidence.meshes[0].size(axis)
    if evidence.mends(lambda part: sums[part.rank]):
        if evidence.key.name == EMBEDDING_WEIGHT and "pp" in axes:
            text = (
                "the copies of the tied embedding on the first and the last stage each hold their "
                f"own part of the gradient: their sum over {over} is the reference"
            )
            return Finding(text, Cause.TIED, axes, f"a missing sum over {over}")
        text = f"partial sums over {over}: their sum is the reference"
        return Finding(text, Cause.PARTIAL, axes, f"a missing reduction over {over}")
    if not evidence.mends(lambda part: [piece / ratio for piece in sums[part.rank]]):
        return None
    if abs(ratio / count - 1) <= max(2 * evidence.tolerance.value, 1e-3):
        text = f"each rank holds values of its own: their mean over {over} is the reference"
        return Finding(text, Cause.PARTIAL, axes, f"a missing average over {over}")
    off = describe_factor(ratio, evidence.tolerance.value, sizes(evidence))
    text = f"partial sums over {over}: their sum is {off.text}"
    hint = f"a missing reduction over {over}" + (f", and {off.hint}" if off.hint else "")
    return Finding(text, Cause.PARTIAL, axes, hint)


def _group(evidence: Evidence, mesh: Mesh, axes: Sequence[str]) -> list[Mesh]:
    """The ranks that differ from this one along ``axes`` only."""
    fixed = [axis for axis in evidence.axes if axis not in axes]
    return [
        other
        for other in evidence.meshes
        if all(other.at(axis) == mesh.at(axis) for axis in fixed)
        and (not evidence.holders or other.rank in evidence.holders)
    ]


def _sum(
    evidence: Evidence,
    part: Part,
    group: Sequence[Mesh],
    failing: dict[int, Part],
    axes: Sequence[str],
) -> list[torch.Tensor] | None:
    if len(group) < 2:
        return None
    total = [torch.zeros_like(piece, dtype=torch.float64) for piece in part.pieces]
    for mesh in group:
        other = failing.get(mesh.rank)
        if other is None and "pp" in axes and not evidence.holders:
            continue  # whether that stage holds the tensor is not known
        if other is not None and other.region != part.region:
            return None
        values = other.pieces if other is not None else evidence.expected(part)
        for into, piece in zip(total, values, strict=True):
            into += piece
    return [piece.float() for piece in total]


def some_copies(evidence: Evidence) -> Finding | None:
    """Copies of the same elements of which some pass. The repair: take a right one."""
    wrong = {part.rank for part in evidence.parts}
    right: set[int] = set()
    varied: set[str] = set()
    for part in evidence.parts:
        copies = [mesh for mesh in _copies(evidence, part) if mesh.rank not in wrong]
        if not copies:
            return None
        right |= {mesh.rank for mesh in copies}
        varied |= {
            axis
            for axis in evidence.axes
            if any(mesh.at(axis) != part.mesh.at(axis) for mesh in copies)
        }
    who = f"rank{'s' * (len(wrong) > 1)} {ranges(sorted(wrong))}"
    others = f"rank{'s' * (len(right) > 1)} {ranges(sorted(right))}"
    verb = "hold wrong copies" if len(wrong) > 1 else "holds a wrong copy"
    axes = tuple(axis for axis in evidence.axes if axis in varied)
    return Finding(f"{who} {verb}, the copies on {others} are right", Cause.COPY, axes)


def _copies(evidence: Evidence, part: Part) -> list[Mesh]:
    """The ranks of its pipeline stage that are known to hold what this one holds."""
    own = evidence.held.get(part.rank)
    return [
        mesh
        for mesh in evidence.meshes
        if own is not None
        and evidence.held.get(mesh.rank) == own
        and mesh.at("pp") == part.mesh.at("pp")
    ]
