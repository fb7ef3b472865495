# SPDX-License-Identifier: Apache-2.0
"""Coverage over all ranks of a world from the few plans that differ.

A plan is made with a mesh that knows the coordinates on some axes only; reading another one is an
error. Therefore all ranks with these coordinates have this plan. How many they are is counted over
all ranks of the world.
"""

import dataclasses
import math
import types
from collections.abc import Iterable, Sequence

import numpy as np

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.coverage import Coverage, coverage
from megatron_ttrace.placement.mesh import AXES, Mesh
from megatron_ttrace.placement.placements import FlatShard
from megatron_ttrace.placement.plan import Placements

Held = tuple[tuple[Box, ...], int]
"""Boxes, and the number of ranks that hold them."""


def knowing(mesh: Mesh, **coordinates: int) -> Mesh:
    """A mesh of the same sizes that knows nothing of its rank but these coordinates."""
    return dataclasses.replace(
        mesh,
        rank=None,  # type: ignore[arg-type]
        coordinates=types.SimpleNamespace(**coordinates),  # type: ignore[arg-type]
    )


def distinct(mesh: Mesh, places: np.ndarray, axes: Sequence[str]) -> list[tuple[Mesh, int]]:
    """The different coordinates on ``axes``, and how many of ``places`` have them."""
    if not axes:
        return [(knowing(mesh), len(places))]
    columns = places[:, [AXES.index(axis) for axis in axes]]
    coordinates, counts = np.unique(columns, axis=0, return_counts=True)
    return [
        (knowing(mesh, **dict(zip(axes, map(int, where), strict=True))), int(count))
        for where, count in zip(coordinates, counts, strict=True)
    ]


def axes_of(placement: Placements) -> tuple[str, ...]:
    """The axes that divide; a ``FlatShard`` has its range and asks no mesh."""
    divided = (step.axis for step in placement if not isinstance(step.placement, FlatShard))
    return tuple(dict.fromkeys(divided))


def counted(shape: Sequence[int], held: Iterable[Held]) -> Coverage:
    """As ``coverage`` of all ranks' boxes, without repeating what all of them repeat."""
    held = list(held)
    common = math.gcd(*(ranks for _, ranks in held)) or 1
    once = coverage(shape, [box for boxes, ranks in held for box in boxes * (ranks // common)])
    return Coverage(once.least * common, once.most * common)
