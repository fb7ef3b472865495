# SPDX-License-Identifier: Apache-2.0
"""Explanations of missing tensors: layers that no pipeline stage built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause, MissingLayers

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def missing_layers(
    name: str,
    expected: Iterable[str],
    held: Mapping[int, Iterable[str]],
    meshes: Sequence[Mesh],
) -> MissingLayers | None:
    """Whole layers are on no stage. The repair: build them; then no layer is missing.

    Args:
        name: of the missing tensor.
        expected: parameters of the reference.
        held: parameters of each rank.
        meshes: of all ranks.
    """
    if not meshes or any(rank >= len(meshes) for rank in held):
        return None
    wanted = _layers(expected)
    stages: dict[int, set[int]] = {}
    for rank, names in held.items():
        stages.setdefault(meshes[rank].at("pp"), set()).update(_layers(names))
    lost = sorted(wanted - set().union(*stages.values()))
    if not _layers([name]) & set(lost):
        return None
    chunks = len(stages) * meshes[0].vpp
    dropped = chunks > 1 and len(lost) == len(wanted) % chunks
    counts = tuple(len(stages[stage]) for stage in sorted(stages))
    return MissingLayers(
        Cause.LAYERS,
        ("pp",),
        layers=tuple(lost),
        total=len(wanted),
        held=counts,
        divisor=chunks if dropped else 0,
    )


def _layers(names: Iterable[str]) -> set[int]:
    return {int(found[1]) for name in names if (found := _LAYER.search(f"{name}."))}
