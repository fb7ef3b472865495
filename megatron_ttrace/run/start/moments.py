# SPDX-License-Identifier: Apache-2.0
"""Start values for the optimizer's moments.

Adam's first step from empty moments is nearly the sign of the gradient. An element whose gradient
is only rounding changes by twice the learning rate, so the updates of a healthy bf16 run differ by
20 % and reveal nothing. Likewise Lion's, which always is a sign, and Muon's, which gives every
direction of the momentum the same length, also those that are only rounding. From moments as in
the middle of training the update is a smooth function of the gradient and as accurate as it, and a
moment that is read from the wrong place becomes visible.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from megatron_ttrace.mcore.optimizer import Owned, family, is_precision_aware
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.sharded_weights import like
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.run.start.generator import generate
from megatron_ttrace.trace.records import Kind
from megatron_ttrace.trace.start import StartValues
from megatron_ttrace.trace.views import local_view, logical_view

SCALE = 0.01
"""Standard deviation of the first moment. Larger than usual gradients: the update is linear."""

STEP = 100
"""Steps that Adam seems to have made; its bias corrections are then neither one nor zero."""

_NEXT_TO_NOTHING = 0.01
"""Share of the full learning rate below which an update may be less than a weight's rounding."""

_OFF_SCHEDULE = 1.25
"""Times the learning rate of a traced step. Optimizers are built with the schedule's first or full
rate: one that keeps it shows with another."""


def awaken(owned: Iterable[Owned], rate: float) -> None:
    """Set a learning rate with which the step shows what is wrong with it.

    Optimizers that warm up from zero, or from next to nothing, get the full one: Megatron keeps it
    in the group's ``max_lr``; ``rate`` is for groups without one.
    """
    for group in {id(part.group): part.group for part in owned}.values():
        full = group.get("max_lr") or rate
        now = group.get("lr", full)
        # A kernel may hold a tensor.
        if not torch.is_tensor(now):
            group["lr"] = (full if now < _NEXT_TO_NOTHING * full else now) * _OFF_SCHEDULE


def prime(
    owned: Iterable[tuple[ParameterPlace, Owned]],
    mesh: Mesh,
    *,
    seed: int,
    coarse: bool = False,
    stored: StartValues | None = None,
    keep: Callable[[str, torch.Tensor], None] | None = None,
) -> None:
    """Give every optimizer moments as in the middle of training; unknown ones are unchanged.

    With ``coarse`` they are powers of two, for a job whose optimizer may have state of few bits;
    whether this one has depends on the layout. ``stored`` may have the values already, before that.
    ``keep`` is called with each moment's name and values in float32, if they are those of a whole
    tensor.
    """
    for place, part in owned:
        if not part.moments or part.group.get("momentum") == 0:
            continue
        where = place.flat(*part.range) if part.range else place
        state = part.inner.state[part.key]
        reduced = is_precision_aware(part.inner)
        if reduced:
            inner: Any = part.inner
            remainders = inner.store_param_remainders and part.main.dtype == torch.bfloat16
            inner.initialize_state(part.key, remainders)
        for name, kind in part.moments.items():
            # Zero, as in training, where the rank's tensor ends with padding.
            moment = torch.zeros_like(part.main, dtype=torch.float32)
            moment_name, shape = f"{place.name}/{kind}", where.logical_shape
            logical = stored.moment(moment_name, shape) if stored else None
            for box in where.boxes(mesh):
                target = local_view(moment, box)
                if logical is not None:
                    target.copy_(logical_view(logical, box))
                    continue
                change = _square if kind is Kind.EXP_AVG_SQ else _mean
                generate(target, seed, moment_name, shape, box.logical, change)
            if keep is not None and tuple(moment.shape) == shape:
                keep(moment_name, moment)
            is_coarse = coarse or reduced or part.counter is not None
            moment = like(part.key, _coarse(moment) if is_coarse else moment)
            if reduced:
                inner.set_scaled_state(part.key, name, moment)
            else:
                state[name] = moment
        if part.group.get("amsgrad"):  # as torch's Adam makes it with the others
            state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
        if family(part.inner) == "SOAP":
            _prime_bases(part, state)
        set_step(part, part.key, STEP)


def _mean(values: torch.Tensor) -> torch.Tensor:
    return values.mul_(SCALE)


def _square(values: torch.Tensor) -> torch.Tensor:
    return values.mul_(0.15).add_(1.0).mul_(SCALE).mul_(SCALE)


def _coarse(moment: torch.Tensor) -> torch.Tensor:
    """Rounded to powers of two, so that no type of few bits and no rank's own scale moves it."""
    return moment.sign() * torch.exp2(moment.abs().log2().round())


def _prime_bases(part: Owned, state: dict[str, Any]) -> None:
    """Give SOAP eigenvalues that are far apart, so that the order of its bases is not rounding."""
    for name, size in zip("LR", part.main.shape, strict=True):
        values = torch.linspace(2.0, 1.0, size, device=part.main.device)
        state[name] = torch.diag(values)
        state[f"Q_{name}"] = torch.eye(size, device=part.main.device)


def set_step(part: Owned, key: torch.Tensor, step: float) -> None:
    """Set the number of steps that the optimizer has made; ``key`` is the parameter in its state.

    torch's Adam keeps it for each parameter, the fused ones of Apex and TransformerEngine in the
    parameter group. Optimizers without a mean of squares count no steps.
    """
    kind = family(part.inner)
    if kind == "FusedAdam":
        (part.group if part.counter is None else part.counter)["step"] = int(step)
    elif kind == "SOAP":
        part.inner.state[key]["step"] = int(step)
    elif "exp_avg_sq" in part.moments:
        part.inner.state[key]["step"] = torch.tensor(float(step))
