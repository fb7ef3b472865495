# SPDX-License-Identifier: Apache-2.0
"""Which functions of Megatron run, who calls them, and in which module and part of a step.

``sys.monitoring`` reports each start of a function; code that is not Megatron's is reported once.
A function that showed nothing new in :data:`_ENOUGH` starts is not reported again, so a traced step
costs a few milliseconds, and the next ones nothing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import CodeType, FrameType
from typing import Any

from megatron_ttrace.capture.starts import Starts
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.collectives import Calls, FunctionCall, Phase, pattern
from megatron_ttrace.trace.errors import one_line

_ENOUGH = 64
_FRAMES = 8
"""Frames of PyTorch's between two of Megatron's: a module's call has three."""
_NAME = "ttrace calls"

type Context = Callable[[], tuple[str, Phase | None]]
"""The module that runs, and whether forward or backward; ``None`` outside of modules."""


_folded = functools.cache(pattern)


class CallTap:
    """Records the calls of Megatron's functions on this rank."""

    def __init__(self) -> None:
        self.error = ""
        self._calls: dict[tuple[CodeType, CodeType | None, str, Phase], int] = {}
        self._starts: dict[CodeType, int] = {}
        self._phases: dict[CodeType, Phase] = {}
        self._context: Context | None = None
        self._reports = Starts(_NAME)

    def start(self) -> None:
        """Record from now on what builds the model. Never raises."""
        self.error = self._reports.report(self._started)

    def in_steps(self, context: Context) -> None:
        """The model is built: from now on ``context`` says where functions run."""
        self._context = context
        self._starts.clear()
        self._phases.clear()
        self._reports.again()

    def stop(self) -> None:
        """Record no longer."""
        self._reports.stop()

    def calls(self, chunks: Iterable[Names]) -> Calls:
        """What ran."""
        numbers: dict[CodeType, int] = {}

        def number(code: CodeType | None) -> int:
            return -1 if code is None else numbers.setdefault(code, len(numbers))

        calls = tuple(
            FunctionCall(number(code), number(caller), module, phase, line)
            for (code, caller, module, phase), line in self._calls.items()
        )
        marks = {
            pattern(name): sources.marks_of(parameter)
            for names in chunks
            for name, parameter in names.parameters.items()
        }
        return Calls(tuple(map(sources.function_of, numbers)), calls, marks)

    def _started(self, code: CodeType, _: int) -> Any:
        is_import = code.co_name == "<module>"
        if self.error or is_import or not sources.in_megatron(code.co_filename):
            return sys.monitoring.DISABLE
        try:
            return self._note(code, sys._getframe(1))
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)
            return sys.monitoring.DISABLE

    def _note(self, code: CodeType, frame: FrameType) -> Any:
        caller: FrameType | None = frame.f_back
        for _ in range(_FRAMES):
            if caller is None or sources.in_megatron(caller.f_code.co_filename):
                break
            caller = caller.f_back
        else:
            caller = None
        by = None if caller is None else caller.f_code
        module, phase = self._place(code, by)
        key = code, by, module, phase
        if key not in self._calls:
            self._calls[key] = 0 if caller is None else caller.f_lineno
            self._starts[code] = 0
            return None
        count = self._starts[code] = self._starts.get(code, 0) + 1
        return sys.monitoring.DISABLE if count >= _ENOUGH else None

    def _place(self, code: CodeType, caller: CodeType | None) -> tuple[str, Phase]:
        """The part of the step is that of the code, of the module, or of what called it."""
        if self._context is None:
            return "", Phase.CONSTRUCTION
        part = sources.part_of(code.co_filename)
        module, phase = self._context()
        if phase is None or (part is not None and part is not Phase.SCHEDULE):
            module = ""
            phase = part or (self._phases.get(caller) if caller else None) or Phase.OTHER
        self._phases[code] = phase
        return _folded(module), phase
