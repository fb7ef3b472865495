# SPDX-License-Identifier: Apache-2.0
"""Several ranks on one GPU: collectives of CUDA tensors over gloo, staged through the host.

NCCL refuses two ranks on a device, and gloo takes CUDA tensors in broadcasts and all-reductions
only. So every collective gets copies on the host, and what it wrote is copied back. All are
synchronous, except sends and receives: nothing is learned about speed here. For tests alone, and
only where a test's script asks for it.
"""

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from megatron_ttrace.cpu import collectives

_WRITES = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "scatter", "recv", "irecv"), "tensor"),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_tensor", "all_to_all_single"), "output"),
    "all_reduce_coalesced": "tensors",
    "all_gather": "tensor_list",
    "all_gather_into_tensor": "output_tensor",
    "all_gather_coalesced": "output_tensor_lists",
    "all_to_all": "output_tensor_list",
    "gather": "gather_list",
    **dict.fromkeys(("send", "isend"), ""),
}
"""The argument that a collective writes."""
_IN_FLIGHT = ("isend", "irecv")


class _Staged:
    """Copies on the host of the device tensors in a call's arguments."""

    def __init__(self, is_staged: Callable[[torch.Tensor], bool]) -> None:
        self._is_staged = is_staged
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def host(self, value: Any, *, written: bool) -> Any:
        """``value`` with its device tensors exchanged for copies."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            if not self._is_staged(tensor):
                return tensor
            made = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
            if written:
                self._copies.append((tensor, made))
            return made

        return pytree.tree_map_only(torch.Tensor, copy, value)

    @torch.no_grad()
    def write_back(self) -> None:
        """Bring what was received to the device."""
        for tensor, copy in self._copies:
            tensor.copy_(copy)


class _Handle:
    """Waits for the transfer, then brings what was received to the device."""

    def __init__(self, work: Any = None, staged: _Staged | None = None) -> None:
        self._work, self._staged = work, staged

    def wait(self, timeout: Any = None) -> bool:
        if self._work is not None:
            self._work.wait()
        if self._staged is not None:
            self._staged.write_back()
        self._work = self._staged = None
        return True

    def is_completed(self) -> bool:
        return self._work is None or bool(self._work.is_completed())


def install(is_staged: Callable[[torch.Tensor], bool] = lambda tensor: tensor.is_cuda) -> None:
    """Replace the collectives of ``torch.distributed``, whoever has imported them.

    Args:
        is_staged: the tensors that gloo cannot take.
    """
    names = [*_WRITES, "_coalescing_manager", "barrier"]
    originals = {id(getattr(dist, name)): name for name in names}
    collectives.install()
    replacements = {
        name: _staging(getattr(dist, name), written, is_staged) for name, written in _WRITES.items()
    }
    replacements |= {"_coalescing_manager": _one_by_one, "barrier": _barrier(dist.barrier)}
    for name, replacement in replacements.items():
        setattr(dist, name, replacement)
        setattr(dist.distributed_c10d, name, replacement)
    # Megatron, which a check imports before the job's script, has names for some.
    for module in list(sys.modules.values()):
        for variable, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, variable, replacements[originals[id(value)]])


def _staging(collective: Any, written: str, is_staged: Callable[[torch.Tensor], bool]) -> Any:
    signature = inspect.signature(collective)

    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        staged = _Staged(is_staged)
        given = signature.bind(*args, **kwargs).arguments
        wants_handle = given.pop("async_op", False)
        hosts = {name: staged.host(one, written=name == written) for name, one in given.items()}
        result = collective(**hosts)
        if collective.__name__ in _IN_FLIGHT:
            return _Handle(result, staged)
        staged.write_back()
        return _Handle() if wants_handle else result

    return call


@contextlib.contextmanager
def _one_by_one(*args: Any, **kwargs: Any) -> Iterator[_Handle]:
    yield _Handle()


def _barrier(barrier: Any) -> Any:
    @functools.wraps(barrier)
    def call(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        barrier(group=group)
        return _Handle() if async_op else None

    return call
