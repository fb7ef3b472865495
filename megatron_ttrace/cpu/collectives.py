# SPDX-License-Identifier: Apache-2.0
"""What gloo takes differently from NCCL.

Gloo moves and reduces the same numbers. It has its own names and types for some arguments:
split sizes of an all-to-all must be Python integers (the MoE dispatcher passes what it has, which
can be tensors), there is no NCCL backend to ask for, and no device to bind a group to.
"""

import functools
from typing import Any

import torch
import torch.distributed as dist


def _integers(sizes: Any) -> list[int] | None:
    if sizes is None:
        return None
    return sizes.tolist() if isinstance(sizes, torch.Tensor) else [int(size) for size in sizes]


def gloo(backend: Any) -> Any:
    """``backend`` with NCCL, alone or in a ``device:backend`` list, replaced by gloo."""
    if backend is None:
        return None
    if str(backend) in {"nccl", "nccl2", "nvshmem"} or "nccl" in str(backend):
        return "gloo"
    return backend


def _patch(name: str, replacement: Any) -> None:
    # torch.distributed re-exports the functions of distributed_c10d: callers use either.
    setattr(dist, name, replacement)
    setattr(dist.distributed_c10d, name, replacement)


def install() -> None:
    """Replace ``all_to_all_single`` and the three functions that make process groups."""
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
        return all_to_all_single(
            output,
            input,
            _integers(output_split_sizes),
            _integers(input_split_sizes),
            *args,
            **kwargs,
        )

    _patch("all_to_all_single", all_to_all)
    for name in ("init_process_group", "new_group", "new_subgroups_by_enumeration"):
        _patch(name, _with_gloo(getattr(dist, name)))


def _with_gloo(make_group: Any) -> Any:
    @functools.wraps(make_group)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = gloo(kwargs["backend"])
        elif make_group.__name__ == "init_process_group" and args:
            args = (gloo(args[0]), *args[1:])
        # NCCL's options (streams, CTAs) say nothing to gloo, which rejects their type.
        if kwargs.get("pg_options") is not None and kwargs.get("backend") != "fake":
            kwargs["pg_options"] = None
        if kwargs.get("device_id") is not None:
            kwargs["device_id"] = None
        return make_group(*args, **kwargs)

    return wrapper
