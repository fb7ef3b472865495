# SPDX-License-Identifier: Apache-2.0
"""Whether and where changed code of Megatron's runs.

``sys.monitoring`` reports each function once, when it first starts. Until the model is built, what
was changed is not known: all of Megatron's functions that run are noted, which takes milliseconds.
From then on only the changed ones are reported, each time, and nothing if nothing was changed.
"""

import contextlib
import itertools
import os
import sys
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType
from typing import Any

import torch

from megatron_ttrace.capture.starts import START, Starts
from megatron_ttrace.capture.waiting import outwards
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.collectives import Phase, pattern
from megatron_ttrace.trace.errors import one_line
from megatron_ttrace.trace.executed import Edit, Executed

_FRAMES = 40
"""Callers that are looked at for a module that is being built."""
_NAME = "ttrace changed code"

type Place = Callable[[], tuple[str, Phase]]
type Functions = set[tuple[str, str]]
"""The file of each, as in :class:`Edit`, and its name."""


@contextlib.contextmanager
def noting(functions: Functions) -> Iterator[None]:
    """Add what runs in this context, also Python's own."""
    reports = Starts(_NAME)

    def starts(code: CodeType, _: int) -> Any:
        # Nothing is raised: this runs in the user's code.
        with contextlib.suppress(Exception):
            functions.add((sources.relative(code.co_filename), sources.outermost(code)))
        return sys.monitoring.DISABLE

    reports.report({START: starts})
    sys.monitoring.restart_events()
    try:
        yield
    finally:
        reports.stop()


def changed(edits: Iterable[Edit], functions: Functions) -> tuple[str, ...]:
    """Places of what was changed and is in ``functions``."""
    files = {file for file, _ in functions}
    return tuple(
        f"{edit.file}:{edit.line} ({edit.function})" if edit.line else edit.file
        for edit in edits
        if (edit.file, edit.function) in functions or (not edit.line and edit.file in files)
    )


class ExecutedTap:
    """Records which of the changed functions run on this rank.

    Args:
        folders: of Megatron's packages as they are in its code's file names, each with the path in
            :class:`Edit` that it stands for.
    """

    def __init__(self, folders: Mapping[str, str]) -> None:
        self.error = ""
        self._folders = folders
        self._roots = tuple(self._folders.values())
        self._early: set[tuple[str, str]] = set()
        self._wanted: defaultdict[tuple[str, str | None], list[int]] = defaultdict(list)
        """Numbers of edits by file and function, ``None`` where the whole file may have changed."""
        self._files: set[str] = set()
        self._ran: set[tuple[int, str, Phase]] = set()
        self._built: set[tuple[int, weakref.ref[torch.nn.Module] | None]] = set()
        self._place: Place | None = None
        self._reports = Starts(_NAME)

    def start(self) -> None:
        """Note what runs from now on. Never raises."""
        self.error = self._reports.report({START: self._early_start})

    def follow(self, edits: Iterable[Edit]) -> None:
        """The model is built now: record where these functions run."""
        for number, edit in enumerate(edits):
            function = edit.function if edit.line else None
            self._wanted[self._path(edit.file), function].append(number)
        if not self._early and not self.error:
            self.error = "no function of Megatron's was seen to run"
        self._files = {file for file, _ in self._wanted}
        if not self._files:
            self.stop()
            return
        for file, name in self._early:
            self._ran |= {
                (number, "", Phase.INITIALIZATION) for number in self._numbers(file, name)
            }
        if not self.error:
            self.error = self._reports.report({START: self._starts})
            sys.monitoring.restart_events()

    def stop(self) -> None:
        """Record no longer."""
        self._reports.stop()

    def in_steps(self, place: Place | None) -> None:
        """The model is built; ``place`` names the module and part of a traced step, if in one."""
        self._place = place

    def executed(self, chunks: Iterable[Names]) -> tuple[Executed, ...]:
        """What ran, in modules of these names; code outside of functions ran if it was imported."""
        names = {module: name for chunk in chunks for name, module in chunk.modules.items()}
        ran = set(self._ran)
        for number, built in self._built:
            module = None if built is None else built()
            name = "" if module is None else names.get(module, "")
            ran.add((number, pattern(name), Phase.CONSTRUCTION))
        imported = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
        for (file, function), numbers in self._wanted.items():
            if function == "" and file in imported:
                ran |= {(number, "", Phase.OTHER) for number in numbers}
        return tuple(Executed(*place) for place in sorted(ran))

    def _path(self, file: str) -> str:
        known = (
            at + file.removeprefix(name)
            for name, at in self._folders.items()
            if file.startswith(name)
        )
        # The user's are named as they are imported (``sources.relative``).
        imported = (os.path.join(folder, file) for folder in sys.path)
        return next(filter(os.path.exists, (*known, *imported)), file)

    def _numbers(self, file: str, name: str) -> list[int]:
        return [n for function in (name, None) for n in self._wanted.get((file, function), ())]

    def _early_start(self, code: CodeType, _: int) -> Any:
        if code.co_filename.startswith(self._roots):
            self._early.add((code.co_filename, sources.outermost(code)))
        return sys.monitoring.DISABLE

    def _starts(self, code: CodeType, _: int) -> Any:
        if code.co_filename not in self._files or self.error:
            return sys.monitoring.DISABLE
        numbers = self._numbers(code.co_filename, sources.outermost(code))
        if not numbers:
            return sys.monitoring.DISABLE
        try:
            if self._place is None:
                built = _being_built()
                self._built |= {(number, built) for number in numbers}
            else:
                module, phase = self._place()
                self._ran |= {(number, pattern(module), phase) for number in numbers}
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)
        return None


def _being_built() -> weakref.ref[torch.nn.Module] | None:
    """The innermost module whose method runs, or that a running function was called for."""
    for frame in itertools.islice(outwards(sys._getframe(2)), _FRAMES):
        if frame.f_code.co_argcount:
            first = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(first, torch.nn.Module):
                return weakref.ref(first)
    return None
