# SPDX-License-Identifier: Apache-2.0
"""The structure of a pickle, as data: nothing in it is imported, called or built.

PyTorch's distributed checkpoints describe their tensors in such a file. :mod:`pickletools`
disassembles it, and the opcodes are followed on a stack of plain values. What a pickle would
import, call or build is an inert :class:`Made` instead, which says so and does nothing.
"""

from __future__ import annotations

import dataclasses
import pickletools
from collections.abc import Callable
from typing import Any

from megatron_ttrace.errors import TTraceError

_MOST_BYTES = 1 << 30


@dataclasses.dataclass(eq=False)
class Made:
    """What a pickle asks to be made.

    Attributes:
        name: ``module.name`` of a class or function, or empty for a persistent id.
        arguments: it is called with.
        state: it is given.
        items: added to it afterwards.
    """

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = dataclasses.field(default_factory=list)

    @property
    def fields(self) -> dict[str, Any]:
        """The state of an instance, by attribute."""
        return self.state if isinstance(self.state, dict) else {}


class _Mark:
    pass


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_EMPTY: dict[str, Callable[[], Any]] = {
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": list,
}
_IGNORED = {"PROTO", "FRAME", "STOP"}


def read(data: bytes, what: str) -> Any:
    """The value of a pickle, in tuples, lists, dicts, numbers, text, bytes and :class:`Made`.

    Args:
        data: the pickle.
        what: it is, for errors.

    Raises:
        TTraceError: when it is damaged, or needs something that this reader does not know.
    """
    if len(data) > _MOST_BYTES:
        raise TTraceError(f"{what} has {len(data)} bytes: too many to be what it should be")
    machine = _Machine()
    try:
        for opcode, argument, _ in pickletools.genops(data):
            machine.do(opcode.name, argument)
        (found,) = machine.stack
    except (ValueError, KeyError, IndexError, TypeError, RecursionError, AttributeError) as error:
        reason = f"{type(error).__name__}: {str(error)[:80]}"
        raise TTraceError(f"{what} is damaged, or of a kind that is not read ({reason})") from error
    return found


class _Machine:
    """The stack of the pickle's machine, and what it remembers."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def do(self, name: str, argument: Any) -> None:
        """Follow one opcode. Raises ``ValueError`` for one that no checkpoint needs."""
        stack = self.stack
        if name in _IGNORED:
            return
        if name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            stack.append(_EMPTY[name]())
        elif name in _VALUES:
            stack.append(argument)
        elif name == "MARK":
            stack.append(_Mark)
        elif name == "POP":
            stack.pop()
        elif name == "POP_MARK":
            self._since_mark()
        elif name == "DUP":
            stack.append(stack[-1])
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._memo[int(argument)] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(self._memo[int(argument)])
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("TUPLE", "LIST", "FROZENSET"):
            items = self._since_mark()
            stack.append(items if name == "LIST" else tuple(items))
        elif name == "DICT":
            items = self._since_mark()
            stack.append(dict(zip(items[::2], items[1::2], strict=True)))
        elif name in ("APPEND", "APPENDS", "ADDITEMS", "SETITEM", "SETITEMS"):
            self._add(name)
        else:
            self._make(name, argument)

    def _add(self, name: str) -> None:
        """Items of a list, a set or a dict, or of what a pickle wants to be one."""
        if name.endswith("S"):
            items = self._since_mark()
        else:
            count = 2 if name == "SETITEM" else 1
            items = self.stack[-count:]
            del self.stack[-count:]
        target = self.stack[-1]
        if isinstance(target, Made):
            target.items += items
        elif name.startswith("SETITEM"):
            target.update(zip(items[::2], items[1::2], strict=True))
        else:
            target.extend(items)

    def _make(self, name: str, argument: Any) -> None:
        """What would be imported, called or built."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(Made(".".join(str(argument).split(" ", 1))))
        elif name == "STACK_GLOBAL":
            module, attribute = stack[-2:]
            stack[-2:] = [Made(f"{module}.{attribute}")]
        elif name in ("REDUCE", "NEWOBJ"):
            function, arguments = stack[-2:]
            stack[-2:] = [Made(function.name, tuple(arguments))]
        elif name == "NEWOBJ_EX":
            function, arguments, named = stack[-3:]
            stack[-3:] = [Made(function.name, (*arguments, named))]
        elif name == "BUILD":
            state = stack.pop()
            stack[-1].state = state
        elif name == "BINPERSID":
            stack.append(Made("", (stack.pop(),)))
        else:
            raise ValueError(f"opcode {name}")

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1 - self.stack[::-1].index(_Mark)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items


_VALUES = frozenset(
    """
    INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT
    UNICODE SHORT_BINUNICODE BINUNICODE BINUNICODE8
    STRING BINSTRING SHORT_BINSTRING SHORT_BINBYTES BINBYTES BINBYTES8 BYTEARRAY8
    """.split()
)
