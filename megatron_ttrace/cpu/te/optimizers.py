# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's optimizers and functions over lists of tensors, one tensor at a time.

``torch.optim``, to which Megatron falls back without them, is not the code that runs on a GPU: it
counts steps per parameter instead of per group, and in 0.19 it cannot resume a run that uses the
distributed optimizer (``state_dict`` asserts before the first step).

``--use-precision-aware-optimizer`` lets Adam store its moments in fewer bits and own the weights'
float32 values. A step computes in float32 and rounds when it stores: FP8 (E4M3; ``torch.uint8`` is
its name) and fp16 with one scale per tensor, which maps its largest value to the format's largest
(to half of that for fp16); bf16 without a scale; main weights of bf16 parameters as what their
float32 values exceed the parameter by, 16 bits (``store_param_remainders``).
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from megatron_ttrace.cpu.te import quantize

_FP8 = torch.float8_e4m3fn
_LARGEST = {torch.uint8: torch.finfo(_FP8).max, torch.float16: torch.finfo(torch.float16).max / 2}
Lists = list[list[torch.Tensor]]
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(torch.optim.Optimizer):
    """Adam, with decoupled weight decay (AdamW) by default, the step counted per group.

    Its state may have fewer bits than float32.
    """

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
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
    ) -> None:
        if amsgrad or capturable:
            raise NotImplementedError("AMSGrad and capturable Adam are not implemented on a CPU")
        if master_weights and master_weight_dtype is not torch.float32:
            raise NotImplementedError("main weights of fewer bits need TransformerEngine's kernels")
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
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders and master_weights
        self.name_to_dtype_map = {
            "exp_avg": exp_avg_dtype,
            "exp_avg_sq": exp_avg_sq_dtype,
            "master_param": master_weight_dtype,
        }
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Drop the gradients that a step reads."""
        if not self.use_decoupled_grad:
            super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.decoupled_grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; the others get their state, too.

        So ranks whose part of a sharded parameter is empty have the same keys in their state
        (megatron/training/checkpointing.py, ``fsdp_dtensor``, waits for all of them).
        """
        loss = closure() if closure is not None else None
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter, self._has_remainders(parameter))
                gradient = getattr(parameter, name, None)
                if gradient is not None:
                    self._update(parameter, gradient.float(), group)
        return loss

    def initialize_state(self, param: torch.Tensor, store_param_remainders: bool) -> None:
        """Empty moments, and the parameter's own value as its main weight."""
        for name in _MOMENTS:
            self.set_scaled_state(param, name, torch.zeros_like(param, dtype=torch.float32))
        if self.master_weights:
            self.state[param]["master_param"] = (
                torch.zeros_like(param, dtype=torch.int16)
                if store_param_remainders
                else param.detach().float()
            )

    def state_dict(self) -> dict[str, Any]:
        """The state in float32, without scales; remainders of main weights as they are."""
        saved = super().state_dict()
        parameters = self._numbered(saved)
        for number, state in [*saved["state"].items()]:
            whole = {name: self.get_unscaled_state(parameters[number], name) for name in state}
            saved["state"][number] = whole
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back, in types of its own: PyTorch would give it those of the parameters."""
        super().load_state_dict(state_dict)
        parameters = self._numbered(state_dict)
        for number, state in state_dict["state"].items():
            for name, value in state.items():
                if value is not None:
                    whole = value if value.dtype is torch.int16 else value.float()
                    self.set_scaled_state(parameters[number], name, whole)

    def _numbered(self, saved: dict[str, Any]) -> dict[int, torch.Tensor]:
        """The parameters by their numbers in a saved state."""
        groups = zip(saved["param_groups"], self.param_groups, strict=True)
        pairs = (zip(of["params"], group["params"], strict=True) for of, group in groups)
        return dict(itertools.chain(*pairs))

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A part of the state in float32; remainders of main weights as they are."""
        stored: torch.Tensor = self.state[param][state_name]
        if stored.dtype in (torch.float32, torch.int16):
            return stored
        scale = self._scales.get(param, {}).get(state_name)
        return stored.float() if scale is None else stored.float() / scale

    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Store a part of the state, rounded to its type; remainders as they are."""
        dtype, state = self.name_to_dtype_map[state_name], self.state[param]
        if dtype in _LARGEST:
            largest = quantize.amax(unscaled_state)
            scale = quantize.lowered(quantize.scale_from_amax(largest, _LARGEST[dtype]), False)
            self._scales.setdefault(param, {})[state_name] = scale
            stored = _FP8 if dtype is torch.uint8 else dtype
            state[state_name] = quantize.cast(unscaled_state, scale, stored)
        elif unscaled_state.dtype is torch.int16:
            state[state_name] = unscaled_state.clone()
        else:
            state[state_name] = unscaled_state.to(dtype, copy=True)

    def _has_remainders(self, parameter: torch.Tensor) -> bool:
        return self.store_param_remainders and parameter.dtype is torch.bfloat16

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        remainders = self._has_remainders(parameter)
        main = self.state[parameter].get("master_param")
        if main is None or parameter.dtype is torch.float32:
            value = parameter.float()
        else:
            value = joined(parameter, main) if remainders else main
        moments = [self.get_unscaled_state(parameter, name) for name in _MOMENTS]
        value, moments = self._stepped(value, gradient, moments, group)
        for name, moment in zip(_MOMENTS, moments, strict=True):
            self.set_scaled_state(parameter, name, moment)
        if remainders:
            rounded, main_weight = parted(value)
            parameter.copy_(rounded)
            main.copy_(main_weight)
            return
        parameter.copy_(value)
        if main is not None:
            main.copy_(value)

    def _stepped(
        self,
        value: torch.Tensor,
        grad: torch.Tensor,
        moments: list[torch.Tensor],
        group: dict[str, Any],
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Weight and moments after the group's current step; all tensors are float32."""
        beta1, beta2 = group["betas"]
        step, decay = group["step"], group["weight_decay"]
        correction1 = 1.0 - beta1**step if group["bias_correction"] else 1.0
        correction2 = 1.0 - beta2**step if group["bias_correction"] else 1.0
        if not self.adam_w_mode and decay:
            grad = grad + decay * value
        exp_avg = moments[0].mul(beta1).add_(grad, alpha=1.0 - beta1)
        exp_avg_sq = moments[1].mul(beta2).addcmul_(grad, grad, value=1.0 - beta2)
        update = (exp_avg / correction1) / ((exp_avg_sq / correction2).sqrt_() + group["eps"])
        if self.adam_w_mode and decay:
            update.add_(value, alpha=decay)
        return value.sub(update, alpha=group["lr"]), [exp_avg, exp_avg_sq]


