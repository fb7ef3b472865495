# SPDX-License-Identifier: Apache-2.0
"""The code in the modules that were imported."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any

from megatron_ttrace.mcore.sources import in_megatron, is_users

type _Look = Callable[[Mapping[str, Any]], object]


class _Contents:
    """What modules of Megatron's and their classes held at one time, and the code in them."""

    def __init__(self) -> None:
        holders: list[Mapping[str, Any]] = []
        self._modules = {**sys.modules}
        functions = [*_functions(set(), in_megatron, holders.append)]
        self._functions = [(function, function.__code__) for function in functions]
        self._code = [code for function in functions for code in _nested(function.__code__)]
        self._held = [(holder, {**holder}) for holder in holders]

    @property
    def is_whole(self) -> bool:
        """Whether nothing was imported since, or imported again."""
        return self._modules == sys.modules

    def modules(self) -> Iterator[str]:
        """The modules that are still imported."""
        return (name for name, module in self._modules.items() if sys.modules.get(name) is module)

    def code(self) -> Iterator[CodeType]:
        """The code there was then, what functions were given since, and what came to be held."""
        yield from self._code
        visited: set[int] = set()
        for function, code in self._functions:
            if function.__code__ is not code:
                yield from _nested(function.__code__)
        for holder, held in self._held:
            if not all(map(operator.is_, holder.values(), held.values())) or len(holder) > len(
                held
            ):
                new = [value for name, value in holder.items() if held.get(name) is not value]
                for function in _functions_in(new, visited):
                    yield from _nested(function.__code__)


_REMEMBERED: list[_Contents] = []
"""At most one."""


def remember() -> None:
    """Look at Megatron's code once for all forks of this process, which look for what is new."""
    if not any(contents.is_whole for contents in _REMEMBERED):
        _REMEMBERED[:] = [_Contents()]


def megatrons_code(known: set[str]) -> Iterator[CodeType]:
    """:func:`imported_code` of Megatron's files."""
    for contents in _REMEMBERED if not known else []:
        known.update(contents.modules())
        yield from contents.code()
    yield from imported_code(known, in_megatron)


def imported_code(known: set[str], wanted: Callable[[str], bool]) -> Iterator[CodeType]:
    """The code in modules that were imported, of ``wanted`` files; not in ``known`` modules.

    All modules are added to these, except those whose import has not ended.

    Of functions that exist, also those inside of others, those that a decorator wraps, and the
    user's that replace others.
    """
    for function in _functions(known, wanted):
        yield from _nested(function.__code__)


def _functions(
    known: set[str], wanted: Callable[[str], bool], look: _Look = lambda _: None
) -> Iterator[FunctionType]:
    """``look`` is called with what each module and class holds."""
    visited: set[int] = set()
    for name, module in [*sys.modules.items()]:
        is_complete = not getattr(getattr(module, "__spec__", None), "_initializing", False)
        if name not in known and is_complete:
            known.add(name)
            contents = vars(module) if isinstance(module, ModuleType) else {}
            file = contents.get("__file__")
            if isinstance(file, str) and wanted(file):
                look(contents)
                yield from _functions_in([*contents.values()], visited, look)


def users_globals(module: ModuleType) -> list[dict[str, Any]]:
    """The globals of the user's functions in a module of Megatron's; some may be there twice."""
    functions = _functions_in([*vars(module).values()], set())
    return [f.__globals__ for f in functions if is_users(f.__code__.co_filename)]


def _functions_in(
    values: Iterable[Any], visited: set[int], look: _Look = lambda _: None
) -> Iterator[FunctionType]:
    for value in values:
        if isinstance(value, FunctionType):
            code = value.__code__
            file = code.co_filename
            if id(code) not in visited and (in_megatron(file) or is_users(file)):
                visited.add(id(code))
                yield value
            if (inner := vars(value).get("__wrapped__")) is not None:
                yield from _functions_in([inner], visited, look)
        elif isinstance(value, type):
            file = getattr(sys.modules.get(str(value.__module__)), "__file__", None) or ""
            if id(value) not in visited and (in_megatron(file) or is_users(file)):
                visited.add(id(value))
                look(vars(value))
                yield from _functions_in([*vars(value).values()], visited, look)
        elif isinstance(value, staticmethod | classmethod | functools._lru_cache_wrapper):
            yield from _functions_in([value.__wrapped__], visited, look)
        elif isinstance(value, property):
            yield from _functions_in([value.fget, value.fset], visited, look)
        elif isinstance(value, functools.partial):
            yield from _functions_in([value.func], visited, look)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
