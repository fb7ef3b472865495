# SPDX-License-Identifier: Apache-2.0
"""Which functions of Megatron run, who calls them, and in which module and part of a step.

``sys.monitoring`` reports each start of a function of the modules that were imported. A function
that showed nothing new in :data:`_ENOUGH` starts is not reported again until something new begins,
so a traced step costs little, and the next ones nothing. Arguments and results are looked at for
numbers and process groups; what returned neither is rarely asked again.
"""

import dataclasses
import functools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.capture.modules import is_mapped
from megatron_ttrace.capture.norms import NormTap
from megatron_ttrace.capture.starts import LINE, RETURN, START, Reports
from megatron_ttrace.mcore import imported, sources
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.collectives import (
    CallNorms,
    Calls,
    FunctionCall,
    Lookup,
    Numbers,
    Phase,
    pattern,
)
from megatron_ttrace.trace.errors import one_line

_ENOUGH, _AGAIN = 8, 3
"""Starts of a function that show nothing new, before it is not reported again; of those, the ones
after something new begins: in a new module, its functions start first."""
_NEVER = 1 << 30
_VALUES = 16
"""Of each number, and results of each function, that are kept."""
_FRAMES = 8
"""Frames of PyTorch's between two of Megatron's: a module's call has three."""
_NAME = "ttrace calls"
_INSIDE = (None, Phase.SCHEDULE, Phase.SCRIPT)
"""Parts whose functions may be called in modules."""
_NOBODY = 0
"""Stands for any other caller."""
_MEASURED = (Phase.FORWARD, Phase.BACKWARD)
_NUMBERS = frozenset(
    (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    )
)

type Context = Callable[[], tuple[str, Phase | None]]
"""The module that runs, and whether forward or backward; ``None`` outside of modules."""


_folded = functools.cache(pattern)


@dataclasses.dataclass(slots=True)
class _Seen:
    """A function of Megatron's that started; hashing its code would take longer than all else.

    Attributes:
        known: the identity of its code: Python reports each call of ``id`` to audit hooks.
        part: of the step that its file belongs to.
        is_inside: whether it may be a part of a module.
        starts: since it showed something new.
        results: that were looked at.
        phase: of its last start.
        near: callers and modules of its starts.
        measured: modules in which a call was.
        lines: bits of those that ran, from the function's first line on.
    """

    code: CodeType
    known: int
    part: Phase | None
    is_inside: bool
    arguments: tuple[str, ...] = ()
    starts: int = 0
    results: int = 0
    phase: Phase | None = None
    near: set[tuple[int, str, Phase | None]] = dataclasses.field(default_factory=set)
    measured: set[tuple[str, Phase]] = dataclasses.field(default_factory=set)
    lines: int = 0


