# SPDX-License-Identifier: Apache-2.0
"""What gloo takes differently from NCCL.

Gloo moves and reduces the same numbers. It has its own names and types for some arguments:
split sizes of an all-to-all must be Python integers (the MoE dispatcher passes what it has, which
can be tensors), lists of unequal parts are refused, there is no NCCL backend to ask for, and no
device to bind a group to. Of two coalesced reductions of one buffer, undefined with NCCL, it makes
one: those are refused here.
"""

import contextlib
import functools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_SOCKETS = (Path("/proc/self/net/tcp"), Path("/proc/self/net/tcp6"))
_LISTENS = "0A"
_PATIENCE = 10.0


def _integers(sizes: Any) -> list[int] | None:
    if sizes is None:
        return None
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else [int(size) for size in sizes]


def gloo(backend: Any) -> Any:
    """``backend`` with NCCL, alone or in a ``device:backend`` list, replaced by gloo."""
    return "gloo" if "nccl" in str(backend) or str(backend) == "nvshmem" else backend


def _patch(name: str, replacement: Any) -> None:
    # torch.distributed re-exports the functions of distributed_c10d: callers use either.
    setattr(dist, name, replacement)
    setattr(dist.distributed_c10d, name, replacement)


class _Done:
    """The handle of a collective that has finished before it returned."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Answer yes."""
        return True


def _even(tensors: list[torch.Tensor]) -> bool:
    return len({tuple(tensor.shape) for tensor in tensors}) <= 1


def _members(group: Any) -> tuple[int, list[int]]:
    """Return this process's place in ``group`` and the global ranks of all places."""
    group = group if group is not None else dist.distributed_c10d._get_default_group()
    return dist.get_rank(group), dist.get_process_group_ranks(group)


def _install_uneven() -> None:
    """Parts of unequal size, which NCCL moves one by one and gloo refuses.

    Expert tensor parallelism gathers and scatters as many rows as each rank has tokens. The
    sizes are in the arguments of every rank, so all ranks take the same branch.
    """
    all_gather, reduce_scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(all_gather)
    def gather(
        tensor_list: list[torch.Tensor],
        tensor: torch.Tensor,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _even(tensor_list):
            return all_gather(tensor_list, tensor, group, async_op)
        place, ranks = _members(group)
        tensor_list[place].copy_(tensor)
        for part, source in zip(tensor_list, ranks, strict=True):
            if part.numel():
                dist.broadcast(part, src=source, group=group)
        return _Done() if async_op else None

    @functools.wraps(reduce_scatter)
    def scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if _even(input_list):
            return reduce_scatter(output, input_list, op, group, async_op)
        place, ranks = _members(group)
        for index, (part, owner) in enumerate(zip(input_list, ranks, strict=True)):
            if part.numel():
                # Gloo leaves partial sums in the buffers of the other ranks: reduce a copy.
                total = part.clone()
                dist.reduce(total, dst=owner, op=op, group=group)
                if index == place:
                    output.copy_(total)
        return _Done() if async_op else None

    @functools.wraps(dist.all_to_all)
    def exchange(
        output_tensor_list: list[torch.Tensor],
        input_tensor_list: list[torch.Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        lists = output_tensor_list, input_tensor_list
        flat = torch.cat([part.reshape(-1) for part in input_tensor_list])
        theirs, ours = ([part.numel() for part in parts] for parts in lists)
        received = flat.new_empty(sum(theirs))
        dist.all_to_all_single(received, flat, theirs, ours, group)
        for part, values in zip(output_tensor_list, received.split(theirs), strict=True):
            part.copy_(values.view_as(part))
        return _Done() if async_op else None

    _patch("all_to_all", exchange)
    _patch("all_gather", gather)
    _patch("reduce_scatter", scatter)


def _is_in_place(operation: Any) -> bool:
    """Whether a collective's result is where its input is.

    NCCL leaves the buffer of a single rank alone. Gloo writes it once more at the end, over what
    was added meanwhile (a deferred gradient of the output layer).
    """
    result = operation.dst_tensor
    return result is None or result.data_ptr() == operation.tensor.data_ptr()


def _install_coalescing() -> None:
    manager = dist.distributed_c10d._coalescing_manager

    @functools.wraps(manager)
    @contextlib.contextmanager
    def coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
        # With a device the backend would coalesce, which gloo does not.
        with manager(group, async_ops=async_ops) as work:
            yield work
            world = dist.distributed_c10d._world
            group = group if group is not None else dist.distributed_c10d._get_default_group()
            waiting = world.pg_coalesce_state.get(group, [])
            if dist.get_world_size(group) == 1:
                waiting[:] = [operation for operation in waiting if not _is_in_place(operation)]
            in_place = (operation.tensor for operation in waiting if operation.dst_tensor is None)
            # Empty tensors have no address of their own.
            buffers = [tensor.data_ptr() for tensor in in_place if tensor.numel()]
            if len(set(buffers)) < len(buffers):
                raise RuntimeError("two coalesced reductions of one buffer: undefined with NCCL")

    _patch("_coalescing_manager", coalescing)


def install() -> None:
    """Replace the collectives gloo takes differently, and what makes process groups."""
    if not dist.is_available():
        return
    all_to_all_single = dist.all_to_all_single

    @functools.wraps(all_to_all_single)
    def all_to_all(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        sizes = _integers(output_split_sizes), _integers(input_split_sizes)
        return all_to_all_single(output, input, *sizes, *args, **kwargs)

    _patch("all_to_all_single", all_to_all)
    _install_uneven()
    _install_coalescing()
    for name in ("init_process_group", "new_group", "new_subgroups_by_enumeration"):
        _patch(name, _with_gloo(getattr(dist, name)))


def await_store(patience: float = _PATIENCE) -> None:
    """Wait, this many seconds at most, until rank 0 takes connections, if it is on this machine.

    A rank that connects too early tries again after about half a second
    (torch/csrc/distributed/c10d/socket.cpp), and all others wait for it.
    """
    port = os.environ.get("MASTER_PORT", "")
    is_local = os.environ.get("MASTER_ADDR") in ("127.0.0.1", "localhost")
    if not (port.isdecimal() and is_local and os.environ.get("RANK", "0") != "0"):
        return
    end, pause = time.monotonic() + patience, 0.005
    while time.monotonic() < end and not _is_listening(int(port)):
        time.sleep(pause)
        pause = min(2 * pause, 0.1)  # many ranks on few cores must not keep rank 0 from starting


def _is_listening(port: int) -> bool:
    """Whether a process of this machine listens at a port; true where that cannot be found out."""
    try:
        rows = [row.split() for file in _SOCKETS for row in file.read_text().splitlines()[1:]]
    except OSError:
        return True
    return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTENS for row in rows)


def _with_gloo(make_group: Any) -> Any:
    is_first = make_group.__name__ == "init_process_group"

    @functools.wraps(make_group)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = gloo(kwargs["backend"])
        elif is_first and args:
            args = (gloo(args[0]), *args[1:])
        # NCCL's options (streams, CTAs) say nothing to gloo, which rejects their type.
        if kwargs.get("pg_options") is not None and kwargs.get("backend") != "fake":
            kwargs["pg_options"] = None
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = None
        method = args[1] if len(args) > 1 else kwargs.get("init_method")
        if is_first and kwargs.get("store") is None and method in (None, "env://"):
            await_store()
        return make_group(*args, **kwargs)

    return wrapper
