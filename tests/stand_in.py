# SPDX-License-Identifier: Apache-2.0
"""A stand-in for a GPU: a device of PyTorch's PrivateUse1 mechanism whose tensors hold numbers.

Operations run on a CPU tensor inside. What a GPU would refuse is refused: an operation on tensors
of both sides. What would make the host wait for a GPU is refused while :func:`no_waiting` is on:
reading an element, and copies between device and host that are not ``non_blocking``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.is_nonzero.default,
}
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class WaitedError(RuntimeError):
    """The host would have waited for the device."""


class WrongDeviceError(RuntimeError):
    """An operation got tensors of the device and of the host."""


class OnDevice(torch.Tensor):
    """A tensor on the stand-in device; ``raw`` has its numbers."""

    raw: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, raw: torch.Tensor) -> OnDevice:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=DEVICE,
        )
        made.raw = raw
        return made

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(op, args, kwargs or {})


_setup_privateuseone_for_python_backend("standin")
DEVICE = torch.device("standin:0")
_may_wait = True


class _Factories(TorchDispatchMode):
    """Sees what no tensor of the device takes part in: copies to it, and new tensors on it."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        ours = any(isinstance(x, OnDevice) for x in pytree.tree_leaves((args, kwargs)))
        wanted = kwargs.get("device")
        if ours or (wanted is not None and torch.device(wanted).type == DEVICE.type):
            return _run(op, args, kwargs)
        return op(*args, **kwargs)


def _reads(op: Any, args: Any) -> bool:
    if op in _READS:
        return True
    masks = (torch.bool, torch.uint8)
    return op is torch.ops.aten.index.Tensor and any(
        one is not None and one.dtype in masks for one in args[1]
    )


def _run(op: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    target = kwargs.get("device")
    goes = DEVICE if target is None else torch.device(target)
    if op in _COPIES:
        crosses = {isinstance(x, OnDevice) for x in leaves} == {True, False} or (
            op is torch.ops.aten._to_copy.default
            and isinstance(leaves[0], OnDevice) != (goes.type == DEVICE.type)
        )
        waits = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        if crosses and waits and not _may_wait:
            raise WaitedError(f"{op} between device and host")
    elif any(not isinstance(x, OnDevice) and x.ndim for x in leaves):
        raise WrongDeviceError(f"{op} got a tensor of the host")
    if _reads(op, args) and not _may_wait:
        raise WaitedError(f"{op} reads from the device")
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
        kwargs.pop("pin_memory", None)
    plain = pytree.tree_map_only(OnDevice, lambda x: x.raw, (args, kwargs))
    with torch._C._DisableTorchDispatch():
        result = op(*plain[0], **plain[1])
    if op is torch.ops.aten.copy_.default:
        return args[0]
    if op is torch.ops.aten._to_copy.default and goes.type == "cpu":
        return result
    same = {id(x.raw): x for x in leaves if isinstance(x, OnDevice)}  # of in-place operations
    return pytree.tree_map_only(
        torch.Tensor, lambda x: same.get(id(x)) if id(x) in same else OnDevice(x), result
    )


@contextlib.contextmanager
def present() -> Iterator[torch.device]:
    """The device can be used."""
    with _Factories():
        yield DEVICE


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever makes the host wait raises ``WaitedError``."""
    global _may_wait
    _may_wait = False
    try:
        yield
    finally:
        _may_wait = True
