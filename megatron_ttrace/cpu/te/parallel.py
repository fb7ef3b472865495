# SPDX-License-Identifier: Apache-2.0
"""The communication that TransformerEngine's modules do themselves, over ``torch.distributed``.

All of it is along the first dim, which is the sequence in Megatron's ``[s, b, h]`` tensors and the
tokens in flattened ones. A missing group, or one of a single rank, means no communication.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

Group = Any


def group_size(group: Group) -> int:
    """Number of ranks in ``group``; 1 when there is none."""
    if group is None or not dist.is_initialized():
        return 1
    return dist.get_world_size(group)


def all_reduce(tensor: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """Return ``tensor`` reduced over ``group``; the argument is used up."""
    if group_size(group) > 1:
        tensor = tensor.contiguous()
        dist.all_reduce(tensor, op=op, group=group)
    return tensor


def gather_rows(
    tensor: torch.Tensor, group: Group, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Concatenate the ranks' ``[s, ...]`` to ``[n * s, ...]``, into ``out`` if given."""
    return gather_along_first_dim(tensor, group, output_tensor=out)[0]


def reduce_scatter_rows(tensor: torch.Tensor, group: Group) -> torch.Tensor:
    """Sum ``[n * s, ...]`` over the ranks and keep this rank's ``[s, ...]``."""
    return reduce_scatter_along_first_dim(tensor, group)[0]


def gather_along_first_dim(
    tensor: torch.Tensor,
    group: Group,
    async_op: bool = False,
    quantizer: Any = None,
    output_tensor: torch.Tensor | None = None,
    external_coalescing: bool = False,
) -> tuple[torch.Tensor, Any]:
    """TransformerEngine's function of this name: the result, and a handle to wait for.

    Nothing is stored in FP8, so ``quantizer`` changes nothing; gloo coalesces nothing.
    """
    size = group_size(group)
    if size == 1:
        return tensor, None
    out = output_tensor
    if out is None:
        out = tensor.new_empty((tensor.shape[0] * size, *tensor.shape[1:]))
    return out, dist.all_gather_into_tensor(out, tensor.contiguous(), group, async_op)


def reduce_scatter_along_first_dim(
    tensor: torch.Tensor,
    group: Group,
    async_op: bool = False,
    output: torch.Tensor | None = None,
) -> tuple[torch.Tensor, Any]:
    """TransformerEngine's function of this name, likewise."""
    size = group_size(group)
    if size == 1:
        return tensor, None
    if output is None:
        output = tensor.new_empty((tensor.shape[0] // size, *tensor.shape[1:]))
    work = dist.reduce_scatter_tensor(output, tensor.contiguous(), group=group, async_op=async_op)
    return output, work


_buffers: dict[tuple[str, torch.dtype], torch.Tensor] = {}


def initialize_ub(*args: Any, **kwargs: Any) -> None:
    """Start with no "user buffers": each is made, in the size it needs, on first use."""
    _buffers.clear()


def gather_into_buffer(tensor: torch.Tensor, group: Group, name: str) -> torch.Tensor:
    """Gather ``[s, ...]`` along the first dim into the start of the shared buffer ``name``.

    On a GPU the gathered input of a column-parallel layer is written piece by piece into a buffer
    that all layers of one kind ("qkv", "fc1", …) share, while the matrix product already reads the
    pieces that have come. Nothing overlaps here, but the buffer is the same: overwritten by the
    next layer, so whatever a layer keeps for its backward pass must not lie in it.
    """
    shape = torch.Size((tensor.shape[0] * group_size(group), *tensor.shape[1:]))
    key, needed = (name, tensor.dtype), shape.numel()
    if key not in _buffers or _buffers[key].numel() < needed:
        _buffers[key] = torch.empty(needed, dtype=tensor.dtype)
    return gather_rows(tensor, group, out=_buffers[key][:needed].view(shape))


@dataclass(frozen=True)
class TensorParallel:
    """How one linear layer is cut, and so which communication it needs.

    Column parallel: the weight is cut along the output features. The input has to be whole (it is
    gathered if it came cut along the sequence), its gradient is a sum over the ranks.
    Row parallel: the weight is cut along the input features. The output is a sum over the ranks.
    With sequence parallelism a sum is scattered along the sequence instead of kept everywhere.
    """

    group: Group = None
    size: int = 1
    mode: str | None = None
    sequence_parallel: bool = False

    @property
    def column(self) -> bool:
        """Whether this is a column-parallel layer on more than one rank."""
        return self.size > 1 and self.mode == "column"

    @property
    def row(self) -> bool:
        """Whether this is a row-parallel layer on more than one rank."""
        return self.size > 1 and self.mode == "row"

    @property
    def gathers_input(self) -> bool:
        """Whether the layer's input is cut along the sequence."""
        return self.column and self.sequence_parallel

    @property
    def gathers_grad_output(self) -> bool:
        """Whether the output, and so its gradient, is cut along the sequence."""
        return self.row and self.sequence_parallel

    def sum(self, partial: torch.Tensor) -> torch.Tensor:
        """Sum ``[s, ...]`` over the ranks; with sequence parallelism keep this rank's rows."""
        if self.sequence_parallel:
            return reduce_scatter_rows(partial, self.group)
        return all_reduce(partial, self.group)
