# SPDX-License-Identifier: Apache-2.0
"""The FP8 state of one module."""

from typing import Any

import torch

from megatron_ttrace.cpu.te.fp8_state import FP8GlobalStateManager
from megatron_ttrace.cpu.te.products import HighPrecision, Precision


class ModuleState:
    """Scales and amax histories of one module's tensors."""

    def __init__(self, module: Any) -> None:
        self.module = module

    def prepare(self, num_gemms: int = 1) -> None:
        """Make the state that the current context's recipe needs."""

    def precision(self, num_gemms: int = 1) -> Precision:
        """Return the rounding for one forward pass."""
        if FP8GlobalStateManager.is_fp8_enabled():
            raise NotImplementedError("FP8 on the CPU")
        return HighPrecision()

    def to_bytes(self) -> torch.Tensor:
        """Serialise the state; empty without FP8."""
        return torch.empty(0, dtype=torch.uint8)

    def from_bytes(self, state: Any) -> None:
        """Take the state back."""
