# SPDX-License-Identifier: Apache-2.0
"""What hypotheses are tested on: a failed tensor's shards, and the reference's whole tensor.

A hypothesis names a repair. :meth:`Evidence.mends` applies the measure that failed the tensor (each
rank's part against its tolerance) to the repaired values; only a hypothesis that brings every part
back under the tolerance becomes an explanation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from megatron_ttrace.compare.measure import Sums, local_view, logical_view, relative_error
from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import TraceKey

ELEMENTS = 1 << 22
"""Larger parts are judged by their first so many elements: an explanation must be quick."""

DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
"""The two ways in which Megatron numbers the same ranks."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's shard, in float32 and divided by its expected factor.

    ``pieces`` has one tensor per box, of the box's shape. ``local`` is the shard as it lies in
    memory, ``None`` where that is a flat range or was too large to keep.
    """

    mesh: Mesh
    boxes: tuple[Box, ...]
    pieces: tuple[torch.Tensor, ...]
    local: torch.Tensor | None

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.mesh.rank

    @property
    def region(self) -> tuple[object, ...]:
        """What it holds; replicas hold the same."""
        return tuple(box.region for box in self.boxes)


Pieces = Sequence[torch.Tensor]
Repair = Callable[[Part], Pieces | None]


@dataclasses.dataclass
class Evidence:
    """A failed tensor.

    Attributes:
        key: of the tensor.
        reference: its whole value.
        parts: the shards that are beyond the tolerance.
        tolerance: of the tensor.
        meshes: of all ranks.
        held: boxes of the ranks known to hold the tensor, failing or not.
        microbatches: of a data-parallel rank.
        seq_length: to call a dim by its name; 0 when unknown.
        ends: a time (``time.monotonic``) after which searches give up.
        others: reference tensors with this one's shape that it may hold by mistake, the likely ones
            first, each with words for it.
        whole: reads a tensor of the reference.
        alike: modules whose input has the shape of another module's.
    """

    key: TraceKey
    reference: torch.Tensor
    parts: list[Part]
    tolerance: Tolerance
    meshes: Sequence[Mesh] = ()
    held: Mapping[int, tuple[Box, ...]] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    seq_length: int = 0
    ends: float = math.inf
    others: Callable[[], Iterable[tuple[str, Cause, TraceKey]]] = tuple
    whole: Callable[[TraceKey], torch.Tensor | None] = lambda key: None
    alike: Callable[[str], Iterable[str]] = lambda module: ()

    def expected(self, part: Part) -> list[torch.Tensor]:
        """The reference's slices for a part."""
        return [logical_view(self.reference, box).float() for box in part.boxes]

    def error(self, part: Part, pieces: Pieces) -> float:
        """The relative error of a part if it held ``pieces``; the judge's measure."""
        diff = size = 0.0
        count = 0
        for piece, there in zip(pieces, self.expected(part), strict=True):
            diff += _squares(piece - there)
            size += _squares(there)
            count += there.numel()
        return relative_error(Sums(n=count, diff=diff, reference=size), self.tolerance.rms)

    def fits(self, part: Part, pieces: Pieces | None) -> bool:
        """Whether a part with these values would pass."""
        return pieces is not None and self.error(part, pieces) <= self.tolerance.value

    def mends(self, repair: Repair) -> bool:
        """Whether a repair brings every failing part under the tolerance."""
        return bool(self.parts) and all(self.fits(part, repair(part)) for part in self.parts)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that number this tensor's ranks, of those with more than one rank."""
        family = EXPERT if is_within_experts(self.key.name) else DENSE
        return tuple(axis for axis in family if self.meshes and self.meshes[0].size(axis) > 1)

    @property
    def holders(self) -> frozenset[int]:
        """Ranks known to hold the tensor."""
        return frozenset(self.held)

    @property
    def in_time(self) -> bool:
        """Whether a search may go on."""
        return time.monotonic() < self.ends

    def dim_name(self, dim: int) -> str:
        """Words for the indices of a dim."""
        size = self.reference.shape[dim]
        if self.reference.ndim >= 2 and size == self.seq_length and dim < self.reference.ndim - 1:
            return "sequence positions"
        if self.reference.ndim == 1:
            return "elements"
        return "rows" if dim == 0 else "columns" if dim == self.reference.ndim - 1 else f"dim {dim}"


