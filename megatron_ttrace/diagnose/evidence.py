# SPDX-License-Identifier: Apache-2.0
"""What repairs are tested on: a failed tensor's shards, and the reference's whole tensor.

:meth:`Evidence.repairs` applies the measure that failed the tensor (each rank's part against its
tolerance) to the repaired values. Only a repair that brings every part back under the tolerance,
and removes more of every part's error than it would of a random one, becomes an explanation.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from megatron_ttrace.compare.measure import Sums, relative_error
from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import DENSE, EXPERT, Mesh
from megatron_ttrace.trace.findings import FailingRanks, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.views import local_view, logical_view

ELEMENTS = 1 << 20
"""Of larger tensors, only so many elements on all ranks are judged: it must be quick."""

EXPLAINED = 0.5
"""A repair that leaves more than this share of a part's error explains nothing."""

RIGHT = 0.5
"""What a repair leaves may be so many tolerances: healthy tensors have smaller margins."""

CHANCE = 10.0
"""In bits: how improbable it must be that a repair removes as much of a random error."""

_DISTINCT = 64
"""Distinct values of a part from which on there are enough of them."""

_STRETCHES, _SAMPLE, _SIGMAS = 8, 64, 4.0
"""Stretches of a part in each of which what is left must not be correlated with the values, the
elements that each has at least, and standard errors of a correlation."""

_OTHERS = 8.0
"""Bits of the choice of one tensor among all that could be in another's place."""

_SAMPLED = 1 << 12
_LEVELS = 4
"""With fewer values further apart than the tolerance, a part is taken for constant in pieces."""

_OVERHEAD = 20_000
"""What an operation costs beside its elements, in elements."""

Pieces = Sequence[torch.Tensor]


class ExhaustedError(Exception):
    """A search has computed as much as it may."""


class Work:
    """How much may be computed, in elements, so that all machines stop at the same place."""

    def __init__(self, elements: float = math.inf, parent: Work | None = None) -> None:
        """``parent`` is the budget that this one is a part of."""
        self.left = elements
        self._parent = parent

    def spend(self, elements: int) -> None:
        """Count one operation. Raises ``ExhaustedError``."""
        self.left -= elements + _OVERHEAD
        if self.left < 0:
            raise ExhaustedError
        if self._parent is not None:
            self._parent.spend(elements)


@dataclasses.dataclass(frozen=True)
class FailedPart:
    """One rank's shard, in float32 and divided by its expected factor.

    ``pieces`` has one tensor per box, of the box's shape. ``shape`` is that of the shard in memory,
    ``None`` if that is a flat range or was too large to keep.
    """

    mesh: Mesh
    boxes: tuple[Box, ...]
    pieces: tuple[torch.Tensor, ...]
    shape: tuple[int, ...] | None
    factor: float = 1.0

    def laid_out(self) -> torch.Tensor | None:
        """The shard as it is laid out in memory; ``None`` without its shape."""
        if self.shape is None:
            return None
        local = torch.zeros(self.shape)
        for box, piece in zip(self.boxes, self.pieces, strict=True):
            local_view(local, box).copy_(piece)
        return local

    @property
    def rank(self) -> int:
        """The global rank."""
        return self.mesh.rank

    @classmethod
    def of(
        cls,
        local: torch.Tensor,
        mesh: Mesh,
        boxes: tuple[Box, ...],
        factor: float,
        limit: int = ELEMENTS,
    ) -> FailedPart:
        """From a stored shard; one with more than ``limit`` elements is cropped box by box."""
        total = sum(box.numel for box in boxes)
        cropped = boxes if total <= limit else tuple(_crop(box, limit, total) for box in boxes)
        pieces = tuple(
            local_view(local, box)[tuple(map(slice, crop.extent))].float() / factor
            for box, crop in zip(boxes, cropped, strict=True)
        )
        keep = cropped == boxes and not any(box.is_flat for box in boxes)
        return cls(mesh, cropped, pieces, tuple(local.shape) if keep else None, factor)


