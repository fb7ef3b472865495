# SPDX-License-Identifier: Apache-2.0
"""Explanations of tensors that are not there: layers that no pipeline stage built."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_ttrace.diagnose.evidence import ranges
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause, Finding

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The layer a canonical name lies in."""
    found = _LAYER.search(f"{name}.")
    return int(found[1]) if found else None


def missing_layers(
    name: str,
    expected: Iterable[str],
    held: Mapping[int, Iterable[str]],
    meshes: Sequence[Mesh],
) -> Finding | None:
    """Whole layers are on no stage. The repair: build them; then no layer is missing.

    Args:
        name: of the missing tensor.
        expected: parameters of the reference.
        held: parameters of each rank.
        meshes: of all ranks.
    """
    layer = layer_of(name)
    wanted = {found for found in map(layer_of, expected) if found is not None}
    stages: dict[int, set[int]] = {}
    for rank, names in held.items():
        if rank >= len(meshes):
            return None
        found = {number for number in map(layer_of, names) if number is not None}
        stages.setdefault(meshes[rank].at("pp"), set()).update(found)
    lost = sorted(wanted - set().union(*stages.values()))
    if layer is None or layer not in lost:
        return None
    counts = " + ".join(str(len(stages[stage])) for stage in sorted(stages))
    text = (
        f"layer{'s' * (len(lost) > 1)} {ranges(lost)} of {len(wanted)} on no pipeline stage: "
        f"the stages hold {counts} = {sum(map(len, stages.values()))} layers"
    )
    hint = ""
    size = len(stages) * (meshes[0].vpp if meshes else 1)
    if size > 1 and len(wanted) % size and len(wanted) - len(lost) == len(wanted) // size * size:
        hint = f"{len(wanted)} // {size} layers each, and the remainder is dropped"
    return Finding(text, Cause.LAYERS, ("pp",), hint)
