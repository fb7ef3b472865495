# SPDX-License-Identifier: Apache-2.0
"""Offloaded optimizer state: Megatron's ``HybridDeviceOptimizer`` on a machine without a GPU.

It asks parameters whether they are on a GPU, and copies some to the host. Here all are in the
host's memory; while it divides them, those that it copied count as the host's, all others as the
GPU's. Everything else runs as it is: two optimizers, copies, streams.
"""

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_IS_CUDA = torch.Tensor.is_cuda.__get__  # type: ignore[attr-defined]
_DIVIDE = "_get_sub_optimizer_param_groups"


class _TwoDevices(TorchFunctionMode):
    """Within this context ``is_cuda`` is false for copies that ``cpu()`` made, and for theirs."""

    def __init__(self) -> None:
        super().__init__()
        self._host: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _IS_CUDA:
            return id(args[0]) not in self._host
        result = func(*args, **(kwargs or {}))
        if torch.is_tensor(result) and (func is torch.Tensor.cpu or id(args[0]) in self._host):
            self._host[id(result)] = result
        return result


def keep_apart() -> None:
    """Let the optimizer divide parameters as on a GPU; a second call changes nothing."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    original = getattr(HybridDeviceOptimizer, _DIVIDE)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def divide(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _TwoDevices():
            return original(self, *args, **kwargs)

    setattr(HybridDeviceOptimizer, _DIVIDE, divide)
