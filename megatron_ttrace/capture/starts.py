# SPDX-License-Identifier: Apache-2.0
"""Starts and returns of Python functions, as ``sys.monitoring`` reports them."""

import atexit
import sys
from collections.abc import Callable
from types import CodeType
from typing import Any

from megatron_ttrace.trace.errors import one_line

type OnStart = Callable[[CodeType, int], Any]
"""Is given the code and an offset; returns ``sys.monitoring.DISABLE`` to hear no more of it."""
type OnReturn = Callable[[CodeType, int, Any], Any]
"""The same, with what the function returns."""

_TOOLS = range(6)


class Starts:
    """Reports starts of functions, if a tool of the interpreter is free."""

    def __init__(self, name: str) -> None:
        """``name``: of the tool."""
        self._name = name
        self._tool: int | None = None

    def report(self, to: OnStart, returned: OnReturn | None = None) -> str:
        """Report to these functions from now on; returns why that is impossible. Never raises."""
        monitoring = sys.monitoring
        try:
            if self._tool is None:
                tool = next(tool for tool in _TOOLS if monitoring.get_tool(tool) is None)
                monitoring.use_tool_id(tool, self._name)
                self._tool = tool
                # While the interpreter ends, modules lose their contents before code stops.
                atexit.register(self.stop)
            events = monitoring.events.PY_START
            monitoring.register_callback(self._tool, events, to)
            if returned is not None:
                monitoring.register_callback(self._tool, monitoring.events.PY_RETURN, returned)
                events |= monitoring.events.PY_RETURN
            monitoring.set_events(self._tool, events)
        except StopIteration:
            return "all tools of sys.monitoring are in use"
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
            for event in (sys.monitoring.events.PY_START, sys.monitoring.events.PY_RETURN):
                sys.monitoring.register_callback(self._tool, event, None)
            sys.monitoring.free_tool_id(self._tool)
            self._tool = None
