# SPDX-License-Identifier: Apache-2.0
"""Functions over lists of tensors, which on a GPU are one kernel each.

Gradient clipping and optimizers call them through ``multi_tensor_applier``. The overflow buffer is
where a kernel reports an infinite or NaN gradient.
"""

from collections.abc import Callable
from typing import Any

import torch

Lists = list[list[torch.Tensor]]


class MultiTensorApply:
    """Calls a function; the kernels take a chunk size first."""

    available = True

    def __init__(self, chunk_size: int = 2048 * 32) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, function: Callable[..., Any], overflow: torch.Tensor, lists: Lists, *args: Any
    ) -> Any:
        """Apply ``function`` to the lists."""
        return function(self.chunk_size, overflow, lists, *args)


multi_tensor_applier = MultiTensorApply()


def multi_tensor_l2norm(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, per_tensor: bool = False, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm of all tensors together, ``[1]``, and of each, in float32.

    ``torch.sum`` adds pairwise, and the kernel adds the sums of chunks. On a CPU
    ``torch.linalg.vector_norm`` adds one element after the other: of 16 million, its result is off
    by 6e-4, and by how much depends on how a layout divides the tensors.
    """
    squares = torch.stack([t.float().square().sum() for t in lists[0]])
    return squares.sum().sqrt().reshape(1), squares.sqrt() if per_tensor else torch.empty(0)


def multi_tensor_scale(
    chunk_size: int, overflow: torch.Tensor, lists: Lists, scale: float | torch.Tensor
) -> None:
    """Write the first list times ``scale`` to the second, and report what is not finite."""
    for source, target in zip(lists[0], lists[1], strict=True):
        scaled = source.float() * scale
        if not torch.isfinite(scaled).all():
            overflow.fill_(1)
        target.copy_(scaled)


multi_tensor_scale_tensor = multi_tensor_scale
