# SPDX-License-Identifier: Apache-2.0
"""What a rank found out about a tensor: the record that it hands to the one that judges."""

from __future__ import annotations

import dataclasses

from megatron_ttrace.compare.measure import Sums, relative_error
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.records import TraceKey


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What one rank found out about one of its tensors.

    ``problem`` is empty, ``extra`` (the reference has no such tensor) or ``shape``; ``note`` says
    more. ``sums`` is ``None`` when nothing could be measured. ``sketch``, if any, says that the
    tensor is partial over the mesh axis ``partial_over``: what adds up to the reference are the
    sketches of all ranks with the same boxes (megatron_ttrace/compare/sketch.py). ``moments``, of
    initial values only, are what is judged in their place (megatron_ttrace/compare/initial.py).
    """

    key: TraceKey
    placement: str
    boxes: tuple[Box, ...]
    logical_shape: tuple[int, ...]
    sums: Sums | None
    problem: str = ""
    note: str = ""
    sketch: tuple[float, ...] = ()
    moments: Moments | None = None
    partial_over: str = ""


def fails(sums: Sums | None, tolerances: Tolerances, key: TraceKey) -> bool:
    """Whether one rank's part alone is beyond the tolerance."""
    if sums is None:
        return False
    tolerance = tolerances.of(key)
    return sums.nonfinite > 0 or relative_error(sums, tolerance.rms) > tolerance.value
