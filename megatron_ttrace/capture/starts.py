# SPDX-License-Identifier: Apache-2.0
"""Starts and returns of Python functions, as ``sys.monitoring`` reports them."""

import atexit
import sys
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

from megatron_ttrace.trace.errors import one_line

type OnStart = Callable[[CodeType, int], Any]
"""Is given the code and an offset; returns ``sys.monitoring.DISABLE`` to hear no more of it."""
type OnReturn = Callable[[CodeType, int, Any], Any]
"""The same, with what the function returns."""

_TOOLS = range(6)
_EVENTS = sys.monitoring.events


class Starts:
    """Reports starts of functions, if a tool of the interpreter is free."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        self._name = name
        self._tool: int | None = None

    def report(self, to: OnStart) -> str:
        """Report to this function from now on; returns why that is impossible. Never raises."""
        try:
            if self._tool is None:
                self._tool = _tool(self._name)
                # While the interpreter ends, modules lose their contents before code stops.
                atexit.register(self.stop)
            sys.monitoring.register_callback(self._tool, _EVENTS.PY_START, to)
            sys.monitoring.set_events(self._tool, _EVENTS.PY_START)
        except ValueError as error:
            return one_line(error)
        return ""

    def again(self) -> None:
        """Also report functions of which no more was to be heard."""
        if self._tool is not None:
            sys.monitoring.restart_events()

    def stop(self) -> None:
        """Report no longer."""
        if self._tool is not None:
            sys.monitoring.set_events(self._tool, 0)
            sys.monitoring.register_callback(self._tool, _EVENTS.PY_START, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None


class Runs:
    """Reports starts and returns of some functions, and costs all others nothing."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        self._name = name
        self._tool: int | None = None
        self._followed: dict[int, CodeType] = {}

    def report(self, started: OnStart, returned: OnReturn) -> str:
        """Report to these functions from now on; returns why that is impossible. Never raises."""
        try:
            if self._tool is None:
                self._tool = _tool(self._name)
                # While the interpreter ends, modules lose their contents before code stops.
                atexit.register(self.stop)
            sys.monitoring.register_callback(self._tool, _EVENTS.PY_START, started)
            sys.monitoring.register_callback(self._tool, _EVENTS.PY_RETURN, returned)
            self._set(self._followed.values(), _EVENTS.PY_START | _EVENTS.PY_RETURN)
        except ValueError as error:
            return one_line(error)
        return ""

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

    def stop(self) -> None:
        """Report no longer."""
        if self._tool is not None:
            self._set(self._followed.values(), 0)
            for event in (_EVENTS.PY_START, _EVENTS.PY_RETURN):
                sys.monitoring.register_callback(self._tool, event, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None

    def _set(self, codes: Iterable[CodeType], events: int) -> None:
        if self._tool is not None:
            for code in codes:
                sys.monitoring.set_local_events(self._tool, code, events)


class Lines:
    """Reports each line of some functions once, if a tool of the interpreter is free."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        self._name = name
        self._tool: int | None = None
        self._followed: list[CodeType] = []

    def report(self, to: OnStart) -> bool:
        """Give code and number of lines to this function from now on; returns if that works."""
        try:
            if self._tool is None:
                self._tool = _tool(self._name)
                atexit.register(self.stop)
            sys.monitoring.register_callback(self._tool, _EVENTS.LINE, to)
        except ValueError:
            return False
        return True

    def follow(self, code: CodeType) -> None:
        """Report its lines from now on, also if it has just started."""
        if self._tool is not None:
            self._followed.append(code)
            sys.monitoring.set_local_events(self._tool, code, _EVENTS.LINE)

    def stop(self) -> None:
        """Report no longer."""
        if self._tool is not None:
            for code in self._followed:
                sys.monitoring.set_local_events(self._tool, code, 0)
            sys.monitoring.register_callback(self._tool, _EVENTS.LINE, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None


def _tool(name: str) -> int:
    """A tool of the interpreter that was free. Raises ``ValueError``."""
    for tool in _TOOLS:
        if sys.monitoring.get_tool(tool) is None:
            sys.monitoring.use_tool_id(tool, name)
            return tool
    raise ValueError("all tools of sys.monitoring are in use")
