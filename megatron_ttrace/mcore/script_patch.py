# SPDX-License-Identifier: Apache-2.0
"""Put ``--ttrace`` into a checkout's ``pretrain_gpt.py``, and take it out again."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from pathlib import Path

from megatron_ttrace import resources
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import unified_diff
from megatron_ttrace.trace import codec

_PACKAGE_INFO = Path("megatron", "core", "package_info.py")
_MOST_BYTES = 16 << 20
"""Of a file in a checkout: a script has a few thousand."""
_PATCH_NAME = re.compile(r"core_v(\d+)\.(\d+)\.(\d+)\.patch")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkout:
    """A checkout, and what our patch finds in it."""

    version: str
    """What the checkout says it is; tags and this do not always agree."""
    patch_file: Path
    patch: unified_diff.Patch
    script: Path
    content: bytes
    """Of the script, when it was looked at."""

    @property
    def applied(self) -> bool:
        """Whether the script has our lines.

        The way back is what tells: where nothing is removed, the way there fits a patched file
        as well.
        """
        return unified_diff.fits(self.patch.reversed(), self.content)

    @property
    def lines_added(self) -> int:
        """How much the patch adds to the script."""
        return sum(sign == "+" for hunk in self.patch.hunks for sign, _ in hunk.lines)


def find(checkout: Path) -> Checkout:
    """Recognise the checkout and read what is needed to patch it.

    Raises:
        TTraceError: when this is no checkout of a release that there is a patch for.
    """
    version = _version(checkout)
    path = _patch_for(version, checkout)
    patch = unified_diff.parse(path.read_text(encoding="utf-8"))
    script = checkout / patch.path
    try:
        content = codec.read(script, _MOST_BYTES)
    except codec.CodecError as error:
        raise TTraceError(f"{script}: {error}") from error
    except OSError as error:
        raise TTraceError(f"{script}: cannot be read: {error.strerror or error}") from error
    return Checkout(version=version, patch_file=path, patch=patch, script=script, content=content)


def patched(checkout: Checkout) -> bytes:
    """The script with our lines in it, whether it had them before or not.

    Raises:
        TTraceError: when a line of the script is in the way.
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

    Raises:
        TTraceError: when the lines that the patch added were edited since.
    """
    if not checkout.applied and b"megatron_ttrace" not in checkout.content:
        return checkout.content
    return _apply(checkout.patch.reversed(), checkout)


def write(checkout: Checkout, content: bytes) -> bool:
    """Replace the script in one step, unless it is so already; return whether it was written.

    Permissions stay, and a symbolic link to the script stays one.

    Raises:
        TTraceError: when the script cannot be replaced.
    """
    if content == checkout.content:
        return False
    target = checkout.script.resolve()
    try:
        handle, name = tempfile.mkstemp(prefix=f".{target.name}-", dir=target.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            shutil.copymode(target, name)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise TTraceError(
            f"{checkout.script}: cannot be written: {error.strerror or error}"
        ) from error
    return True


def _version(checkout: Path) -> str:
    # Read, not imported: importing it would import all of that checkout's Megatron.
    try:
        text = codec.read(checkout / _PACKAGE_INFO, _MOST_BYTES).decode("utf-8", "replace")
    except codec.CodecError as error:
        raise TTraceError(f"{checkout / _PACKAGE_INFO}: {error}") from error
    except OSError as error:
        raise TTraceError(
            f"{checkout}: not a checkout of Megatron-LM: it has no {_PACKAGE_INFO.as_posix()}"
        ) from error
    numbers = [
        re.search(rf"^{part} = ([0-9]{{1,4}})\b", text, re.M)
        for part in ("MAJOR", "MINOR", "PATCH")
    ]
    found = [match[1] for match in numbers if match]
    if len(found) != len(numbers):
        raise TTraceError(f"{checkout / _PACKAGE_INFO}: no version found in this file")
    return ".".join(found)


def _patch_for(version: str, checkout: Path) -> Path:
    """The patch of the same release series: branches go on after a tag and count up."""
    folder = resources.patches_dir() / "megatron-lm"
    series = {}
    for path in sorted(folder.glob("*.patch")):
        match = _PATCH_NAME.fullmatch(path.name)
        if match:
            series[f"{match[1]}.{match[2]}"] = path
    wanted = ".".join(version.split(".")[:2])
    if wanted not in series:
        raise TTraceError(
            f"{checkout}: this is Megatron-LM {version}, and there are patches for "
            f"{', '.join(series)}: add `import megatron_ttrace; megatron_ttrace.enable()` "
            "before the first import of its script by hand"
        )
    return series[wanted]


def _apply(patch: unified_diff.Patch, checkout: Checkout) -> bytes:
    try:
        return unified_diff.apply(patch, checkout.content)
    except unified_diff.DoesNotFitError as error:
        there = "the file ends" if error.found is None else f"{error.found!r} is in the way"
        raise TTraceError(
            f"{checkout.script}:{error.line}: {there}, expected {error.expected!r}; "
            "nothing was changed"
        ) from error
