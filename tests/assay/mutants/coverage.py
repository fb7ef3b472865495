# SPDX-License-Identifier: Apache-2.0
"""Which lines of Megatron's parallel code a job runs, and where in the model its functions run.

``sys.monitoring`` reports each line once and is then silent; starts of functions are reported every
time. Both are written as they come, because the ranks of a check end without running exit handlers.
"""

import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from megatron_ttrace.trace.errors import TTraceError
from tests.assay.mutants.records import Phase, Ran

_Code = tuple[str, str, int, int]
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def folded(name: str) -> str:
    """A module's name without numbers: a pipeline stage numbers its layers from 0."""
    return _NUMBER.sub("*", name)


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function that ran: its first and last line, and where it ran."""

    file: str
    qualname: str
    first: int
    last: int
    ran: Ran


@dataclasses.dataclass(frozen=True, slots=True)
class Coverage:
    """What any of several ranks ran."""

    lines: set[tuple[str, int]]
    functions: tuple[Function, ...]

    def ran(self, file: str, line: int, classes: Collection[str] = ()) -> Ran:
        """Where the innermost function around a line ran.

        Modules in which ``classes`` run count as well: a schedule hands the scale of an auxiliary
        loss to the class that applies it.
        """
        around = [f for f in self.functions if f.file == file and f.first <= line <= f.last]
        if not around:
            return Ran()
        innermost = max(around, key=lambda f: (f.first, -f.last)).ran
        theirs = (f for f in self.functions if f.qualname.split(".")[0] in classes)
        modules = {name for f in theirs for name in f.ran.modules}
        return Ran(tuple(sorted(modules.union(innermost.modules))), innermost.phases)


def record(files: Mapping[str, Phase | None], log: Path) -> None:
    """From now on write down what runs of ``files``; the values are the phases of their code.

    Raises:
        TTraceError: when other tools use all places of ``sys.monitoring``.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    monitoring = sys.monitoring
    tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise TTraceError("no room for another tool in sys.monitoring: run without a profiler")
    recorder = _Recorder(files, log)
    monitoring.use_tool_id(tool, "mutants")
    monitoring.register_callback(tool, monitoring.events.LINE, recorder.line)
    monitoring.register_callback(tool, monitoring.events.PY_START, recorder.start)
    monitoring.set_events(tool, monitoring.events.LINE | monitoring.events.PY_START)


class _Recorder:
    """Writes what runs; knows the module whose forward runs, or whose constructor."""

    def __init__(self, files: Mapping[str, Phase | None], log: Path) -> None:
        from torch import nn
        from torch.nn.modules import module as hooks

        self._files = files
        self._output = log.open("w", encoding="utf-8", buffering=1)
        self._module = nn.Module
        self._names: dict[int, str] = {}
        self._stack: list[tuple[nn.Module, str]] = []
        self._pending: list[tuple[CodeType, Any]] = []
        self._seen: set[tuple[CodeType, str, str]] = set()
        hooks.register_module_forward_pre_hook(self._enter)
        hooks.register_module_forward_hook(self._leave, always_call=True)

    def line(self, code: CodeType, number: int) -> Any:
        """A line runs."""
        if code.co_filename in self._files:
            self._output.write(json.dumps([code.co_filename, number]) + "\n")
        return sys.monitoring.DISABLE

    def start(self, code: CodeType, _: int) -> Any:
        """A function starts."""
        if code.co_filename not in self._files:
            return sys.monitoring.DISABLE
        for how, place in self._places(sys._getframe(1)):
            if how == "built":
                self._pending.append((code, place))
            else:
                self._write(code, how, place)
        return None

    def _write(self, code: CodeType, how: str, place: str) -> None:
        if (code, how, place) not in self._seen:
            self._seen.add((code, how, place))
            last = max((at for _, _, at in code.co_lines() if at), default=code.co_firstlineno)
            words = [code.co_filename, code.co_qualname, code.co_firstlineno, last, how, place]
            self._output.write(json.dumps(words) + "\n")

    def _enter(self, module: Any, inputs: Any) -> None:
        if not self._stack and id(module) not in self._names:
            self._name(module)
        name = self._names.get(id(module))
        # A module that is no part of the model counts as the one that calls it.
        self._stack.append((module, self._stack[-1][1] if name is None else name))

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        while self._stack and self._stack.pop()[0] is not module:
            pass

    def _name(self, chunk: Any) -> None:
        from megatron_ttrace.mcore.names import unwrap
        from megatron_ttrace.trace.records import ROOT

        model = unwrap(chunk)
        outer = chunk
        while outer is not model:
            self._names[id(outer)] = ROOT
            outer = outer.module
        for name, module in model.named_modules():
            self._names[id(module)] = folded(f".{name}")[1:] or ROOT
        pending, self._pending = self._pending, []
        for code, built in pending:
            if id(built) in self._names:
                self._write(code, "module", self._names[id(built)])
            else:
                self._pending.append((code, built))

    def _places(self, frame: FrameType) -> Iterator[tuple[str, Any]]:
        """Where a function that starts in this frame runs: what sort of place, and which."""
        phase = self._files[frame.f_code.co_filename]
        if phase in (Phase.GRADIENTS, Phase.OPTIMIZER):
            yield "phase", phase
            caller = frame.f_back and self._files.get(frame.f_back.f_code.co_filename)
            if caller:
                yield "phase", caller
        elif self._stack:
            yield "module", self._stack[-1][1]
        else:
            yield self._around(frame)

    def _around(self, frame: FrameType | None) -> tuple[str, Any]:
        """The nearest phase, backward pass or constructor in the calls that lead here."""
        while frame is not None:
            code = frame.f_code
            if phase := self._files.get(code.co_filename):
                return "phase", phase
            if code.co_name == "backward" and code.co_filename in self._files:
                return "forward", f"{code.co_qualname.removesuffix('backward')}forward"
            if code.co_name == "__init__":
                built = frame.f_locals.get("self")
                if isinstance(built, self._module):
                    return "built", built
            frame = frame.f_back
        return "phase", Phase.LOGGING if self._names else Phase.SETUP


def read(logs: Iterable[Path]) -> Coverage:
    """What any of several ranks ran."""
    lines: set[tuple[str, int]] = set()
    modules: dict[_Code, set[str]] = defaultdict(set)
    phases: dict[_Code, set[Phase]] = defaultdict(set)
    forwards: dict[_Code, set[str]] = defaultdict(set)
    for log in logs:
        for words in map(json.loads, log.read_text(encoding="utf-8").splitlines()):
            if len(words) == 2:
                lines.add((words[0], words[1]))
                continue
            file, qualname, first, last, how, place = words
            code = (file, qualname, first, last)
            # A function of a class that has a forward pass belongs to where that runs.
            forwards[code].add(f"{qualname.rpartition('.')[0]}.forward")
            if how == "module":
                modules[code].add(place)
            elif how == "phase":
                phases[code].add(Phase(place))
            else:
                forwards[code].add(place)
    ran_in: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (file, qualname, _, _), names in modules.items():
        ran_in[file, qualname] |= names
    return Coverage(
        lines,
        tuple(
            Function(
                *code,
                Ran(
                    tuple(sorted(modules[code].union(*(ran_in[code[0], name] for name in theirs)))),
                    tuple(sorted(phases[code])),
                ),
            )
            for code, theirs in forwards.items()
        ),
    )
