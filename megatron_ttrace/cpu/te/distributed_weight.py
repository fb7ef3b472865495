# SPDX-License-Identifier: Apache-2.0
"""Weights that ranks gather before each use, and the gradients that they scatter afterwards.

TransformerEngine from 2.19 on (transformer_engine/pytorch/distributed_weight.py) leaves both to the
weight: the first of a layer's weights is asked for all of them. Megatron's are ``GTPShardedParam``
(megatron/core/tensor_parallel/generalized_tensor_parallelism.py), which uses a few more of
TransformerEngine's functions.
"""

from collections.abc import Sequence
from typing import Any

import torch

MXFP8_BLOCK_SCALING_SIZE = 32
NVFP4_BLOCK_SCALING_SIZE = 16


def nvtx_range_push(msg: str) -> None:
    """Begin a range of a profile, of which there is none."""


def nvtx_range_pop(msg: str | None = None) -> None:
    """End it."""


def round_up_to_nearest_multiple(value: int, multiple: int) -> int:
    """The least multiple that is not below ``value``."""
    return -(-value // multiple) * multiple


_dummies: dict[tuple[torch.Size, torch.dtype], torch.Tensor] = {}


def get_dummy_wgrad(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """What autograd gets for a weight whose gradient is already where it belongs.

    It is one buffer for all weights of a shape, which nobody writes to unless ``zero`` is asked for
    (transformer_engine/pytorch/module/base.py). NaN stands for what its memory contains.
    """
    key = torch.Size(shape), dtype
    if key not in _dummies:
        _dummies[key] = torch.full(shape, torch.nan, dtype=dtype)
    if zero:
        _dummies[key].zero_()
    return _dummies[key].detach()


def is_distributed(weight: torch.Tensor) -> bool:
    """Whether a weight is only a part, which it knows how to complete."""
    return bool(getattr(weight, "is_distributed_weight", False))


def gathered(weights: Sequence[torch.Tensor], *, backward: bool = False) -> list[torch.Tensor]:
    """The whole weights of a layer, for its products; they may lie in buffers that are reused."""
    first: Any = weights[0]
    if not is_distributed(first):
        return list(weights)
    gather = (
        first.materialize_group_for_backward if backward else first.materialize_group_for_forward
    )
    return _listed(gather())


def gradient_dtype(weights: Sequence[torch.Tensor]) -> torch.dtype:
    """Dtype of the weights' gradients: that of the buffer, if ranks add them up before it."""
    buffer = getattr(weights[0], "main_grad", None) if is_distributed(weights[0]) else None
    return weights[0].dtype if buffer is None else buffer.dtype


def scattered(
    weights: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """What autograd gets for the weights: their gradients, or what their owner returns for them.

    A gradient of ``None`` is not computed, which is so for all weights of a layer.
    """
    first: Any = weights[0]
    if not is_distributed(first) or gradients[0] is None:
        return list(gradients)
    return _listed(
        first.finalize_group_grads(list(gradients) if len(gradients) > 1 else gradients[0])
    )


def _listed(result: Any) -> list[Any]:
    return list(result) if isinstance(result, list | tuple) else [result]