def parts_of(
    local: torch.Tensor, mesh: Mesh, boxes: tuple[Box, ...], factor: float, limit: int = ELEMENTS
) -> Part:
    """A part from a stored shard; a large one is cropped box by box."""
    total = sum(box.numel for box in boxes)
    cropped = boxes if total <= limit else tuple(_crop(box, limit, total) for box in boxes)
    pieces = tuple(
        _first(local_view(local, whole), box).float() / factor
        for whole, box in zip(boxes, cropped, strict=True)
    )
    keep = cropped == boxes and not any(box.is_flat for box in boxes)
    return Part(mesh, cropped, pieces, local.float() / factor if keep else None)


def _crop(box: Box, limit: int, total: int) -> Box:
    """The first elements of a box, along its longest dim."""
    dim = max(range(len(box.extent)), key=lambda d: box.extent[d])
    extent = list(box.extent)
    extent[dim] = max(1, extent[dim] * limit // total)
    return Box(box.logical, tuple(extent), box.local)


def _first(view: torch.Tensor, box: Box) -> torch.Tensor:
    for dim, size in enumerate(box.extent):
        view = view.narrow(dim, 0, size)
    return view


def _squares(values: torch.Tensor) -> float:
    if not values.numel():
        return 0.0
    norm = float(torch.linalg.vector_norm(values.reshape(-1), dtype=torch.float64))
    return norm * norm


def dot(parts: Iterable[tuple[Pieces, Pieces]]) -> tuple[float, float]:
    """``(<c, r>, <r, r>)`` over pairs of (candidate, reference) pieces."""
    cross = size = 0.0
    for ours, theirs in parts:
        for c, r in zip(ours, theirs, strict=True):
            r64 = r.double().reshape(-1)
            cross += float(torch.dot(c.double().reshape(-1), r64))
            size += float(torch.dot(r64, r64))
    return cross, size


def where(failing: Sequence[int], meshes: Sequence[Mesh], holders: frozenset[int]) -> str:
    """Words for a set of ranks: all of them, those that share a coordinate, or their numbers."""
    chosen = sorted(set(failing))
    world = len(meshes)
    if world <= 1 or not chosen:
        return ""
    everyone = sorted(holders) if holders else list(range(world))
    if chosen == everyone and len(chosen) == 1:
        return f"on rank {chosen[0]}, the only one that holds it"
    if chosen == everyone:
        return f"on all {len(chosen)} ranks" + (" that hold it" if len(chosen) < world else "")
    numbers = ", ".join(map(str, chosen[:8])) + (", ..." if len(chosen) > 8 else "")
    listed = f"only on rank{'s' * (len(chosen) > 1)} {numbers}"
    for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "edp"):
        if meshes[0].size(axis) == 1:
            continue
        at = {meshes[rank].at(axis) for rank in chosen}
        sharing = [rank for rank in everyone if meshes[rank].at(axis) in at]
        if len(at) == 1 and sharing == chosen:
            return f"{listed} ({axis} {at.pop()})"
    return listed


def ranges(indices: Sequence[int], limit: int = 3) -> str:
    """``0..3, 8`` for ``[0, 1, 2, 3, 8]``."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    said = [str(a) if a == b else f"{a}..{b}" for a, b in runs[:limit]]
    return ", ".join(said) + (f" and {len(runs) - limit} more ranges" if len(runs) > limit else "")


def axis_combinations(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Single axes first, then several together."""
    for size in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, size)
