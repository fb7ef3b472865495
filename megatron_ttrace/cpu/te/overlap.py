# SPDX-License-Identifier: Apache-2.0
"""Communication buffers of tensor-parallel overlap ("user buffers").

On a GPU the gathered input of a column-parallel layer is written piece by piece into a buffer that
all layers of one kind ("qkv", "fc1", …) share, while the matrix product already reads the pieces
that have come. Nothing overlaps here, but the buffer is the same: shared, and overwritten by the
next layer. So whatever a layer keeps for its backward pass must not lie in it.
"""

from typing import Any

import torch

from megatron_ttrace.cpu.te.parallel import Group, gather_rows, group_size

_buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}


def initialize_ub(*args: Any, **kwargs: Any) -> None:
    """Start with no buffers: each is made, in the size it needs, on first use."""
    _buffers.clear()


def gather_into_buffer(tensor: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    """Gather ``[s, ...]`` along the first dim into the start of the shared buffer ``name``."""
    shape = torch.Size((tensor.shape[0] * group_size(group), *tensor.shape[1:]))
    key, needed = (name, tensor.dtype), shape.numel()
    if key not in _buffers or _buffers[key].numel() < needed:
        _buffers[key] = torch.empty(needed, dtype=tensor.dtype)
    return gather_rows(tensor, group, out=_buffers[key][:needed].view(shape))
