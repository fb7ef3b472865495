# SPDX-License-Identifier: Apache-2.0
"""Start values for Adam's moments.

Adam's first step from empty moments is nearly the sign of the gradient: an element whose gradient
is all rounding flips by twice the learning rate, so the update of a healthy bf16 run differs by
20 % and shows nothing. From moments that look like the middle of a training run the update is a
smooth function of the gradient, as accurate as it is, and a moment that is read from the wrong
place shows.
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
"""Standard deviation of the first moment. Larger than usual gradients: the update stays linear."""

STEP = 100
"""Steps that seem to have been made; the bias corrections then differ from one, and from zero."""


def awaken(owned: Iterable[Owned], rate: float) -> None:
    """Give optimizers that warm up from a learning rate of zero the full one.

    A first step with a rate of zero changes nothing, whatever is wrong with it. Megatron keeps the
    rate it warms up to in the group's ``max_lr``; ``rate`` is for groups without one.
    """
    for part in owned:
        if part.group.get("lr") == 0:
            part.group["lr"] = part.group.get("max_lr") or rate


def prime(owned: Iterable[tuple[ParameterPlace, Owned]], mesh: Mesh, *, seed: int) -> None:
    """Give every Adam-like optimizer the moments of a training run in its middle.

    torch's Adam keeps its step with each parameter, the fused ones of Apex and TransformerEngine in
    the parameter group. Other optimizers are left as they are.
    """
    for place, part in owned:
        kind = type(part.inner).__name__
        if kind not in ("Adam", "AdamW", "FusedAdam"):
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
        if kind == "FusedAdam":
            part.group["step"] = STEP
        else:
            state["step"] = torch.tensor(float(STEP))
