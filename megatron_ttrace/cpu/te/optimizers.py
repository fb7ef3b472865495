# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's optimizers: Apex's, with the arguments that Megatron adds.

``--use-precision-aware-optimizer`` lets Adam store its moments in fewer bits and own the weights'
float32 values. A step computes in float32 and rounds when it stores, so what this plain PyTorch
stores is what TransformerEngine's kernels store:

- FP8 (E4M3; ``torch.uint8`` is its name) and fp16 with one scale per tensor, which maps its largest
  value to the format's largest (to half of that for fp16); bf16 without a scale;
- main weights of bf16 parameters as what their float32 values exceed the parameter by, 16 bits
  (``store_param_remainders``).
"""

from typing import Any

import torch

from megatron_ttrace.cpu import optimizers
from megatron_ttrace.cpu.te import quantize

_FP8 = torch.float8_e4m3fn
_LARGEST = {torch.uint8: torch.finfo(_FP8).max, torch.float16: torch.finfo(torch.float16).max / 2}
_MOMENTS = ("exp_avg", "exp_avg_sq")


class FusedAdam(optimizers.FusedAdam):
    """Adam whose state may have fewer bits than float32."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        **kwargs: Any,
    ) -> None:
        if master_weights and master_weight_dtype is not torch.float32:
            raise NotImplementedError("main weights of fewer bits need TransformerEngine's kernels")
        super().__init__(params, *args, **kwargs)
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
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.decoupled_grad = None

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

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A part of the state in float32; remainders of main weights as they are."""
        held: torch.Tensor = self.state[param][state_name]
        if held.dtype in (torch.float32, torch.int16):
            return held
        scale = self._scales.get(param, {}).get(state_name)
        return held.float() if scale is None else held.float() / scale

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

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if self.use_decoupled_grad:
            return getattr(parameter, "decoupled_grad", None)
        return parameter.grad

    def _update(
        self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]
    ) -> None:
        remainders = self.store_param_remainders and parameter.dtype is torch.bfloat16
        if not self.state[parameter]:
            self.initialize_state(parameter, remainders)
        main = self.state[parameter].get("master_param")
        if main is None or parameter.dtype is torch.float32:
            value = parameter.float()
        else:
            value = joined(parameter, main) if remainders else main
        first, second = (self.get_unscaled_state(parameter, name) for name in _MOMENTS)
        value, first, second = self._stepped(value, gradient, first, second, group)
        self.set_scaled_state(parameter, "exp_avg", first)
        self.set_scaled_state(parameter, "exp_avg_sq", second)
        if remainders:
            rounded, main_weight = parted(value)
            parameter.copy_(rounded)
            main.copy_(main_weight)
            return
        parameter.copy_(value)
        if main is not None:
            main.copy_(value)


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


FusedSGD = optimizers.FusedSGD
