# SPDX-License-Identifier: Apache-2.0
"""What a rank found out about a tensor: the record that it sends to the rank that judges."""

import dataclasses
import math
from enum import StrEnum
from typing import Self

import torch

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.moments import Moments
from megatron_ttrace.trace.records import TraceKey


class Problem(StrEnum):
    """Why a tensor cannot be compared."""

    EXTRA = "extra"
    """The reference has no such tensor."""
    SHAPE = "shape"
    """Its shape fits no part of the reference's, or its dtype is coarser."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What one rank found out about one of its tensors.

    Attributes:
        placement: for reports.
        boxes: which of its elements are which logical ones.
        logical_shape: of the whole tensor; of one that does not fit, the candidate's.
        sums: of the differences; ``None`` when nothing could be measured, and empty while
            ``unread`` has them.
        problem: why nothing could be, if so; ``note`` has more.
        sketch: of a tensor that is partial over the mesh axis ``partial_over``: the sketches of all
            ranks with the same boxes add up to the reference (compare/sketch.py).
        moments: of initial values, which are judged by these (compare/initial.py).
        unread: sums that are still on a device (compare/device.py).
    """

    key: TraceKey
    placement: str
    boxes: tuple[Box, ...]
    logical_shape: tuple[int, ...]
    sums: Sums | None
    problem: Problem | None = None
    note: Note | None = None
    sketch: tuple[float, ...] = ()
    moments: Moments | None = None
    partial_over: str = ""
    unread: torch.Tensor | None = None

    @classmethod
    def stranger(cls, key: TraceKey, shape: tuple[int, ...]) -> Self:
        """A tensor that the reference does not have."""
        note = Note(Remark.EXTRA, text="not in the reference")
        return cls(key, "", (), shape, None, problem=Problem.EXTRA, note=note)

    @classmethod
    def misfit(
        cls, key: TraceKey, shape: tuple[int, ...], why: str, remark: Remark = Remark.SHAPE
    ) -> Self:
        """A tensor whose shape fits none of the reference's; of a parameter, the whole one's."""
        note = Note(remark, text=why)
        return cls(key, "", (), shape, None, problem=Problem.SHAPE, note=note)

    @property
    def region(self) -> tuple[object, ...]:
        """The logical elements that the rank holds; replicas hold the same."""
        return tuple(box.region for box in self.boxes)

    @property
    def is_equal(self) -> bool:
        """Whether no difference was measured."""
        return self.unread is None and not (self.sums and (self.sums.diff or self.sums.nonfinite))

    @property
    def is_part(self) -> bool:
        """Whether the rank holds some of the logical elements only."""
        return sum(box.numel for box in self.boxes) < math.prod(self.logical_shape)


def fails(sums: Sums | None, tolerances: Tolerances, key: TraceKey) -> bool:
    """Whether one rank's part alone is beyond the tolerance."""
    if sums is None or not (sums.diff or sums.nonfinite):
        return False
    return sums.nonfinite > 0 or tolerances.of(key).error_of(sums).margin > 1.0
