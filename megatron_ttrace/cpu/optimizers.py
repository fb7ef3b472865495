# SPDX-License-Identifier: Apache-2.0
"""Apex's fused optimizers in plain PyTorch: the same update rule, one parameter at a time.

Megatron prefers TransformerEngine's or Apex's ``FusedAdam`` and falls back to ``torch.optim``. The
fallback is not the code that runs on a GPU: it counts steps per parameter instead of per group, and
in 0.19 it cannot resume a run that uses the distributed optimizer (``state_dict`` asserts before
the first step). With these classes Megatron takes the path that it takes on a GPU.

The kernels compute in float32 and round once, when the parameter or a moment is stored.
"""

from collections.abc import Callable
from typing import Any

import torch


class FusedAdam(torch.optim.Optimizer):
    """Adam, with decoupled weight decay (AdamW) by default, the step counted per group."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError("FusedAdam does not support the AMSGrad variant.")
        if capturable or master_weights:
            raise NotImplementedError("capturable and master_weights need the CUDA kernels")
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode
        self.set_grad_none = set_grad_none

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients, as Apex does unless told otherwise."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                gradient = self._gradient(parameter)
                if gradient is not None:
                    self._update(parameter, gradient.float(), group)
        return loss

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        return parameter.grad

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        state = self.state[parameter]
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        moments = state["exp_avg"].float(), state["exp_avg_sq"].float()
        value, exp_avg, exp_avg_sq = self._stepped(parameter.float(), gradient, *moments, group)
        state["exp_avg"].copy_(exp_avg)
        state["exp_avg_sq"].copy_(exp_avg_sq)
        parameter.copy_(value)

    def _stepped(
        self,
        value: torch.Tensor,
        grad: torch.Tensor,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        group: dict[str, Any],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Weight and moments after the group's current step; all tensors are float32."""
        beta1, beta2 = group["betas"]
        step, decay = group["step"], group["weight_decay"]
        correction1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1.0 - beta2**step if group["bias_correction"] else 1.0
        if not self.adam_w_mode and decay:
            grad = grad + decay * value
        exp_avg = exp_avg.mul(beta1).add_(grad, alpha=1.0 - beta1)
        exp_avg_sq = exp_avg_sq.mul(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt_() + group["eps"])
        if self.adam_w_mode and decay:
            update.add_(value, alpha=decay)
        return value.sub(update, alpha=group["lr"]), exp_avg, exp_avg_sq


class FusedSGD(torch.optim.SGD):
    """Apex's SGD: PyTorch's own computes the same rule, in the same order."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,
        materialize_master_grads: bool = True,
        set_grad_none: bool = False,
    ) -> None:
        if wd_after_momentum:
            raise NotImplementedError("weight decay after momentum needs Apex's kernel")
        super().__init__(
            params,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
        )
