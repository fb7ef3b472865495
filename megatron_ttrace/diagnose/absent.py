# SPDX-License-Identifier: Apache-2.0
"""Explanations of layers that no pipeline stage holds, or several, or that do not exist."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause, MisnumberedLayers, MissingLayers

_LAYER = re.compile(r"^(|.*?\.)layers\.(\d+)\.")

Layer = tuple[str, int]
"""What precedes ``layers`` in its name, and its number."""


def layer_in(name: str) -> Layer | None:
    """The layer that a parameter belongs to, if it belongs to one."""
    found = _LAYER.match(name)
    return (found[1], int(found[2])) if found else None


def stages_of(held: Mapping[int, Iterable[str]], meshes: Sequence[Mesh]) -> dict[int, set[Layer]]:
    """The layers that each pipeline stage holds; empty if the ranks' places are not known.

    Args:
        held: parameters of each rank.
        meshes: of all ranks.
    """
    stages: dict[int, set[Layer]] = {}
    if all(rank < len(meshes) for rank in held):
        for rank, names in held.items():
            stages.setdefault(meshes[rank].at("pp"), set()).update(_layers(names))
    return stages


def misplaced_layers(
    name: str,
    expected: Iterable[str],
    held: Mapping[int, Iterable[str]],
    meshes: Sequence[Mesh],
) -> MissingLayers | MisnumberedLayers | None:
    """Whole layers are on no stage, or on several. The repair: hold or number each layer once.

    Args:
        name: of the parameter that is missing or held too often.
        expected: parameters of the reference.
        held: parameters of each rank.
        meshes: of all ranks.
    """
    own = layer_in(name)
    stages = stages_of(held, meshes)
    if own is None or not stages:
        return None
    wanted = {layer for layer in _layers(expected) if layer[0] == own[0]}
    there = {stage: {one for one in found if one[0] == own[0]} for stage, found in stages.items()}
    everywhere = set().union(*there.values())
    lost, strange = wanted - everywhere, everywhere - wanted
    twice = {one for one in everywhere if sum(one in found for found in there.values()) > 1}
    if own not in lost | strange | twice:
        return None
    counts = tuple(len(there[stage]) for stage in sorted(there))
    if twice or strange:
        return MisnumberedLayers(
            Cause.LAYER_NUMBERS,
            ("pp",),
            missing=_numbers(lost),
            twice=_numbers(twice),
            strange=_numbers(strange),
            total=len(wanted),
            held=counts,
        )
    chunks = len(there) * meshes[0].vpp
    dropped = chunks > 1 and len(lost) == len(wanted) % chunks
    return MissingLayers(
        Cause.LAYERS,
        ("pp",),
        layers=_numbers(lost),
        total=len(wanted),
        held=counts,
        divisor=chunks if dropped else 0,
    )


def _numbers(layers: Iterable[Layer]) -> tuple[int, ...]:
    return tuple(sorted(number for _, number in layers))


def _layers(names: Iterable[str]) -> set[Layer]:
    return {found for name in names if (found := layer_in(name)) is not None}
