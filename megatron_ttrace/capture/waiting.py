# SPDX-License-Identifier: Apache-2.0
"""What this process does at the moment, seen from another thread.

Nothing is hooked: the frames of the thread that trains show in which function of
``torch.distributed`` it is, with which tensors and group, and what called it. No tensor is read.
"""

import dis
import os
import sys
import threading
from collections.abc import Hashable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch.distributed as dist

from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.groups import group_name
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.views import every_tensor
from megatron_ttrace.trace.waits import Doing, Wait

_AGREED = {
    **dict.fromkeys(("all_reduce", "broadcast", "reduce", "all_gather", "gather"), "tensor"),
    **dict.fromkeys(("scatter", "send", "recv"), "tensor"),
    **dict.fromkeys(("all_gather_into_tensor", "_all_gather_base"), "input_tensor"),
    **dict.fromkeys(("reduce_scatter_tensor", "_reduce_scatter_base", "reduce_scatter"), "output"),
    # What those of objects call since torch 2.15.
    "all_gather_single": "input_tensor",
    "gather_single": "tensor",
    "reduce_scatter_single": "output",
    **dict.fromkeys(("all_to_all", "all_to_all_single", "barrier", "_coalescing_manager"), ""),
    "all_reduce_coalesced": "tensors",
    "all_gather_coalesced": "input_tensor_list",
}
"""Functions of torch/distributed/distributed_c10d.py that wait, and their argument whose tensors
have the same size on all ranks."""
_PEER = {"send": "dst", "recv": "src"}
"""The argument that is the other rank."""

_HOOKS = tuple(f"{Path(__file__).parents[1] / room}{os.sep}" for room in ("capture", "cpu"))


def state(
    meeting: CodeType, modules: Mapping[Any, str], mesh: Mesh | None
) -> tuple[Hashable, Wait | None]:
    """What the main thread does: a value that changes while it makes progress, and where it is.

    Args:
        meeting: code in which it waits for other ranks between parts of a check.
        modules: canonical names.
        mesh: the layout, once it is known.

    Returns:
        Where it is is ``None`` while it runs other code of this package.
    """
    frames = sys._current_frames()
    frame = frames.get(threading.main_thread().ident or 0)
    stack = list(outwards(frame))
    if stack and sources.enters_autograd(stack[0].f_code):
        # On a GPU, autograd runs the backward pass on threads of its own.
        for ident, other in frames.items():
            inner = list(outwards(other))
            if ident != threading.get_ident() and any(_is_megatrons(frame) for frame in inner):
                stack = [*inner, *stack]
                break
    kept = next((n for n, frame in enumerate(stack) if frame.f_code is meeting), -1) + 1
    place = tuple((id(frame.f_code), frame.f_lasti) for frame in stack[kept:])
    return place, Wait(doing=Doing.MEETING) if kept else _wait(stack, modules, mesh)


def outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """A frame, and those that called it."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_megatrons(frame: FrameType) -> bool:
    return sources.in_megatron(frame.f_code.co_filename)


def _wait(stack: list[FrameType], modules: Mapping[Any, str], mesh: Mesh | None) -> Wait | None:
    call = where = module = None
    for frame in stack:
        code = frame.f_code
        if code.co_filename == dist.distributed_c10d.__file__ and code.co_name in _AGREED:
            call = frame
        elif where is None and _is_megatrons(frame):
            where = frame
        elif code.co_name == "_call_impl" and module is None:
            module = modules.get(frame.f_locals.get("self"))
        elif call is None and where is None and _decides(code.co_filename):
            return None
    place = "" if where is None else sources.shown(where.f_code, where.f_lineno or 0)
    if call is None:
        waits = where is not None and where is stack[0] and _called(where) == "wait"
        doing = Doing.HANDLE if waits else Doing.OTHER
        return Wait(doing=doing, module=module or "", where=place)
    name, values = call.f_code.co_name, call.f_locals
    group: Any = values.get("group") or dist.distributed_c10d._get_default_group()
    members = tuple(dist.get_process_group_ranks(group))
    described = group_name(group.group_desc or "", members, mesh) if mesh else ""
    peer = values.get(_PEER.get(name, ""))
    if isinstance(peer, int):
        members = tuple(sorted({dist.get_rank(), peer}))
    tensors = every_tensor(values.get(_AGREED[name]))
    return Wait(
        doing=Doing.COLLECTIVE,
        operation=name,
        group=described,
        members=members,
        communicator=group.group_name,
        dtype=str(tensors[0].dtype).removeprefix("torch.") if tensors else "",
        elements=sum(tensor.numel() for tensor in tensors) if tensors else -1,
        module=module or "",
        where=place,
    )


def _decides(file: str) -> bool:
    """Whether it is code of this package that is no hook and no kernel."""
    return sources.is_own(file) and not file.startswith(("<", *_HOOKS))


def _called(frame: FrameType) -> str:
    """The name of the method that a frame is calling."""
    last = ""
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset > frame.f_lasti:
            break
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            last = str(instruction.argval)
    return last
