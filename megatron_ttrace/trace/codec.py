# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses to JSON values and back, validated from their type hints.

A file may be damaged, or written by somebody else, so nothing is converted: a string is not a
number, nor is a boolean. The exceptions are what JSON lacks: tuples are lists, enumerations are
their values, and floats that are not finite are the strings ``"inf"``, ``"-inf"`` and ``"nan"``.
Unknown fields are ignored: a file may hold more than one record (its run, a checksum), and a later
version more than this one.

Libraries do some of this, but not what makes it strict. pydantic refuses lone surrogates, which the
names of a foreign model's modules may contain, and costs every command 90 ms. msgspec (0.22)
refuses them too, accepts a name twice in an object, writes infinity as ``null`` and does not read
it from text, has no bounds beyond 63 bits (checksums), and reads no dataclass from a list.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import re
import stat
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Any, Self

LINE_LIMIT = 16 << 20
"""Bytes of a line, the most that is read of one."""
FILE_LIMIT = 1 << 30
"""Bytes of a file that is read as a whole."""
DEPTH_LIMIT = 32
"""Nesting of values whose type is not known (:data:`typing.Any`)."""
_DIGITS = 20
"""Digits of the largest 64-bit integer."""
_NOT_FINITE = ("inf", "-inf", "nan")
_NUMBER = re.compile(r"-?(?:inf|nan|[0-9]{1,40}(?:\.[0-9]{1,40})?(?:e[+-]?[0-9]{1,4})?)")

Decoder = Callable[[Any], Any]


class CodecError(ValueError):
    """A value that does not fit its field; the message begins with the field's path."""

    def __init__(self, reason: str, path: str = "") -> None:
        self.reason, self.path = reason, path
        super().__init__(f"{path.removeprefix('.')}: {reason}" if path else reason)

    def inside(self, step: str) -> CodecError:
        """The same error, with the path from the value that contains this one."""
        return CodecError(self.reason, step + self.path)


@dataclasses.dataclass(frozen=True, slots=True)
class Bounds:
    """The range of a number; for ``Annotated``.

    ``nan``: whether NaN is allowed; ``text``: whether any float may be written as a string.
    """

    least: float = -math.inf
    most: float = math.inf
    nan: bool = False
    text: bool = False


_INT64 = Bounds(-(1 << 63), (1 << 63) - 1)

Count = Annotated[int, Bounds(0, (1 << 63) - 1)]
"""A number of things."""
Rank = Annotated[int, Bounds(0, (1 << 31) - 1)]
"""The number of a rank."""
Word = Annotated[int, Bounds(0, (1 << 64) - 1)]
"""64 bits, unsigned: a checksum."""
Size = Annotated[float, Bounds(0.0, math.inf)]
"""An error, a tolerance, a duration; infinite where it has no bound."""
LISTED = "listed"
"""``Annotated[R, LISTED]``: a record R that is written as a list of its fields."""


class Record:
    """Base of the dataclasses that are written as JSON objects."""

    __slots__ = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object, its fields in the contract's order."""
        return encode(self)  # type: ignore[no-any-return]

    @classmethod
    def from_json(cls, data: Any) -> Self:
        """The inverse of :meth:`to_json`. Raises ``CodecError``."""
        return decode(cls, data)


def parse(text: str | bytes) -> Any:
    """The value of one JSON text. Raises ``CodecError``.

    Stricter than :mod:`json`: no name twice in an object, no NaN or infinity, no number that
    64 bits do not hold.
    """
    if len(text) > FILE_LIMIT:
        raise CodecError(f"{len(text)} bytes are too many")
    try:
        return json.loads(
            text.decode("utf-8") if isinstance(text, bytes) else text,
            object_pairs_hook=_object,
            parse_int=_int,
            parse_float=_float,
            parse_constant=_constant,
        )
    except CodecError:
        raise
    except RecursionError:
        raise CodecError("nested too deeply") from None
    except ValueError as error:
        raise CodecError(f"not JSON ({str(error)[:80]})") from None


def read(path: Path, most: int = FILE_LIMIT) -> bytes:
    """A file's content. Raises as :func:`regular`, and when it is larger than ``most`` bytes."""
    with regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        # No more than this is allocated, and a file that grows is not read to its end.
        if size > most or len(content := file.read(size + 1)) > most:
            raise CodecError(f"more than the {most} bytes that are read")
        return content


