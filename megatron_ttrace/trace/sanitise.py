# SPDX-License-Identifier: Apache-2.0
"""Names and notes come from a foreign model: make them harmless before they are shown.

A module name may contain terminal escapes, markup, or 10,000 characters. Every renderer passes text
through :func:`clean` and then through its own quoting (autoescape in HTML, ``rich.text.Text`` in
the terminal, ElementTree in XML). ``verdicts.jsonl`` keeps names as they are: JSON's escapes are
enough, and a lossless file can be read back.
"""

import json
import re
import unicodedata
from collections.abc import Collection, Sequence
from typing import Any

NAME_LIMIT = 120
NOTE_LIMIT = 600
LINE_LIMIT = 2000
ELLIPSIS = "…"

# Controls, invisible format characters (bidirectional overrides among them), lone surrogates,
# private use, unassigned, and the two separators that count as line ends.
_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
# Combining marks beyond this many in a row paint over neighbouring lines.
_MAX_MARKS = 2


def clean(text: object, limit: int = NAME_LIMIT) -> str:
    r"""One printable line of at most ``limit`` characters.

    Unprintable characters are shown as escapes (``\x1b``), not removed, so that two hostile names
    stay distinguishable. Long text loses its middle, because canonical names differ at both ends.
    """
    raw = text if isinstance(text, str) else str(text)
    if raw.isascii() and raw.isprintable():
        return shorten(raw, limit)
    # Bound the work first: escapes only ever lengthen the text.
    return shorten("".join(_printable(shorten(raw, 2 * limit))), limit)


def in_one_line(error: object) -> str:
    """The text of an error, which may quote a log, as one harmless line."""
    return clean(" / ".join(str(error).splitlines()), NOTE_LIMIT)


_COMMAND = re.compile(r"^\s*::|##(?=\[)")
"""GitHub's workflow commands: at the beginning of a line, or in their older form anywhere in it."""


def log_line(text: str) -> str:
    """One harmless line of a log, in which a host of code finds no command to obey."""
    line = clean(" ".join(text.splitlines()), LINE_LIMIT)
    return _COMMAND.sub(lambda match: " ".join([match[0][:-1], match[0][-1]]), line)


def _printable(text: str) -> list[str]:
    """The characters of ``text``, unsafe ones as escapes."""
    shown: list[str] = []
    marks = 0
    for char in text:
        category = unicodedata.category(char)
        marks = marks + 1 if category in ("Mn", "Me") else 0
        is_unsafe = category in _UNSAFE or marks > _MAX_MARKS
        shown.append(_escape(char) if is_unsafe else char)
    return shown


def _escape(char: str) -> str:
    code = ord(char)
    if code <= 0xFF:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"


def shorten(text: str, limit: int) -> str:
    """``text`` with its middle replaced by an ellipsis where it is longer than ``limit``."""
    if len(text) <= limit:
        return text
    head = (limit - 1) // 2
    return text[:head] + ELLIPSIS + text[len(text) - (limit - 1 - head) :]


def some_of(names: Collection[str], most: int) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join([*names][:most]) + more


def beginning(items: Sequence[object], most: int) -> str:
    """The first items: ``0, 1, ...``."""
    return ", ".join(map(str, items[:most])) + ", ..." * (len(items) > most)


def for_encoding(text: str, encoding: str) -> str:
    """``text`` in characters that ``encoding`` has, so that a log in ASCII raises nothing."""
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        plain = text.replace("ε", "eps").replace(ELLIPSIS, "...").replace("×", "x")
        return plain.encode("ascii", "backslashreplace").decode("ascii")
    return text


def script_json(data: Any) -> str:
    """JSON that may be inside a ``<script>`` element: no ``</script>``, no ``<!--``, no U+2028.

    ``ensure_ascii`` already escapes U+2028, U+2029 and lone surrogates.
    """
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
