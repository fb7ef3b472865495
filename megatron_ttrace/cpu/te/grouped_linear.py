# SPDX-License-Identifier: Apache-2.0
"""TransformerEngine's ``GroupedLinear``: one linear layer per expert, on consecutive tokens."""

import os
from typing import Any

import torch

from megatron_ttrace.cpu.te.base import InitMethod
from megatron_ttrace.cpu.te.fp8 import decode_state, encode_state
from megatron_ttrace.cpu.te.linear import ParallelLinear
from megatron_ttrace.cpu.te.parallel import TensorParallel
from megatron_ttrace.cpu.te.precision import flat
from megatron_ttrace.trace.errors import TTraceError

_SINGLE = "NVTE_GROUPED_LINEAR_SINGLE_PARAM"
"""Only with this variable does TransformerEngine make one parameter for all experts."""


_OF_STATE = {"_encode_extra_state": encode_state, "_decode_extra_state": decode_state}
"""Methods of Megatron's grouped layers that pickle."""


class GroupedLinear(ParallelLinear):
    """Linear layers ``weight0``, ``weight1``, … of equal shape, without communication."""

    def __init_subclass__(cls) -> None:
        """Megatron divides FP8 state among experts and joins it: read and written in our form."""
        super().__init_subclass__()
        for name, ours in _OF_STATE.items():
            if name in vars(cls):
                setattr(cls, name, staticmethod(ours))

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        *,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        **options: Any,
    ) -> None:
        if options.get("ub_overlap_rs") or options.get("ub_overlap_ag"):
            raise ValueError("GroupedLinear does not overlap communication")
        if options.get("tp_size", 1) > 1 and options.get("bias", True):
            raise ValueError("GroupedLinear with tensor parallelism takes no bias")
        is_single = single_grouped_weight or single_grouped_bias
        if is_single and os.environ.get(_SINGLE, "0") != "0":
            raise TTraceError(
                "one weight for all experts (--moe-single-grouped-weight) is not emulated on a "
                "CPU: drop the option for this check"
            )
        self.num_gemms = num_gemms
        super().__init__(in_features, out_features, **options)

    def make_parameters(self, dtype: torch.dtype, device: Any, init: InitMethod) -> None:
        """Make the weights ``[n, k]`` and the biases ``[n]``, which are empty without."""
        shape, zeros = (self.out_features, self.in_features), torch.nn.init.zeros_
        for index in range(self.num_gemms):
            self.add_parameter(f"weight{index}", shape, dtype, device, init, tracked=True)
            if self.use_bias:
                self.add_parameter(f"bias{index}", shape[:1], dtype, device, zeros)
            else:
                setattr(self, f"bias{index}", torch.Tensor())

    def mark_parameters(self) -> None:
        """Weights are not marked as divided, as in TransformerEngine.

        Megatron before 0.19 does not mark them either, and counts a gradient norm by the mark.
        """

    def product_weights(self) -> list[Any]:
        """One weight for each expert."""
        return [getattr(self, f"weight{index}") for index in range(self.num_gemms)]

    def product_biases(self) -> list[Any]:
        """Likewise."""
        return [getattr(self, f"bias{index}") for index in range(self.num_gemms)]

    def layout(self) -> TensorParallel:
        """Megatron's token dispatcher does the communication of experts."""
        return TensorParallel()

    def forward(
        self, inp: torch.Tensor, m_splits: Any, is_first_microbatch: bool | None = None
    ) -> Any:
        """``[tokens, k]`` to ``[tokens, n]``; ``m_splits`` are the numbers of tokens per expert."""
        splits = m_splits.tolist() if isinstance(m_splits, torch.Tensor) else list(m_splits)
        if len(splits) != self.num_gemms:
            raise ValueError(f"{len(splits)} splits for {self.num_gemms} experts")
        sizes = [int(size) for size in splits]
        output, _ = self.product(flat(inp), is_first_microbatch, splits=sizes)
        output = output.view(*inp.shape[:-1], output.shape[-1])
        return (output, self.product_biases()) if self.return_bias else output
