# SPDX-License-Identifier: Apache-2.0
"""Norms of what functions are given and return, in the first call in each module."""

import dataclasses
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from megatron_ttrace.capture.modules import is_mapped
from megatron_ttrace.trace.collectives import CallNorms, Norm, Phase

_PLAIN = (torch.Tensor, torch.nn.Parameter)

type _Unread = tuple[int, torch.Tensor]
"""Number of elements, and the norm, which may still be computed on a device."""


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """A call that may not have ended."""

    code: CodeType
    module: str
    phase: Phase
    given: list[_Unread]
    returned: list[_Unread] = dataclasses.field(default_factory=list)


class NormTap:
    """Measures calls of functions."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._running: dict[int, _Call] = {}

    def started(self, frame: FrameType, module: str, phase: Phase) -> None:
        """A function starts that is to be measured."""
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & 0x04) + bool(code.co_flags & 0x08)  # *args, **kwargs
        values = map(frame.f_locals.get, code.co_varnames[:count])
        given = [norm for value in values for norm in _norms(value)]
        self._calls.append(call := _Call(code, module, phase, given))
        # The frame is not kept: it would keep what the function needs no longer.
        self._running[id(frame)] = call

    def returned(self, frame: FrameType, result: Any) -> None:
        """A function returns, which may be measured."""
        call = self._running.pop(id(frame), None)
        if call is not None and call.code is frame.f_code:
            call.returned.extend(_norms(result))

    @property
    def is_waiting(self) -> bool:
        """Whether a function that is measured has not returned."""
        return bool(self._running)

    def read(self, shown: Callable[[CodeType], str]) -> tuple[CallNorms, ...]:
        """All calls; ``shown`` names a function by its code."""
        self._running.clear()
        return tuple(
            CallNorms(
                shown(call.code), call.module, call.phase, *map(_read, (call.given, call.returned))
            )
            for call in self._calls
            if call.returned
        )


def _read(norms: list[_Unread]) -> tuple[Norm, ...]:
    return tuple(Norm(elements, float(norm)) for elements, norm in norms)


def _norms(value: Any) -> Iterator[_Unread]:
    """Of a tensor, or those in a tuple or list."""
    for item in value if isinstance(value, (tuple, list)) else (value,):
        if type(item) in _PLAIN and item.is_floating_point() and _is_measured(item):
            dtype = torch.promote_types(item.dtype, torch.float32)
            with torch.no_grad(), torch._C._DisableTorchDispatch():
                yield item.numel(), torch.linalg.vector_norm(item.detach(), dtype=dtype)


def _is_measured(tensor: torch.Tensor) -> bool:
    if is_mapped(tensor) or tensor.is_meta or tensor.itemsize < 2 or not tensor.numel():
        return False
    # The memory of some is given back while they are not needed.
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > 0
