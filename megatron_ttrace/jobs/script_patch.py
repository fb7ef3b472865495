# SPDX-License-Identifier: Apache-2.0
"""Put ``--ttrace`` into a checkout's ``pretrain_gpt.py``, and take it out again.

The patches are unified diffs that ``git apply`` takes too, each of one place in one file. Lines are
compared without their ends, so checkouts with Windows line ends can be patched; inserted lines get
the ends of the file, and everything else keeps its bytes.
"""

import dataclasses
import itertools
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from megatron_ttrace.jobs import resources
from megatron_ttrace.mcore import versions
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.errors import TTraceError, reported

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")
_MOST_BYTES = 16 << 20
"""Of a file in a checkout; a script has a few thousand."""
_DIFF = re.compile(
    r"^\+\+\+ b/(?P<path>\w+\.py)\n@@ -(?P<start>[1-9]\d{0,8}),\d+ \+\d+,\d+ @@\n"
    r"(?P<lines>(?:[ +-].*\n)+)\Z",
    re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class ScriptPatch:
    """A change of one file: the lines ``before`` become the lines ``after``.

    ``start`` is the index of the first line in the file that the patch was made from.
    """

    path: str
    start: int
    before: tuple[str, ...]
    after: tuple[str, ...]

    def reversed(self) -> Self:
        """The patch that undoes this one."""
        return dataclasses.replace(self, before=self.after, after=self.before)

    def places(self, texts: list[str], size: int) -> list[int]:
        """Where the first ``size`` lines of ``before`` are; the nearest to ``start`` first."""
        wanted = [*self.before[:size]]
        places = [n for n in range(len(texts)) if texts[n : n + size] == wanted]
        return sorted(places, key=lambda n: abs(n - self.start))


def parse(text: str) -> ScriptPatch:
    """Read a patch of one place in one file; text before its header is commentary.

    Raises ``ValueError`` when it is something else.
    """
    match = _DIFF.search(text)
    if match is None:
        raise ValueError("not a unified diff of one place in one file")
    lines = match["lines"].removesuffix("\n").split("\n")
    return ScriptPatch(
        path=match["path"],
        start=int(match["start"]) - 1,
        before=tuple(line[1:] for line in lines if line[0] != "+"),
        after=tuple(line[1:] for line in lines if line[0] != "-"),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout, and the patch for it.

    ``version`` is what the checkout says it is; its tag may differ. ``content`` is that of the
    script when it was read.
    """

    version: str
    patch_file: Path
    patch: ScriptPatch
    script: Path
    content: bytes

    @property
    def applied(self) -> bool:
        """Whether the script has our lines."""
        texts = _texts(self.content.splitlines())
        return bool(self.patch.reversed().places(texts, len(self.patch.after)))


def find(checkout: Path) -> Checkout:
    """Recognise the checkout and read what is needed to patch it.

    Raises ``TTraceError`` when there is no patch for it.
    """
    version = _version(checkout)
    # The patch of the same release series: its branch continues after the tag.
    series = versions.known_as(version)
    if series is None:
        raise TTraceError(f"{checkout}: {versions.refusal(version)}")
    path = resources.patches_dir() / "megatron-lm" / f"core_v{series}.patch"
    patch = parse(path.read_text(encoding="utf-8"))
    script = checkout / patch.path
    content = _read(script)
    return Checkout(version=version, patch_file=path, patch=patch, script=script, content=content)


def patched(checkout: Checkout) -> bytes:
    """The script with our lines in it, whether it had them before or not.

    Raises ``TTraceError`` when a line of the script is in the way.
    """
    if checkout.applied:
        return checkout.content
    for number, line in enumerate(checkout.content.splitlines(), start=1):
        if b"megatron_ttrace" in line:
            raise TTraceError(
                f"{checkout.script}:{number}: {line.decode(errors='replace')!r} is in the way: "
                "it was added by hand, or the patched lines were edited; nothing was changed"
            )
    return _apply(checkout.patch, checkout)


def unpatched(checkout: Checkout) -> bytes:
    """The script without our lines, whether it had them before or not.

    Raises ``TTraceError`` when the lines that the patch added were edited since.
    """
    if not checkout.applied and b"megatron_ttrace" not in checkout.content:
        return checkout.content
    return _apply(checkout.patch.reversed(), checkout)


def write(checkout: Checkout, content: bytes) -> bool:
    """Replace the script in one step; returns whether its content changed.

    Permissions are kept, and a symbolic link to the script remains one. Raises ``TTraceError`` when
    the script cannot be replaced.
    """
    if content == checkout.content:
        return False
    with reported(f"{checkout.script} cannot be written", OSError):
        owned.replace_named(checkout.script, content)
    return True


def _version(checkout: Path) -> str:
    # Read, not imported: importing it would import all of that checkout's Megatron.
    info = checkout / _PACKAGE_INFO
    if not os.path.isfile(info):
        raise TTraceError(f"{checkout}: not a checkout of Megatron-LM: it has no {_PACKAGE_INFO}")
    version = versions.version_in(_read(info).decode("utf-8", "replace"))
    if not version:
        raise TTraceError(f"{info}: no version found in this file")
    return version


def _read(file: Path) -> bytes:
    with reported(f"{file} cannot be read", OSError, codec.CodecError):
        return codec.read(file, _MOST_BYTES)


def _texts(lines: list[bytes]) -> list[str]:
    return [line.rstrip(b"\r\n").decode("utf-8", "surrogateescape") for line in lines]


def _alike(first: Sequence[str], second: Sequence[str]) -> int:
    """How many lines at the beginning are the same."""
    pairs = zip(first, second, strict=False)
    return len([*itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)])


def _apply(patch: ScriptPatch, checkout: Checkout) -> bytes:
    lines = checkout.content.splitlines(keepends=True)
    texts = _texts(lines)
    before, after = patch.before, patch.after
    places = patch.places(texts, len(before))
    if not places:
        # The first line that differs where the lines begin, or would.
        at = next(iter(patch.places(texts, 1)), patch.start)
        same = _alike(texts[at:], before)
        line = at + same
        problem = f"{texts[line]!r} is in the way" if line < len(texts) else "the file ends"
        raise TTraceError(
            f"{checkout.script}:{line + 1}: {problem}, expected {before[same]!r}; "
            "nothing was changed"
        )
    place = places[0]
    end = b"\r\n" if lines[place].endswith(b"\r\n") else b"\n"
    same = _alike(before, after)
    inserted = [text.encode() + end for text in after[same:]]
    return b"".join([*lines[: place + same], *inserted, *lines[place + len(before) :]])