@dataclasses.dataclass
class Evidence:
    """A failed tensor.

    Attributes:
        reference: its whole value.
        parts: the shards; those within the tolerance are dropped.
        held: boxes of the ranks known to hold the tensor, failing or not.
        microbatches: number of microbatches per data-parallel rank.
        seq_length: to recognise the sequence dim; 0 if unknown.
        work: how much may be computed.
        others: reference tensors with this one's shape that it may hold by mistake, the likely ones
            first, each with the finding that it would be.
        whole: reads a tensor of the reference.
        alike: modules whose input has the shape of another module's.
        errors: of each failing rank before any repair.
        share_of: the whole tensor if ``reference`` and the parts are a share of one: errors are
            relative to it.
        explained: the share of a part's error that may be left.
        chosen: bits of the choices made so far among repairs that could have been applied.
        distinct: how many different values the reference has in the part of each failing rank.
        gain: how many times larger the repairs so far have made the rounding of the values.
        numbers: of the job that it may have been multiplied or divided by, by name.
    """

    key: TraceKey
    reference: torch.Tensor
    parts: list[FailedPart]
    tolerance: Tolerance
    meshes: Sequence[Mesh] = ()
    held: Mapping[int, tuple[Box, ...]] = dataclasses.field(default_factory=dict)
    microbatches: int = 1
    seq_length: int = 0
    work: Work = dataclasses.field(default_factory=Work)
    others: Callable[[], Iterable[tuple[Finding, TraceKey]]] = tuple
    whole: Callable[[TraceKey], torch.Tensor | None] = lambda key: None
    alike: Callable[[str], Iterable[str]] = lambda module: ()
    errors: Mapping[int, float] = dataclasses.field(default_factory=dict)
    share_of: torch.Tensor | None = None
    explained: float = EXPLAINED
    chosen: float = 0.0
    distinct: Mapping[int, int] = dataclasses.field(default_factory=dict)
    gain: float = 1.0
    numbers: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.errors:
            self._leave_out_nonfinite()
            self.errors = {part.rank: self.error(part, part.pieces) for part in self.parts}
            limit = self.tolerance.value
            self.parts = [part for part in self.parts if not self.errors[part.rank] <= limit]
        if not self.distinct:
            by_boxes: dict[object, int] = {}
            for part in self.parts:
                if part.boxes not in by_boxes:
                    by_boxes[part.boxes] = self._distinct(self.expected(part))
            self.distinct = {part.rank: by_boxes[part.boxes] for part in self.parts}

    def _leave_out_nonfinite(self) -> None:
        """Set to zero what is the same infinity, or NaN, in both runs: it is no difference."""
        same = ~self.reference.isfinite()
        if not same.any():
            return
        for part in self.parts:
            for piece, right, box in zip(part.pieces, self.expected(part), part.boxes, strict=True):
                agrees = (piece == right) | (piece.isnan() & right.isnan())
                logical_view(same, box).logical_and_(agrees)
        self.reference = self.reference.masked_fill(same, 0)
        for at, part in enumerate(self.parts):
            pairs = zip(part.pieces, part.boxes, strict=True)
            pieces = tuple(piece.masked_fill(logical_view(same, box), 0) for piece, box in pairs)
            self.parts[at] = dataclasses.replace(part, pieces=pieces)

    def _distinct(self, pieces: Pieces) -> int:
        """How many different sizes some values have; those alike within the tolerance are one.

        Values within the tolerance of zero do not count: they are zero after many a repair.
        """
        distinct = 0
        step = max(self.tolerance.value * self.tolerance.rms, 1e-30)
        sizes = flat(pieces).abs() / step
        for sample in (sizes[:: 1 + len(sizes) // _SAMPLED], sizes):
            sample = sample[sample > 0.5]
            levels = len(sample.round().unique())
            distinct = max(distinct, levels if levels < _LEVELS else len(sample.unique()))
            if distinct >= _DISTINCT:
                break
        return distinct

    def repaired(self, repair: Callable[[FailedPart], Pieces | None]) -> Evidence | None:
        """The same tensor after a repair; ``None`` where it cannot be applied to every part."""
        parts = []
        for part in self.parts:
            if (pieces := repair(part)) is None:
                return None
            self.work.spend(sum(piece.numel() for piece in pieces))
            parts.append(dataclasses.replace(part, pieces=tuple(pieces)))
        return dataclasses.replace(self, parts=parts)

    def expected(
        self, part: FailedPart, reference: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """The slices for a part, of the reference or of another tensor of its shape."""
        reference = self.reference if reference is None else reference
        return [logical_view(reference, box).float() for box in part.boxes]

    def error(
        self, part: FailedPart, pieces: Pieces, reference: torch.Tensor | None = None
    ) -> float:
        """The relative error of a part if it held ``pieces``, by the judge's measure."""
        diff = size = 0.0
        count = 0
        expected = self.expected(part, reference)
        totals = expected if self.share_of is None else self.expected(part, self.share_of)
        for piece, right, total in zip(pieces, expected, totals, strict=True):
            diff += _squares(piece - right)
            size += _squares(total)
            count += right.numel()
        self.work.spend(count)
        return relative_error(Sums(n=count, diff=diff, reference=size), self.tolerance.rms)

    def repairs(
        self,
        repair: Callable[[FailedPart], Pieces | None],
        free: int = 0,
        gain: Callable[[FailedPart], float] = lambda part: 1.0,
    ) -> bool:
        """Whether a repair makes every failing part right, and explains it.

        ``free`` numbers were fitted to each part. ``gain`` is what :func:`gain_of` gives for a
        repair that divides.
        """
        return bool(self.parts) and all(
            (pieces := repair(part)) is not None
            and self.error(part, pieces) <= self.limit(part, free, gain=gain(part))
            and self._is_rounding(part, pieces, self.gain * gain(part))
            for part in self.parts
        )

    def _is_rounding(self, part: FailedPart, pieces: Pieces, gain: float) -> bool:
        """Whether what a repair leaves can be rounding that it made ``gain`` times larger.

        Rounding has nothing to do with the values: of ``n`` elements, its correlation with them is
        about ``1 / sqrt(n)``. What is left of a wrong factor is a multiple of the values.
        """
        if gain == 1:
            return True
        limit = RIGHT * self.tolerance.value
        sides = [flat(side).double() for side in (pieces, self.expected(part))]
        count = min(_STRETCHES, max(1, len(sides[0]) // _SAMPLE))
        for values, right in zip(*(side.chunk(count) for side in sides), strict=True):
            left, size = values - right, float(torch.linalg.vector_norm(right))
            along = abs(float(torch.dot(left, right)))
            noise = _SIGMAS / math.sqrt(len(left)) * float(torch.linalg.vector_norm(left))
            if along > size * max(limit * size, noise):
                return False
        return True

    @property
    def is_right(self) -> bool:
        """Whether nothing is left to repair."""
        return self.repairs(lambda part: part.pieces)

    def holds(self, other: torch.Tensor) -> bool:
        """Whether every failing part holds ``other``, one of many, instead of the reference."""
        return bool(self.parts) and all(
            self.error(part, part.pieces, other) <= self.limit(part, bits=_OTHERS)
            for part in self.parts
        )

    def instead[T: Finding](self, others: Iterable[tuple[T, torch.Tensor]]) -> T | None:
        """The finding of the first of other tensors that every failing part holds."""
        return next((finding for finding, other in others if self.holds(other)), None)

    def limit(self, part: FailedPart, free: int = 0, bits: float = 0.0, gain: float = 1.0) -> float:
        """The largest error that a repair may leave in a part; negative if none can explain it.

        ``free`` and ``bits`` as for :meth:`share`. Equal values count as one: what repairs one of
        them repairs all. The tolerance is what rounding may do to the values as they were held; a
        repair that makes them ``gain`` times larger makes that part of them larger, too. The share
        of the error that may be left is the same.
        """
        left = self.share(self.distinct[part.rank] - free, bits)
        rounding = RIGHT * self.tolerance.value * self.gain * gain
        return min(rounding, left * self.errors[part.rank])

    def share(self, values: int, bits: float = 0.0) -> float:
        """The share of an error that a repair may leave; negative if none can explain it.

        Of a random error of n values, a repair with k fitted numbers leaves less than a share q
        with a probability of about ``q ** (n - k)``, which is given as ``values``. One of ``2 **
        bits`` repairs does so with a probability that is as many times larger.
        """
        if values < 1:
            return -1.0
        chance: float = 2.0 ** -((CHANCE + self.chosen + bits) / values)
        return min(self.explained, chance)

    @property
    def elements(self) -> int:
        """Number of elements of all failing parts."""
        return sum(piece.numel() for part in self.parts for piece in part.pieces)

    def less(
        self, part: FailedPart, values: torch.Tensor | None = None, times: float = 1.0
    ) -> list[torch.Tensor]:
        """A part less ``times`` its slices of ``values``, by default of the reference."""
        values_of_part = self.expected(part, values)
        pairs = zip(part.pieces, values_of_part, strict=True)
        return [piece - times * value for piece, value in pairs]

    def ratio(self, pairs: Iterable[tuple[Pieces, Pieces]]) -> float:
        """The factor that fits ``ours = factor * theirs`` best; 0 where there is none."""
        self.work.spend(self.elements)
        cross, size = dot(pairs)
        return cross / size if size and math.isfinite(cross) else 0.0

    def factor(self) -> float:
        """What all failing parts are multiplied by."""
        return self.ratio((part.pieces, self.expected(part)) for part in self.parts)

    def factors(self) -> dict[int, float]:
        """What each rank's failing part is multiplied by."""
        return {part.rank: self.ratio([(part.pieces, self.expected(part))]) for part in self.parts}

    def surplus(self, summand: torch.Tensor) -> float:
        """How many times too often a summand is in all failing parts."""
        return self.ratio((self.less(part), self.expected(part, summand)) for part in self.parts)

    def near(self, other: torch.Tensor) -> bool:
        """Whether a formula's result is roughly the reference: the formula then applies here."""
        off = float(torch.linalg.vector_norm(other - self.reference))
        return off <= 0.1 * float(torch.linalg.vector_norm(self.reference))

    def tensor(
        self, kind: Kind, name: str, microbatch: int | None = None, index: int = 0
    ) -> torch.Tensor | None:
        """The reference's value of another tensor of the iteration; by default of the microbatch.

        ``None`` if there is none.
        """
        place = self.key.microbatch if microbatch is None else microbatch
        self.work.spend(0)
        return self.whole(TraceKey(self.key.iteration, place, kind, name, index))

    def parameter(self, name: str) -> torch.Tensor | None:
        """The reference's value of a parameter before the step."""
        return self.tensor(Kind.PARAM, name, STEP_LEVEL)

    def bias(self) -> torch.Tensor | None:
        """The bias that the tensor's module adds to its output, if it has one."""
        bias = self.parameter(f"{self.key.name.partition('#')[0]}.bias")
        fits = bias is not None and bias.shape == self.reference.shape[-1:]
        return bias if fits else None

    def size(self, axis: str) -> int:
        """Number of ranks along an axis."""
        return self.meshes[0].size(axis) if self.meshes else 1

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that number this tensor's ranks, of those with more than one rank."""
        return tuple(axis for axis in axes_of(self.key.name) if self.size(axis) > 1)

    def dim_name(self, dim: int) -> str:
        """What the indices of a dim are called."""
        size, ndim = self.reference.shape[dim], self.reference.ndim
        if ndim >= 2 and size == self.seq_length and dim < ndim - 1:
            return "sequence positions"
        if ndim == 1:
            return "elements"
        return "rows" if dim == 0 else "columns" if dim == ndim - 1 else f"dim {dim}"

    def failing_ranks(self) -> FailingRanks:
        """Where the tensor fails, and what these ranks have in common."""
        failing = tuple(sorted({part.rank for part in self.parts}))
        holders = sorted(self.held) or range(len(self.meshes))
        shared = None
        for axis in ("tp", "cp", "pp", "dp", "ep", "etp", "edp"):
            at = {self.meshes[rank].at(axis) for rank in failing}
            holding = tuple(rank for rank in holders if self.meshes[rank].at(axis) in at)
            if self.size(axis) > 1 and len(at) == 1 and holding == failing:
                shared = axis, at.pop()
                break
        return FailingRanks(failing, len(holders), len(self.meshes), shared)


def gain_of(divisor: float) -> float:
    """How many times larger a division makes rounding.

    Rounding has a part that does not depend on the size of a value: that of the larger numbers
    which it is a difference or sum of. The other part is proportional to the value, and has its
    usual size once the value has.
    """
    return max(1.0, 1 / abs(divisor)) if divisor else 1.0


def axes_of(name: str) -> tuple[str, ...]:
    """The axes that number the ranks for a module or parameter."""
    return EXPERT if is_within_experts(name) else DENSE


def _crop(box: Box, limit: int, total: int) -> Box:
    """The first elements of a box, along its longest dim."""
    dim = max(range(len(box.extent)), key=lambda d: box.extent[d])
    extent = list(box.extent)
    extent[dim] = max(1, extent[dim] * limit // total)
    return Box(box.logical, tuple(extent), box.local)


def _squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def dot(parts: Iterable[tuple[Pieces, Pieces]]) -> tuple[float, float]:
    """``(<c, r>, <r, r>)`` over pairs of (candidate, reference) pieces."""
    cross = size = 0.0
    for ours, theirs in parts:
        for c, r in zip(ours, theirs, strict=True):
            r64 = r.double().reshape(-1)
            cross += float(torch.dot(c.double().reshape(-1), r64))
            size += float(torch.dot(r64, r64))
    return cross, size


def indices_of(boxes: Iterable[Box], dim: int) -> torch.Tensor:
    """The logical index of each local index of a dim."""
    runs = sorted({(box.local[dim], box.logical[dim], box.extent[dim]) for box in boxes})
    pieces = [torch.arange(logical, logical + size) for _, logical, size in runs]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


def flat(pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """All elements of a part in one row."""
    return torch.cat([piece.reshape(-1) for piece in pieces])


def is_constant(row: torch.Tensor) -> bool:
    """Whether all elements are equal: such values do not say where they are from."""
    return bool((row == row[:1]).all())


def axis_combinations(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Single axes first, then several together."""
    for size in range(1, len(axes) + 1):
        yield from itertools.combinations(axes, size)
