# SPDX-License-Identifier: Apache-2.0
"""As much of the unified diff format as our own patches need, without a program to call.

Lines are compared without their ends, so a checkout with Windows line ends can be patched too;
inserted lines take the ends of the file, and everything else keeps its bytes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

_HUNK = re.compile(r"@@ -([0-9]{1,9})(?:,([0-9]{1,9}))? \+([0-9]{1,9})(?:,([0-9]{1,9}))? @@")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hunk:
    """One place of a file: what is there before the change, and what is there after it."""

    start: int
    """Index of the first line in the file that the patch was made from."""
    lines: tuple[tuple[str, str], ...]
    """Sign and text: ``" "`` stays, ``"-"`` goes, ``"+"`` comes."""

    @property
    def before(self) -> tuple[str, ...]:
        """The lines that the file must have."""
        return tuple(text for sign, text in self.lines if sign != "+")

    def reversed(self) -> Hunk:
        """The hunk that undoes this one."""
        swap = {" ": " ", "-": "+", "+": "-"}
        return Hunk(start=self.start, lines=tuple((swap[sign], text) for sign, text in self.lines))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patch:
    """A change of one file."""

    path: str
    """Relative to the checkout."""
    hunks: tuple[Hunk, ...]

    def reversed(self) -> Patch:
        """The patch that undoes this one."""
        # Later hunks count lines of the changed file, which is where `fit` looks for them anyway.
        return Patch(path=self.path, hunks=tuple(hunk.reversed() for hunk in self.hunks))


class DoesNotFitError(Exception):
    """A hunk has no place in the file: which line is in the way, and what was expected there."""

    def __init__(self, line: int, expected: str, found: str | None) -> None:
        self.line, self.expected, self.found = line, expected, found
        super().__init__(f"line {line}: expected {expected!r}, found {found!r}")


def parse(text: str) -> Patch:
    """Read a patch of one file; text before its header is commentary.

    Raises:
        ValueError: when there is no file header or no hunk, a hunk has other lines than its header
            counts, or the file lies outside of the checkout.
    """
    path: str | None = None
    hunks: list[tuple[re.Match[str], list[str]]] = []
    # Not splitlines: it takes a form feed, or a separator of another script, for the end of a line.
    for line in text.replace("\r\n", "\n").removesuffix("\n").split("\n"):
        match = _HUNK.match(line)
        if match:
            hunks.append((match, []))
        elif hunks:
            hunks[-1][1].append(line)
        elif line.startswith("+++ b/"):
            if path is not None:
                raise ValueError("a diff of more than one file")
            path = line.removeprefix("+++ b/")
    if path is None or not hunks:
        raise ValueError("not a unified diff of one file")
    if not _is_inside(path):
        raise ValueError(f"{path[:60]!a} is not a path below a checkout")
    return Patch(path=path, hunks=tuple(_hunk(match, lines) for match, lines in hunks))


def _is_inside(path: str) -> bool:
    return path.isprintable() and not {"", ".", ".."} & set(path.split("/"))


def _hunk(header: re.Match[str], lines: list[str]) -> Hunk:
    # Editors and mailers like to strip the blank that stands for an empty line of context.
    found = tuple((line[:1] or " ", line[1:]) for line in lines)
    if signs := {sign for sign, _ in found} - {" ", "-", "+"}:
        raise ValueError(f"{header[0]}: a line begins with {min(signs)!a}")
    before = sum(sign != "+" for sign, _ in found)
    after = sum(sign != "-" for sign, _ in found)
    if not before or (before, after) != (int(header[2] or 1), int(header[4] or 1)):
        raise ValueError(f"{header[0]}: the hunk has {before} and {after} lines")
    return Hunk(start=max(int(header[1]) - 1, 0), lines=found)


def fits(patch: Patch, content: bytes) -> bool:
    """Whether ``patch`` can be applied to ``content``."""
    try:
        apply(patch, content)
    except DoesNotFitError:
        return False
    return True


def apply(patch: Patch, content: bytes) -> bytes:
    """Return ``content`` with ``patch`` applied.

    A hunk is looked for where the patch says, then ever farther away, so that a user's own edits
    elsewhere in the file do no harm.

    Raises:
        DoesNotFitError: when the lines that a hunk starts from are nowhere in the file.
    """
    lines = content.splitlines(keepends=True)
    shift = 0
    for hunk in patch.hunks:
        place = _place(hunk, lines, hunk.start + shift)
        end = b"\r\n" if lines[place].endswith(b"\r\n") else b"\n"
        there = iter(lines[place : place + len(hunk.before)])
        changed: list[bytes] = []
        for sign, text in hunk.lines:
            if sign == "+":
                changed.append(text.encode() + end)
            elif sign == " ":
                changed.append(next(there))
            else:
                next(there)
        lines[place : place + len(hunk.before)] = changed
        shift += len(changed) - len(hunk.before)
    return b"".join(lines)


def _place(hunk: Hunk, lines: Sequence[bytes], expected: int) -> int:
    texts = [line.rstrip(b"\r\n").decode("utf-8", "surrogateescape") for line in lines]
    length = len(hunk.before)
    matches = [
        index
        for index in range(len(texts) - length + 1)
        if tuple(texts[index : index + length]) == hunk.before
    ]
    if matches:
        return min(matches, key=lambda index: abs(index - expected))
    # Blame the line where the nearest beginning of the hunk goes on differently.
    starts = [index for index, text in enumerate(texts) if text == hunk.before[0]]
    start = min(starts, key=lambda index: abs(index - expected), default=expected)
    for offset, wanted in enumerate(hunk.before):
        found = texts[start + offset] if start + offset < len(texts) else None
        if found != wanted:
            raise DoesNotFitError(start + offset + 1, wanted, found)
    raise AssertionError("a hunk that matches was not found")
