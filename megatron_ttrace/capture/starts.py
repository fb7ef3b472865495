# SPDX-License-Identifier: Apache-2.0
"""Starts and returns of Python functions, as ``sys.monitoring`` reports them."""

import atexit
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from megatron_ttrace.trace.errors import one_line

type OnStart = Callable[[CodeType, int], Any]
"""Is given the code and an offset; returns ``sys.monitoring.DISABLE`` to hear no more of it."""
type OnReturn = Callable[[CodeType, int, Any], Any]
"""The same, with what the function returns."""

_TOOLS = range(6)
_EVENTS = sys.monitoring.events


class _Reports(ABC):
    """Reports of the interpreter, if one of its tools is free."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        self._name = name
        self._tool: int | None = None
        self._events: tuple[int, ...] = ()

    def stop(self) -> None:
        """Report no longer."""
        if self._tool is not None:
            self._leave(self._tool)
            for event in self._events:
                sys.monitoring.register_callback(self._tool, event, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None

    def _take(self, to: Mapping[int, Callable[..., Any]]) -> str:
        """Report each event to its function; returns why that is impossible."""
        try:
            if self._tool is None:
                self._tool = _tool(self._name)
                # While the interpreter ends, modules lose their contents before code stops.
                atexit.register(self.stop)
        except ValueError as error:
            return one_line(error)
        self._events = (*to,)
        for event, function in to.items():
            sys.monitoring.register_callback(self._tool, event, function)
        return ""

    @abstractmethod
    def _leave(self, tool: int) -> None:
        """Ask a tool for no more reports."""

    def _set(self, codes: Iterable[CodeType], events: int) -> None:
        if self._tool is not None:
            for code in codes:
                sys.monitoring.set_local_events(self._tool, code, events)


class Starts(_Reports):
    """Reports starts of functions."""

    def report(self, to: OnStart) -> str:
        """Report to this function from now on; returns why that is impossible. Never raises."""
        if not (error := self._take({_EVENTS.PY_START: to})) and self._tool is not None:
            sys.monitoring.set_events(self._tool, _EVENTS.PY_START)
        return error

    def again(self) -> None:
        """Also report functions of which no more was to be heard."""
        if self._tool is not None:
            sys.monitoring.restart_events()

    def _leave(self, tool: int) -> None:
        sys.monitoring.set_events(tool, 0)


class Runs(_Reports):
    """Reports starts and returns of some functions, and costs all others nothing."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        super().__init__(name)
        self._followed: dict[int, CodeType] = {}

    def report(self, started: OnStart, returned: OnReturn) -> str:
        """Report to these functions from now on; returns why that is impossible. Never raises."""
        error = self._take({_EVENTS.PY_START: started, _EVENTS.PY_RETURN: returned})
        self._set(self._followed.values(), _EVENTS.PY_START | _EVENTS.PY_RETURN)
        return error

    def follow(self, codes: Iterable[CodeType]) -> None:
        """Report these, too, from now on."""
        new = {id(code): code for code in codes if id(code) not in self._followed}
        self._followed |= new
        self._set(new.values(), _EVENTS.PY_START | _EVENTS.PY_RETURN)

    def again(self, codes: Iterable[CodeType]) -> None:
        """Also report what no more was to be heard of in code that is followed."""
        for code in codes:
            self._set([code], 0)
            self._set([code], _EVENTS.PY_START | _EVENTS.PY_RETURN)

    def _leave(self, tool: int) -> None:
        self._set(self._followed.values(), 0)


class Lines(_Reports):
    """Reports each line of some functions once."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        super().__init__(name)
        self._followed: list[CodeType] = []

    def report(self, to: OnStart) -> str:
        """Report code and number of each line to this function; returns why that is impossible."""
        return self._take({_EVENTS.LINE: to})

    def follow(self, code: CodeType) -> None:
        """Report its lines from now on, also if it has just started."""
        self._followed.append(code)
        self._set([code], _EVENTS.LINE)

    def _leave(self, tool: int) -> None:
        self._set(self._followed, 0)


def _tool(name: str) -> int:
    """A tool of the interpreter that was free. Raises ``ValueError``."""
    for tool in _TOOLS:
        if sys.monitoring.get_tool(tool) is None:
            sys.monitoring.use_tool_id(tool, name)
            return tool
    raise ValueError("all tools of sys.monitoring are in use")