def joined(parameter: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The float32 value of a bf16 parameter and the 16 bits that it lacks, as a signed number."""
    high = parameter.detach().view(torch.int16).to(torch.int32) << 16
    return (high + remainder.to(torch.int32)).view(torch.float32)


def parted(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inverse of :func:`joined`: a float32 value rounded to bf16, and the remainder."""
    bits = value.contiguous().view(torch.int32)
    remainder = bits.to(torch.int16)
    high = ((bits - remainder.to(torch.int32)) >> 16).to(torch.int16)
    return high.view(torch.bfloat16), remainder


#: The same rule, in the same order.
FusedSGD = torch.optim.SGD


def multi_tensor_applier(
    function: Callable[..., Any],
    overflow: torch.Tensor,
    lists: Lists,
    *args: Any,
) -> Any:
    """Apply ``function`` to the lists; kernels take a chunk size first.

    ``overflow`` is where a kernel reports an infinite or NaN gradient.
    """
    return function(2048 * 32, overflow, lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool = False, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of all tensors together, ``[1]``, and of each, in float32.

    ``torch.sum`` adds pairwise, and the kernel adds the sums of chunks. On a CPU
    ``torch.linalg.vector_norm`` adds one element after the other: of 16 million, its result is off
    by 6e-4, and by how much depends on how a layout divides the tensors.
    """
    squares = torch.stack([tensor.float().square().sum() for tensor in lists[0]])
    return squares.sum().sqrt().reshape(1), squares.sqrt() if per_tensor else torch.empty(0)


def multi_tensor_scale(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: float | torch.Tensor
) -> None:
    """Write the first list times ``scale`` to the second, and report what is not finite."""
    for source, target in zip(lists[0], lists[1], strict=True):
        scaled = source.float() * scale
        if not torch.isfinite(scaled).all():
            overflow.fill_(1)
        target.copy_(scaled.view_as(target))  # a scale of one element makes a scalar a vector


multi_tensor_scale_tensor = multi_tensor_scale
