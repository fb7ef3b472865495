# SPDX-License-Identifier: Apache-2.0
"""The loss scale of a run in fp16 (``MegatronGradScaler``, megatron/core/optimizer/grad_scaler.py).

A dynamic scale starts at 2**32 by default: gradients overflow, Megatron skips the step and halves
the scale, some twenty times. A traced step needs gradients, so both runs of a check get a scale
that leaves them finite.
"""

import math
from typing import Any

from megatron_ttrace.mcore.optimizer import leaves_of, scalers_of

STEP = 16.0
"""By how much a scale that overflows is lowered at a time."""

ROOM = 2.0
"""How far the scale that is used stays below one that was seen not to overflow."""


def get(optimizer: Any) -> float | None:
    """The loss scale; ``None`` for runs that have none."""
    return next((float(scaler.scale) for scaler in scalers_of(optimizer)), None)


def put(optimizer: Any, scale: float) -> None:
    """Set the loss scale of all parts of an optimizer."""
    for scaler in scalers_of(optimizer):
        scaler._scale = scaler._scale.new_full((1,), scale)


def overflowed(optimizer: Any) -> bool:
    """Whether the last step found gradients that are not finite."""
    flags = (getattr(leaf, "found_inf", None) for leaf in leaves_of(optimizer))
    return any(bool(flag) for flag in flags if flag is not None)


def of_candidate(reference: float, gradient_factor: float) -> float:
    """The candidate's scale: its gradients are then no larger than the reference's.

    It is the reference's divided by a power of two, which rounds nothing. ``gradient_factor``: the
    candidate's activation gradients relative to the reference's.
    """
    return float(reference / 2.0 ** math.ceil(math.log2(gradient_factor)))
