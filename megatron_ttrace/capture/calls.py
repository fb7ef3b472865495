# SPDX-License-Identifier: Apache-2.0
"""Which functions of Megatron run, who calls them, and in which module and part of a step.

``sys.monitoring`` reports each start of a function; code that is not Megatron's is reported once.
A function that showed nothing new in :data:`_ENOUGH` starts is not reported again, so a traced step
costs a few milliseconds, and the next ones nothing.
"""

import dataclasses
import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

import torch

from megatron_ttrace.capture.starts import Starts
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.collectives import Calls, FunctionCall, Phase, pattern
from megatron_ttrace.trace.errors import one_line

_ENOUGH = 64
_FRAMES = 8
"""Frames of PyTorch's between two of Megatron's: a module's call has three."""
_NAME = "ttrace calls"
_NOBODY = 0
"""Stands for a caller that is not Megatron's."""

type Context = Callable[[], tuple[str, Phase | None]]
"""The module that runs, and whether forward or backward; ``None`` outside of modules."""


_folded = functools.cache(pattern)


@dataclasses.dataclass(slots=True)
class _Seen:
    """A function of Megatron's that started; hashing its code would take longer than all else.

    Attributes:
        code: of the function.
        part: of the step that its file belongs to.
        starts: since it showed something new.
        phase: of its last start.
        factors: those of its arguments that are factors by their names.
    """

    code: CodeType
    part: Phase | None
    factors: tuple[str, ...] = ()
    starts: int = 0
    phase: Phase | None = None


class CallTap:
    """Records the calls of Megatron's functions on this rank."""

    def __init__(self) -> None:
        self.error = ""
        self._calls: dict[tuple[int, int, str, int], tuple[Phase, int]] = {}
        self._seen: dict[int, _Seen | None] = {}
        self._values: dict[str, set[float]] = defaultdict(set)
        self._tensors: list[tuple[str, torch.Tensor]] = []
        self._others: list[CodeType] = []
        self._context: Context | None = None
        self._reports = Starts(_NAME)

    def start(self) -> None:
        """Record from now on what builds the model. Never raises."""
        self.error = self._reports.report(self._started)

    def in_steps(self, context: Context) -> None:
        """The model is built: from now on ``context`` says where functions run."""
        self._context = context
        for seen in filter(None, self._seen.values()):
            seen.starts, seen.phase = 0, None
        self._reports.again()

    def stop(self) -> None:
        """Record no longer."""
        self._reports.stop()

    def calls(self, chunks: Iterable[Names]) -> Calls:
        """What ran."""
        numbers: dict[int, int] = {}

        def number(known: int) -> int:
            return -1 if known == _NOBODY else numbers.setdefault(known, len(numbers))

        calls = tuple(
            FunctionCall(number(code), number(caller), module, phase, line)
            for (code, caller, module, _), (phase, line) in self._calls.items()
        )
        marks = {
            pattern(name): sources.marks_of(parameter)
            for names in chunks
            for name, parameter in names.parameters.items()
        }
        codes = (seen.code for known in numbers if (seen := self._seen[known]) is not None)
        functions = tuple(map(sources.function_of, codes))
        for where, tensor in self._tensors:
            self._values[where].update(filter(math.isfinite, [tensor.item()]))
        self._tensors.clear()
        values = {where: tuple(sorted(given)) for where, given in self._values.items()}
        return Calls(functions, calls, marks, values)

    def _started(self, code: CodeType, _: int) -> Any:
        try:
            seen = self._of(code)
            if seen is None or self.error:
                return sys.monitoring.DISABLE
            return self._note(seen, sys._getframe(1))
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)
            return sys.monitoring.DISABLE

    def _of(self, code: CodeType) -> _Seen | None:
        """What is known of a function; ``None`` if it is not Megatron's."""
        seen = self._seen.get(id(code))
        if seen is None and id(code) not in self._seen:
            if code.co_name != "<module>" and sources.in_megatron(code.co_filename):
                part, factors = sources.part_of(code.co_filename), sources.factors_among(code)
                seen = _Seen(code, part, factors)
            else:
                # It is kept, so that no other code gets its identity.
                self._others.append(code)
            self._seen[id(code)] = seen
        return seen

    def _note(self, seen: _Seen, frame: FrameType) -> Any:
        caller, by = frame.f_back, None
        for _ in range(_FRAMES):
            if caller is None or (by := self._of(caller.f_code)) is not None:
                break
            caller = caller.f_back
        module, phase = self._place(seen, by)
        # Python hashes members of enumerations slowly.
        key = id(seen.code), _NOBODY if by is None else id(by.code), module, id(phase)
        if key not in self._calls:
            self._calls[key] = phase, 0 if by is None or caller is None else caller.f_lineno
            seen.starts = 0
            for name in seen.factors:
                value = frame.f_locals.get(name)
                if isinstance(value, float) and math.isfinite(value):
                    self._values[sources.shown(seen.code)].add(value)
                elif type(value) is torch.Tensor and value.numel() == 1 and not value.is_meta:
                    # It is read after the step: nothing waits for the device.
                    copy = value.detach().clone()
                    self._tensors.append((sources.shown(seen.code), copy))
            return None
        seen.starts += 1
        return sys.monitoring.DISABLE if seen.starts >= _ENOUGH else None

    def _place(self, seen: _Seen, by: _Seen | None) -> tuple[str, Phase]:
        """The part of the step is that of the code, of the module, or of what called it."""
        if self._context is None:
            return "", Phase.CONSTRUCTION
        if seen.part is None or seen.part is Phase.SCHEDULE:
            module, phase = self._context()
            if phase is not None:
                seen.phase = phase
                return _folded(module), phase
        seen.phase = seen.part or (by.phase if by else None) or Phase.OTHER
        return "", seen.phase
