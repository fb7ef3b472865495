# SPDX-License-Identifier: Apache-2.0
"""The bytes of tensors on a CPU, for what is not PyTorch.

``Tensor.numpy`` would make the storage one that cannot be resized for good. Megatron resizes those
of weights that are sharded, and of outputs that it recomputes.
"""

from __future__ import annotations

import ctypes

import torch

_WRITABLE = 0x200
"""``PyBUF_WRITE`` of CPython's object.h."""
_view = ctypes.pythonapi.PyMemoryView_FromMemory
_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view.restype = ctypes.py_object


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor in row-major order, without a copy.

    They do not keep the tensor: whoever uses them has to.
    """
    if not tensor.nbytes:
        return memoryview(b"")
    view: memoryview = _view(tensor.data_ptr(), tensor.nbytes, _WRITABLE)
    return view
