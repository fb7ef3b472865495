# SPDX-License-Identifier: Apache-2.0
"""Megatron's functions that take elements of all parameters, and the optimizers that are known."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import MappingProxyType, ModuleType
from typing import Any

from megatron_ttrace.trace.counted import Statistic

WATCHED = MappingProxyType(
    {
        "get_grad_norm_fp32": Statistic.GRAD_NORM,
        "count_zeros_fp32": Statistic.NUM_ZEROS,
        "clip_grad_by_total_norm_fp32": Statistic.CLIPPED,
    }
)
"""Functions of megatron/core/optimizer/clip_grads.py, by name."""

KERNELS = "multi_tensor_applier"
"""What these functions call kernels through that PyTorch's dispatcher does not see."""

_PLAIN = ("FP32Optimizer", "Float16OptimizerWithFloat16Params", "DistributedOptimizer")


def users(function: str) -> Iterator[ModuleType]:
    """Modules of Megatron that have a global of this name: each imported it for itself."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.") and callable(vars(module).get(function)):
            yield module


def unknown_kind(optimizer: Any) -> str:
    """The class of the first optimizer whose division among ranks is not known; empty if none is.

    Those of megatron/core/optimizer/layer_wise_optimizer.py give whole parameters to ranks.
    """
    if type(optimizer).__name__ == "ChainedOptimizer":
        return next(filter(None, map(unknown_kind, optimizer.chained_optimizers)), "")
    return "" if type(optimizer).__name__ in _PLAIN else type(optimizer).__name__


def gathered_over(leaf: Any) -> Any:
    """The process group whose ranks step a parameter in parts; ``None`` if each steps its own."""
    divided = hasattr(leaf, "model_param_group_index_map")
    return getattr(leaf, "data_parallel_group", None) if divided else None