class CallTap:
    """Records the calls of functions of Megatron and of the training script on this rank.

    Attributes:
        error: why nothing more is recorded.
        replacing: the user's functions that replace Megatron's, by identity.
    """

    def __init__(self, *, each_module: bool = False) -> None:
        """``each_module``: measure calls in all modules, not only in the first one of each sort."""
        self.error = ""
        self._sort: Callable[[str], str] = str if each_module else _folded
        self._enough = _NEVER if each_module else _ENOUGH
        self._norms = NormTap()
        self.replacing: dict[int, CodeType] = {}
        self._calls: dict[tuple[int, int, str, Phase], None] = {}
        self._seen: dict[int, _Seen | None] = {}
        self._values: dict[tuple[int, str], set[float]] = defaultdict(set)
        self._tensors: list[tuple[tuple[int, str], torch.Tensor]] = []
        self._lookups: dict[tuple[int, int, Any], Phase] = {}
        self._others: list[CodeType] = []
        self._context: Context | None = None
        self._reports = Reports(_NAME)
        self._lines = Reports(f"{_NAME} by line")
        self._has_lines = False
        self._modules: set[str] = set()
        self._scripts: set[str] = set()
        self._imported = 0
        self._phases: set[Phase] = set()
        self._silent: list[CodeType] = []
        """Of which no more is heard."""

    def start(self) -> None:
        """Record from now on what builds the model. Never raises."""
        self.error = self._reports.report({START: self._started, RETURN: self._returned})
        self._has_lines = not self._lines.report({LINE: self._line})
        self._follow()

    def in_steps(self, context: Context) -> None:
        """The model is built: from now on ``context`` says where functions run."""
        self._context = context
        started = [seen for seen in self._seen.values() if seen is not None]
        for seen in started:
            seen.starts, seen.results, seen.phase = 0, 0, None
        self._silent.clear()
        self._reports.again(seen.code for seen in started)
        self._follow()

    def entered(self) -> None:
        """A sort of module, or a part of a step, is entered for the first time."""
        self._follow()
        if self._silent:
            for seen in filter(None, self._seen.values()):
                seen.starts = min(seen.starts, self._enough - _AGAIN)
            self._reports.again(self._silent)
            self._silent.clear()

    def stop(self) -> None:
        """Record no longer."""
        self._reports.stop()
        self._lines.stop()

    def _follow(self) -> None:
        """Hear of functions in modules that were imported since. Never raises."""
        if self.error or len(sys.modules) <= self._imported:
            return
        try:
            codes = [*imported.megatrons_code(self._modules)]
            self.replacing |= {id(c): c for c in codes if sources.of_script(c.co_filename)}
            self._reports.follow(codes)
            self._reports.follow(imported.imported_code(self._scripts, sources.of_script))
            self._imported = len(self._scripts)
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)

    def numbers(self) -> Numbers:
        """What functions were given and returned."""
        for key, tensor in self._tensors:
            self._values[key].add(float(tensor.item()))
        self._tensors.clear()
        found: Numbers = defaultdict(dict)
        for (known, name), given in self._values.items():
            if (seen := self._seen[known]) and (finite := sorted(filter(math.isfinite, given))):
                found[sources.shown(seen.code)][name] = tuple(finite[:_VALUES])
        return dict(found)

    def norms(self) -> tuple[CallNorms, ...]:
        """Of what functions were given and returned in modules."""
        return self._norms.read(sources.shown)

    def lines(self) -> dict[str, str]:
        """The lines that ran, by function: bits in hexadecimal digits, from its first line on."""
        functions = [*filter(None, self._seen.values())] if self._has_lines else []
        return {sources.shown(seen.code): f"{seen.lines:x}" for seen in functions}

    def apart(self, lines: Mapping[str, str]) -> tuple[str, ...]:
        """The functions of which lines ran here, but not in a run with ``lines``."""
        ran = self.lines() if lines else {}
        return tuple(f for f, bits in ran.items() if int(bits, 16) & ~int(lines.get(f, "0"), 16))

    def calls(
        self,
        chunks: Iterable[Names],
        group_of: Callable[[Any], str] = lambda group: str(group.group_desc),
    ) -> Calls:
        """What ran; ``group_of`` names a process group."""
        numbers: dict[int, int] = {}

        def number(known: int) -> int:
            return -1 if known == _NOBODY else numbers.setdefault(known, len(numbers))

        calls = tuple(
            FunctionCall(number(code), number(caller), module, phase)
            for code, caller, module, phase in self._calls
        )
        marks = {
            pattern(name): sources.marks_of(parameter)
            for names in chunks
            for name, parameter in names.parameters.items()
        }
        lookups = tuple(
            Lookup(number(code), line, group_of(group), group.size(), phase)
            for (code, line, group), phase in self._lookups.items()
        )
        codes = (seen.code for known in numbers if (seen := self._seen[known]) is not None)
        functions = tuple(map(sources.function_of, codes))
        return Calls(functions, calls, marks, lookups)

    def _started(self, code: CodeType, _: int) -> Any:
        try:
            seen = self._of(code)
            if seen is None or self.error:
                return sys.monitoring.DISABLE
            return self._note(seen, sys._getframe(1))
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)
            return sys.monitoring.DISABLE

    def _returned(self, code: CodeType, _: int, result: Any) -> Any:
        try:
            if self._norms.is_waiting:
                self._norms.returned(sys._getframe(1), result)
            if result is None or (seen := self._seen.get(id(code))) is None:
                return sys.monitoring.DISABLE
            items = result if type(result) is tuple else (result,)
            if self.error or seen.results >= _VALUES or not any(map(_tells, items)):
                return sys.monitoring.DISABLE
            seen.results += 1
            frame = sys._getframe(1)
            for item in filter(_tells, items):
                if not isinstance(item, dist.ProcessGroup):
                    self._keep(seen, "", item)
                elif not self._is_given(seen, frame, item):
                    self._look_up(item, frame.f_back)
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)
            return sys.monitoring.DISABLE
        return None

    def _of(self, code: CodeType) -> _Seen | None:
        """What is known of a function; ``None`` if it is neither Megatron's nor the script's."""
        known = id(code)
        seen = self._seen.get(known)
        if seen is None and known not in self._seen:
            file = code.co_filename
            is_followed = sources.in_megatron(file) or sources.of_script(file)
            if code.co_name != "<module>" and is_followed:
                arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
                part = sources.part_of(file)
                if part is Phase.GRADIENTS and code.co_name == "forward":
                    part = Phase.FORWARD  # a wrapper's, which calls the model
                seen = _Seen(code, known, part, part in _INSIDE, arguments)
                self._lines.follow([code])
            else:
                # It is kept, so that no other code gets its identity.
                self._others.append(code)
            self._seen[known] = seen
        return seen

    def _line(self, code: CodeType, line: int) -> Any:
        if seen := self._seen.get(id(code)):
            seen.lines |= 1 << max(0, line - code.co_firstlineno)
        return sys.monitoring.DISABLE

    def _note(self, seen: _Seen, frame: FrameType) -> Any:
        back = frame.f_back
        module, phase = self._inside(seen)
        sort = self._sort(module)
        # What is not in a module, nor in a file of one part, has its caller's.
        code = _NOBODY if back is None else id(back.f_code)
        phase = phase or seen.part or (direct.phase if (direct := self._seen.get(code)) else None)
        near = code, sort, phase
        if near in seen.near:
            seen.phase = phase
            return self._nothing_new(seen)
        if module and phase in _MEASURED and (sort, phase) not in seen.measured:
            seen.measured.add((sort, phase))
            self._norms.started(frame, module, phase)
            self._reports.again([seen.code])  # its return may no longer be reported
        if phase:
            seen.near.add(near)
        caller, by = self._recorded(back)
        phase = seen.phase = phase or (by.phase if by else None) or Phase.OTHER
        module = _folded(module)
        key = seen.known, _NOBODY if by is None else by.known, module, phase
        if key not in self._calls:
            if phase not in self._phases:
                self._phases.add(phase)
                self.entered()
            self._calls[key] = None
            self._follow()  # a layer's specification may just have been imported
            seen.starts = 0
            values = frame.f_locals if seen.arguments else {}
            for name in seen.arguments:
                if not _tells(value := values.get(name)):
                    continue
                if isinstance(value, dist.ProcessGroup):
                    self._look_up(value, caller)
                else:
                    self._keep(seen, name, value)
            return None
        return self._nothing_new(seen)

    def _nothing_new(self, seen: _Seen) -> Any:
        """Count this start; after enough, hear no more of it until something new begins."""
        seen.starts += 1
        if seen.starts < self._enough:
            return None
        self._silent.append(seen.code)
        return sys.monitoring.DISABLE

    def _recorded(self, frame: FrameType | None) -> tuple[FrameType | None, _Seen | None]:
        """A frame or the next one around it of a function that is recorded, and the function."""
        for _ in range(_FRAMES):
            if frame is None or (seen := self._of(frame.f_code)) is not None:
                return frame, None if frame is None else seen
            frame = frame.f_back
        return frame, None

    def _keep(self, seen: _Seen, name: str, value: Any) -> None:
        key = seen.known, name
        if isinstance(value, float):
            if len(self._values[key]) < _VALUES:
                # As a plain number: a probability that is switched off is of a class of its own.
                self._values[key].add(float(value))
        else:
            # It is read after the step: nothing waits for the device.
            self._tensors.append((key, value.detach().clone()))

    def _is_given(self, seen: _Seen, frame: FrameType, group: Any) -> bool:
        return any(frame.f_locals.get(name) is group for name in seen.arguments)

    def _look_up(self, group: Any, frame: FrameType | None) -> None:
        """Find, from a frame outwards, the first function that was not given the group."""
        for _ in range(_FRAMES):
            frame, seen = self._recorded(frame)
            if frame is None or seen is None:
                return
            if not self._is_given(seen, frame, group):
                key = seen.known, frame.f_lineno, group
                if key not in self._lookups:
                    _, phase = self._inside(seen)
                    self._lookups[key] = phase or seen.part or seen.phase or Phase.OTHER
                return
            frame = frame.f_back

    def _inside(self, seen: _Seen) -> tuple[str, Phase | None]:
        """The module that a function may be a part of, and the part of the step there."""
        if self._context is None:
            return "", Phase.CONSTRUCTION
        if not seen.is_inside:
            return "", None
        return self._context()


def _tells(value: Any) -> bool:
    """Whether it is a number that may not be whole, a tensor of one number, or a process group."""
    if type(value) is torch.Tensor:
        is_read = not (value.is_meta or is_mapped(value))
        return value.dtype in _NUMBERS and is_read and value.numel() == 1
    return isinstance(value, (float, dist.ProcessGroup))
