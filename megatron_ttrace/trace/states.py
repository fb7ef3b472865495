# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint keeps of parameters."""

import dataclasses
from enum import StrEnum

from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.codec import Count


class State(StrEnum):
    """What of a parameter a tensor is."""

    WEIGHT = "weight"
    """The model's own; also that of a buffer."""
    MAIN = "main weight"
    """The optimizer's copy, in float32."""
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    OTHER = "other optimizer state"


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Item:
    """Which tensor of a checkpoint.

    Attributes:
        state: what of the parameter it is.
        name: of the parameter, as stored, without the optimizer's prefix. Numbers of layers and
            experts may be given although a checkpoint stacks them (``Checkpoint.find``).
        slot: the optimizer's name of the state, for :attr:`State.OTHER`.
    """

    state: State
    name: str
    slot: str = ""

    def __str__(self) -> str:
        if self.state is State.WEIGHT:
            return self.name
        return f"{self.name} ({self.slot or self.state})"


@dataclasses.dataclass(frozen=True, slots=True)
class Bucketed:
    """A rank's part of a parameter in a bucket.

    Attributes:
        key: of the bucket, without the state's name.
        start: the first element in the bucket.
        logical_shape: of the parameter in the whole model.
        boxes: of the logical parameter, which the part is.
    """

    name: str
    key: str
    start: Count
    shape: tuple[Count, ...]
    logical_shape: tuple[Count, ...]
    boxes: tuple[Box, ...]


SCHEDULER = "opt_param_scheduler."
"""Beginning of the names of the scheduler's numbers."""

SCHEDULED = ("lr", "min_lr", "max_lr", "start_wd", "end_wd", "weight_decay")
"""What the scheduler sets in a parameter group."""
