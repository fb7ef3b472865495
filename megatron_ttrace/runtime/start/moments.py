# SPDX-License-Identifier: Apache-2.0
"""Start values for Adam's moments.

Adam's first step from empty moments is nearly the sign of the gradient. An element whose gradient
is only rounding changes by twice the learning rate, so the updates of a healthy bf16 run differ by
20 % and reveal nothing. From moments as in the middle of training the update is a smooth function
of the gradient and as accurate as it, and a moment that is read from the wrong place becomes
visible.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_ttrace.compare.measure import local_view
from megatron_ttrace.mcore.optimizer import Owned
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.sharded_weights import like
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.runtime.start.generator import normal

SCALE = 0.01
"""Standard deviation of the first moment. Larger than usual gradients: the update is linear."""

STEP = 100
"""Steps that Adam seems to have made; its bias corrections are then neither one nor zero."""


def awaken(owned: Iterable[Owned], rate: float) -> None:
    """Set the full learning rate in optimizers that warm up from zero.

    A step with a rate of zero changes nothing, even if it is wrong. Megatron keeps the full rate in
    the group's ``max_lr``; ``rate`` is for groups without one.
    """
    for part in owned:
        if part.group.get("lr") == 0:
            part.group["lr"] = part.group.get("max_lr") or rate


def prime(owned: Iterable[tuple[ParameterPlace, Owned]], mesh: Mesh, *, seed: int) -> None:
    """Give every Adam-like optimizer moments as in the middle of training; others are unchanged."""
    for place, part in owned:
        if type(part.inner).__name__ not in ("Adam", "AdamW", "FusedAdam"):
            continue
        where = place.flat(*part.range) if part.range else place
        first = torch.empty_like(part.main, dtype=torch.float32)
        second = torch.empty_like(part.main, dtype=torch.float32)
        for box in where.boxes(mesh):
            shape, origin, extent = where.logical_shape, box.logical, box.extent
            values = normal(seed, f"{place.name}/exp_avg", shape, origin, extent)
            local_view(first, box).copy_(values * SCALE)
            spread = normal(seed, f"{place.name}/exp_avg_sq", shape, origin, extent)
            local_view(second, box).copy_((spread * 0.15 + 1.0) * SCALE**2)
        state = part.inner.state[part.key]
        state["exp_avg"], state["exp_avg_sq"] = like(part.key, first), like(part.key, second)
        set_step(part, part.key, STEP)


def set_step(part: Owned, key: torch.Tensor, step: float) -> None:
    """Set the number of steps that Adam has made; ``key`` is the parameter in its state.

    torch's Adam keeps it for each parameter, the fused ones of Apex and TransformerEngine in the
    parameter group.
    """
    if type(part.inner).__name__ == "FusedAdam":
        part.group["step"] = int(step)
    else:
        part.inner.state[key]["step"] = torch.tensor(float(step))