def lines(path: Path, load: Callable[[bytes], Any] = parse) -> Iterator[Any]:
    """The values of a JSONL file, one at a time; a line without its end counts as cut off.

    ``load`` reads a line; :func:`json.loads` does so faster, where its leniency does no harm.
    Raises as :func:`regular` and :func:`parse`.
    """
    with regular(path) as file:
        while line := file.readline(LINE_LIMIT + 1):
            if len(line) > LINE_LIMIT:
                raise CodecError(f"longer than {LINE_LIMIT} bytes")
            if not line.endswith(b"\n"):
                raise CodecError("truncated (no end of line)")
            yield load(line)


def regular(path: Path) -> BufferedReader:
    """Open a file that somebody else made, if it is a regular one.

    Raises ``OSError``, and ``CodecError`` for anything else: a pipe would be waited for, and
    ``/dev/zero`` has no end.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CodecError("not a regular file")
    return os.fdopen(handle, "rb")


def encode(value: Any) -> Any:
    """A record (or a tuple, an enumeration, a number ...) as what :mod:`json` writes strictly."""
    kind: Any = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {name: encode(item) for name, item in value.items()}
    if not dataclasses.is_dataclass(value):
        return value
    return {name: encode(getattr(value, name)) for name in _fields(kind)}


_PLAIN = frozenset((str, int, bool, type(None)))
"""Types of values that are written as they are; subclasses of text are enumerations."""


@functools.cache
def _fields(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


def listed(record: Any) -> list[Any]:
    """A record as a list of its fields."""
    return [encode(getattr(record, name)) for name in _fields(record.__class__)]


def decode[T](wanted: Callable[..., T], value: Any) -> T:
    """The inverse of :func:`encode`.

    Fields with a default may be absent. If a record has a method ``contradiction``, that returns
    why its fields contradict each other; an empty answer accepts them.

    Raises ``CodecError`` with the path of the offending field.
    """
    decoded: T = decoder(wanted)(value)
    return decoded


def decode_list[T](wanted: Callable[..., T], values: Any) -> T:
    """A record that was written as the list of its fields. Raises ``CodecError``."""
    return decode(Annotated[wanted, LISTED], values)  # type: ignore[arg-type]


@functools.cache
def decoder(wanted: Any) -> Decoder:
    """The function that validates and converts values of one type; made once."""
    origin, args = typing.get_origin(wanted), typing.get_args(wanted)
    if origin is Annotated:
        bounds = next((arg for arg in args[1:] if isinstance(arg, Bounds)), None)
        if LISTED in args:
            return _listed(args[0])
        return _number(args[0], bounds) if bounds else decoder(args[0])
    if origin in (typing.Union, types.UnionType):
        return _either(args)
    if origin is tuple:
        return _list(decoder(args[0])) if args[1:] == (...,) else _fixed(args)
    if origin is dict:
        return _dict(decoder(args[1]))
    if wanted is int:
        return _number(int, _INT64)
    if wanted is float:
        return _number(float, Bounds(nan=True))
    if wanted in (str, bool):
        return _exactly(wanted)
    if wanted is Any:
        return _any
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return _enum(wanted)
    if isinstance(wanted, type) and issubclass(wanted, tuple) and hasattr(wanted, "_fields"):
        return _listed(wanted)
    if dataclasses.is_dataclass(wanted):
        return _record(wanted)
    raise TypeError(f"{wanted}: no record can hold this")


def _record(wanted: Any) -> Decoder:
    hints = typing.get_type_hints(wanted, include_extras=True)
    converts = {name: decoder(hints[name]) for name in _fields(wanted)}
    required = {
        field.name
        for field in dataclasses.fields(wanted)
        if field.default is field.default_factory is dataclasses.MISSING
    }
    agree = getattr(wanted, "contradiction", None)

    def decode_record(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _wrong("an object", value)
        if not value.keys() >= required:
            raise CodecError("is missing", f".{min(required - value.keys())}")
        values = {}
        for name, convert in converts.items():
            if name in value:
                try:
                    values[name] = convert(value[name])
                except CodecError as error:
                    raise error.inside(f".{name}") from None
        record = wanted(**values)
        if agree is not None and (reason := agree(record)):
            raise CodecError(reason)
        return record

    return decode_record


def _number(wanted: type[int] | type[float], bounds: Bounds) -> Decoder:
    is_float, least, most = wanted is float, bounds.least, bounds.most
    expected = "a number" if is_float else "an integer"
    if math.isfinite(least):
        is_bounded = math.isfinite(most)
        expected += f" from {least} to {most}" if is_bounded else f" of at least {least:g}"

    def decode_number(value: Any) -> Any:
        number: Any = value
        if is_float and type(value) is int and -(1 << 64) < value < 1 << 64:
            number = float(value)
        elif is_float and type(value) is str and (value in _NOT_FINITE or bounds.text):
            number = float(value) if _NUMBER.fullmatch(value) else None
        is_nan = bounds.nan and number != number
        if type(number) is wanted and (least <= number <= most or is_nan):
            return number
        raise _wrong(expected, value)

    return decode_number


def _either(args: tuple[Any, ...]) -> Decoder:
    inner = [arg for arg in args if arg is not type(None)]
    if all(isinstance(arg, type) and issubclass(arg, Enum) for arg in inner):
        convert = _enum(*inner)
    elif len(inner) == 1:
        convert = decoder(inner[0])
    else:
        raise TypeError(f"{args}: a record's field is of one type, or of several enumerations")
    if len(inner) == len(args):
        return convert
    return lambda value: None if value is None else convert(value)


def _list(convert: Decoder) -> Decoder:
    return lambda value: _items(itertools.repeat(convert), value)


def _fixed(hints: Iterable[Any]) -> Decoder:
    converts = tuple(map(decoder, hints))

    def decode_fixed(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)) or len(value) != len(converts):
            raise _wrong(f"a list of {len(converts)}", value)
        return _items(converts, value)

    return decode_fixed


def _listed(wanted: Callable[..., Any]) -> Decoder:
    """A record (or ``NamedTuple``) that is written as a list, in the order of its fields."""
    decode_list = _fixed(typing.get_type_hints(wanted, include_extras=True).values())
    return lambda value: wanted(*decode_list(value))


def _items(converts: Iterable[Decoder], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise _wrong("a list", value)
    items: list[Any] = []
    try:
        for item, convert in zip(value, converts, strict=False):
            items.append(convert(item))
    except CodecError as error:
        raise error.inside(f"[{len(items)}]") from None
    return tuple(items)


def _dict(convert: Decoder) -> Decoder:
    def decode_dict(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            raise _wrong("an object", value)
        items = {}
        for name, item in value.items():
            try:
                items[name] = convert(item)
            except CodecError as error:
                raise error.inside(f"[{shown(name)}]") from None
        return items

    return decode_dict


def _exactly(wanted: type) -> Decoder:
    def decode_exactly(value: Any) -> Any:
        if type(value) is not wanted:
            raise _wrong("text" if wanted is str else "true or false", value)
        return value

    return decode_exactly


def _enum(*wanted: type[Enum]) -> Decoder:
    members = {member.value: member for enumeration in wanted for member in enumeration}

    def decode_enum(value: Any) -> Enum:
        if type(value) is not str or value not in members:
            raise _wrong(f"one of {', '.join(map(str, members))}", value)
        return members[value]

    return decode_enum


def _any(value: Any, depth: int = 0) -> Any:
    """Any JSON value that is not nested too deeply."""
    if depth > DEPTH_LIMIT:
        raise CodecError("nested too deeply")
    inner = value.values() if isinstance(value, dict) else value
    if isinstance(value, (dict, list, tuple)):
        for item in inner:
            _any(item, depth + 1)
    return value


def _wrong(wanted: str, value: Any) -> CodecError:
    return CodecError(f"expected {wanted}, got {shown(value)}")


def shown(value: Any) -> str:
    """A foreign value in a few printable words."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return ascii(value if len(value) <= 40 else f"{value[:19]}...{value[-18:]}")
    if isinstance(value, dict):
        return "an object"
    return f"a list of {len(value)}" if isinstance(value, (list, tuple)) else type(value).__name__


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise CodecError(f"the name {shown(twice)} occurs twice in an object")
    return members


def _int(text: str) -> int:
    if len(text) > _DIGITS + 1 or not -(1 << 63) <= (value := int(text)) < 1 << 64:
        raise CodecError(f"an integer of {len(text)} digits does not fit into 64 bits")
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise CodecError("a number is too large for 64 bits")
    return value


def _constant(text: str) -> float:
    raise CodecError(f"{text} is not JSON")
