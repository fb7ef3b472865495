# SPDX-License-Identifier: Apache-2.0
"""Views of tensors: both sides of a box, and the bytes for what is not PyTorch."""

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from megatron_ttrace.placement.boxes import Box

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The dtype that has the bits of elements of so many bytes."""
_WRITABLE = 0x200
"""``PyBUF_WRITE`` of CPython's object.h."""
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


def every_tensor(values: Any) -> list[torch.Tensor]:
    """All tensors in nested lists, tuples and dictionaries."""
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def box_views(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each box its (local, logical) pair of equally shaped views."""
    for box in boxes:
        yield local_view(local, box), logical_view(logical, box)


def local_view(local: torch.Tensor, box: Box) -> torch.Tensor:
    """The local side of ``box`` as a view (of the logical box's shape)."""
    if box.is_flat:
        return local.reshape(-1).narrow(0, box.local[0], box.numel).view(box.extent)
    return _narrowed(local, box.local, box.extent)


def logical_view(logical: torch.Tensor, box: Box) -> torch.Tensor:
    """The logical side of ``box`` as a view."""
    return _narrowed(logical, box.logical, box.extent)


def _narrowed(data: torch.Tensor, starts: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
    whole = tuple(data.shape)
    if whole != extent:
        for dim, (start, size) in enumerate(zip(starts, extent, strict=True)):
            if size != whole[dim]:
                data = data.narrow(dim, start, size)
    return data


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor in row-major order, as a view."""
    flat = tensor.view(-1)
    if flat.stride(0) != 1:  # of one element any stride is contiguous, except for view
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have the same shape, dtype and bits: NaN, and the sign of 0, too."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    bits = _BITS[a.itemsize]
    return torch.equal(a.view(bits), b.view(bits))


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor in row-major order, without a copy.

    They do not keep the tensor: whoever uses them has to. ``Tensor.numpy`` would make the storage
    one that cannot be resized for good, as Megatron does with those of weights that are sharded and
    of outputs that it recomputes.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    view: memoryview = _view(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view
