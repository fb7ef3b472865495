# SPDX-License-Identifier: Apache-2.0
"""Starts, returns and lines of Python functions, as ``sys.monitoring`` reports them."""

import atexit
import sys
from collections.abc import Callable, Iterable, Mapping
from types import CodeType
from typing import Any

from megatron_ttrace.trace.errors import one_line

START, RETURN, LINE = (getattr(sys.monitoring.events, e) for e in ("PY_START", "PY_RETURN", "LINE"))

type OnEvent = Callable[..., Any]
"""Is given the code, then the offset of a start, that of a return and what is returned, or the
number of a line; returns ``sys.monitoring.DISABLE`` to hear no more of it."""


class Reports:
    """Reports about some functions, if one of the interpreter's tools is free.

    All other functions cost nothing.
    """

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        self._name = name
        self._tool: int | None = None
        self._events: tuple[int, ...] = ()
        self._followed: dict[int, CodeType] = {}

    def report(self, to: Mapping[int, OnEvent]) -> str:
        """Report each event to its function; returns why that is impossible. Never raises."""
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
        self._set(self._followed.values(), *to)
        return ""

    def follow(self, codes: Iterable[CodeType]) -> None:
        """Report these, too, from now on, also if they have just started."""
        new = {known: code for code in codes if (known := id(code)) not in self._followed}
        self._followed |= new
        self._set(new.values(), *self._events)

    def again(self, codes: Iterable[CodeType]) -> None:
        """Also report what no more was to be heard of in code that is followed."""
        for code in codes:
            self._set([code])
            self._set([code], *self._events)

    def stop(self) -> None:
        """Report no longer."""
        if self._tool is not None:
            sys.monitoring.set_events(self._tool, 0)
            self._set(self._followed.values())
            for event in self._events:
                sys.monitoring.register_callback(self._tool, event, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None

    def _set(self, codes: Iterable[CodeType], *events: int) -> None:
        if self._tool is not None:
            events_of_code = sum(events)
            for code in codes:
                sys.monitoring.set_local_events(self._tool, code, events_of_code)


class Starts(Reports):
    """Reports starts of all functions."""

    def report(self, to: Mapping[int, OnEvent]) -> str:
        """The same about all functions."""
        if not (error := super().report(to)) and self._tool is not None:
            sys.monitoring.set_events(self._tool, sum(to))
        return error


def _tool(name: str) -> int:
    """A tool of the interpreter that was free. Raises ``ValueError``."""
    for tool in range(6):
        if sys.monitoring.get_tool(tool) is None:
            sys.monitoring.use_tool_id(tool, name)
            return tool
    raise ValueError("all tools of sys.monitoring are in use")
