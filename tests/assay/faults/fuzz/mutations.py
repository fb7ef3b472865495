# SPDX-License-Identifier: Apache-2.0
"""Damage to bytes and to JSON, drawn from one random generator: reproducible by its seed."""

import json
import random
from collections.abc import Callable
from typing import Any

HOSTILE_NAMES = (
    "../../etc/passwd",
    "/etc/passwd",
    "a/b",
    "..",
    "",
    "\x00",
    "\x1b[2J\x1b[31mred\x07",
    "line\nline\r\u2028line",
    "\ud800lone",
    "\u202eevil",
    "x" * 20_000,
    "<script>alert(1)</script>",
    "rank-00001.0000.safetensors",
    "meta.json",
    "nan",
    "inf",
    "-1",
    "1_000",
    "٣",
    "pass",
    "equivalent",
    "tp:Shard(0) zz:Partial(sum)",
    "Replicate tp:Partial(sum)",
    "decoder.layers.99999999999999999999.mlp",
)

HOSTILE_NUMBERS = (
    *(0, -1, 1, 2, 3, 7, 1 << 31, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63, 1 << 64),
    *(-(1 << 63), -(1 << 63) - 1, 10**400, 0.5, -0.0, 1e-320, 1e300, -1e300, 1e-30),
)

HOSTILE_TEXTS = ("1" * 5000, "1e400", "-1e400", "NaN", "Infinity", "-Infinity", "1e-999", "0x10")
"""Tokens that :mod:`json` does not write by itself."""


def damage(data: bytes, random: random.Random) -> bytes:
    """One change of the bytes, or of the JSON that they are lines of."""
    return random.choice(_BYTES if random.random() < 0.35 else _JSON)(data, random)


def flip(data: bytes, random: random.Random) -> bytes:
    """Flip one bit."""
    if not data:
        return b"\x00"
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


def truncate(data: bytes, random: random.Random) -> bytes:
    """Lose the end."""
    return data[: random.randrange(len(data) + 1)]


def splice(data: bytes, random: random.Random) -> bytes:
    """Repeat, move or lose a piece."""
    a, b = sorted(random.randrange(len(data) + 1) for _ in range(2))
    at = random.randrange(len(data) + 1)
    return random.choice(
        (data[:a] + data[b:], data[:at] + data[a:b] + data[at:], data[:b] + data[a:])
    )


def garbage(data: bytes, random: random.Random) -> bytes:
    """Write other bytes into the middle."""
    at = random.randrange(len(data) + 1)
    return data[:at] + random.randbytes(random.randrange(1, 64)) + data[at:]


def token(data: bytes, random: random.Random) -> bytes:
    """Put a number that no JSON writer writes in the place of a number."""
    places = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if not places:
        return garbage(data, random)
    at = random.choice(places)
    return data[:at] + random.choice(HOSTILE_TEXTS).encode() + data[at + 1 :]


def nest(data: bytes, random: random.Random) -> bytes:
    """Put very deep nesting in the place of a value."""
    depth = random.choice((40, 900, 100_000))
    text = b"[" * depth + b"]" * depth if random.random() < 0.7 else b'{"a":' * depth
    at = data.find(b":") + 1
    return data[:at] + text + data[random.choice((at, len(data))) :]


def tree(data: bytes, random: random.Random) -> bytes:
    """Change one value (or its name) somewhere in the JSON of one line, or of the whole."""
    is_document = b"\n}" in data
    lines = [data] if is_document else data.splitlines(keepends=True)
    if not lines:
        return b"{}\n"
    at = random.randrange(len(lines))
    try:
        value = json.loads(lines[at])
    except ValueError:
        return garbage(data, random)
    changed = change(value, random)
    lines[at] = json.dumps(changed, indent=1 if is_document else None).encode() + b"\n"
    return b"".join(lines)


def reorder(data: bytes, random: random.Random) -> bytes:
    """Swap, repeat or lose lines."""
    lines = data.splitlines(keepends=True)
    if len(lines) < 2:
        return truncate(data, random)
    a, b = random.sample(range(len(lines)), 2)
    match random.randrange(3):
        case 0:
            lines[a], lines[b] = lines[b], lines[a]
        case 1:
            lines.insert(a, lines[b])
        case _:
            del lines[a]
    return b"".join(lines)


def twice(data: bytes, random: random.Random) -> bytes:
    """Say a name twice in an object."""
    at = data.find(b"{")
    return (
        data[: at + 1] + random.choice((b'"kind": 1,', b'"verdict": "pass",')) * 2 + data[at + 1 :]
    )


_BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    flip,
    flip,
    truncate,
    splice,
    garbage,
)
_JSON: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(tree, tree, tree, tree, tree, tree),
    *(token, nest, reorder, twice),
)


def change(value: Any, random: random.Random) -> Any:
    """``value`` with something inside of it replaced, removed, renamed or added."""
    places = list(_places(value, ()))
    path = random.choice(places)
    return _changed(value, path, random)


def _places(value: Any, path: tuple[Any, ...]) -> Any:
    yield path
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _places(item, (*path, name))
    elif isinstance(value, list):
        for at, item in enumerate(value[:50]):
            yield from _places(item, (*path, at))


def _changed(value: Any, path: tuple[Any, ...], random: random.Random) -> Any:
    if not path:
        return _other(value, random)
    step, *rest = path
    copy: Any = dict(value) if isinstance(value, dict) else list(value)
    roll = random.random()
    if not rest and roll < 0.1:
        del copy[step]
    elif not rest and roll < 0.2 and isinstance(copy, dict):
        copy[random.choice(HOSTILE_NAMES)] = copy.pop(step)
    elif not rest and roll < 0.2:
        copy.insert(step, copy[step])
    else:
        copy[step] = _changed(value[step], tuple(rest), random)
    return copy


def _other(value: Any, random: random.Random) -> Any:
    """Something else in the place of a value: near it as often as far away."""
    if isinstance(value, bool) or value is None or random.random() < 0.4:
        return random.choice(
            (None, True, False, [], {}, [[]], {"a": 1}, "", "x", 1, -1, 1.5, [1, 2], [None] * 9)
        )
    if isinstance(value, (int, float)):
        near = (value + 1, value - 1, value * 2, -value, value * 1000, str(value), float(value))
        return random.choice(near if random.random() < 0.4 else HOSTILE_NUMBERS)
    if isinstance(value, str):
        near = (value[:-1], value + value, value.upper(), value[::-1], [value])
        return random.choice(near if random.random() < 0.3 else HOSTILE_NAMES)
    if isinstance(value, list):
        return random.choice((value[:-1], value + value, value[::-1], [value], value * 300))
    return random.choice((list(value.items()), {}, {**value, "more": 1}))
