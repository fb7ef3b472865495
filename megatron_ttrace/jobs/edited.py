# SPDX-License-Identifier: Apache-2.0
"""What the user changed in the Megatron that is imported, and in the script beside it.

In a git checkout: what differs from the last release (:func:`release`), or (without one, or if that
is too much to list) from HEAD. In an installed wheel: the files whose content is not what
the wheel's RECORD says.
"""

import base64
import csv
import hashlib
import importlib.metadata
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.changes import changes
from megatron_ttrace.trace.executed import Edit, Edits

GIVEN, ROOT = "TTRACE_EDITS", "TTRACE_EDITS_ROOT"
"""Environment variables: a file with the :class:`Edits` of a tree, and its folder, where they are
known (``jobs/overlay.py``)."""
_RELEASES = "core_v*"
"""Tags of upstream's releases."""
_BESIDE = ""
"""The path in :class:`Edit` of scripts and of modules beside them."""
_MOST_FILES = 60
"""A fork with more changed files is compared with HEAD: nobody reads such a list."""
_MOST = 300
"""Changed functions that are listed."""


def folders() -> dict[str, str]:
    """Where the packages of the imported Megatron are, by their path in :class:`Edit`.

    As they are in the code's file names: links are not resolved. The folder of the training script
    is the last one, if it holds these packages.
    """
    if ROOT in os.environ:
        return {"": os.path.join(os.environ[ROOT], "")}
    by_prefix = {}
    for name in scripts.MEGATRON:
        file = getattr(sys.modules.get(name), "__file__", None)
        if file:
            by_prefix[f"{name.replace('.', '/')}/"] = os.path.join(os.path.dirname(file), "")
    home = _home_of_script()
    if home and by_prefix.get("megatron/core/") == os.path.join(home, "megatron", "core", ""):
        by_prefix[_BESIDE] = os.path.join(home, "")
    return by_prefix


def _home_of_script() -> str:
    """The folder of the training script, if its functions know it."""
    content = vars(sys.modules["__main__"]).values()
    local = (value for value in content if getattr(value, "__module__", "") == "__main__")
    codes = (getattr(value, "__code__", None) for value in local)
    folder = os.path.dirname(next((code.co_filename for code in codes if code), ""))
    return folder if folder == os.path.realpath(folder) else ""


def find() -> Edits:
    """What differs from the release or commit; nothing where that is not known. Never raises."""
    edits: list[Edit] = []
    since = ""
    try:
        if GIVEN in os.environ:
            return Edits.from_json(codec.parse(codec.read(Path(os.environ[GIVEN]))))
        for prefix, path in folders().items():
            folder = Path(path)
            base, more = _in_checkout(folder, prefix) or _in_wheel(folder, prefix)
            since = since or (base if more else "")
            edits += more
    except Exception:  # noqa: BLE001 - an addition to the report
        return Edits()
    return Edits(since, tuple(edits[:_MOST]))


def release(folder: Path) -> str:
    """The tag, or the beginning of the id, of the last commit in common with a release; or empty.

    Upstream's releases have branches of their own: a fork of the main branch descends from none.
    """
    tags = (provenance.git(folder, "tag", "--list", _RELEASES) or "").split()
    common = provenance.git(folder, "merge-base", "HEAD", *tags) if tags else None
    if not common:
        return ""
    words = ("describe", "--tags", "--exact-match", "--match", _RELEASES, common.strip())
    return (provenance.git(folder, *words) or common[:12]).strip()


def _in_checkout(folder: Path, prefix: str) -> tuple[str, list[Edit]] | None:
    """``None`` if the folder is not tracked by git."""
    if not (provenance.git(folder, "ls-files", "--", "*.py") or ""):
        return None
    commit = (provenance.git(folder, "rev-parse", "--short=12", "HEAD") or "").strip()
    files = "*.py" if prefix != _BESIDE else ":(glob)*.py"
    for base in filter(None, (release(folder), commit)):
        words = ("diff", "--name-only", "-z", "--no-renames", "--diff-filter=d", "--relative")
        listed = provenance.git(folder, *words, base, "--", files)
        fresh = provenance.git(
            folder, "ls-files", "-z", "--others", "--exclude-standard", "--", files
        )
        names = sorted({name for name in f"{listed or ''}{fresh or ''}".split("\0") if name})
        if listed is not None and len(names) <= _MOST_FILES:
            return base, [edit for name in names for edit in _edits(folder, prefix, name, base)]
    return "", []


def _edits(folder: Path, prefix: str, name: str, base: str) -> Iterator[Edit]:
    # As text on both sides, because that is how git's output is read.
    before = (provenance.git(folder, "show", f"{base}:./{name}") or "").encode()
    after = (folder / name).read_bytes().decode(errors="replace").encode()
    for change in changes(before, after):
        yield Edit(f"{prefix}{name}", change.name, change.line, change.is_seen)


def _in_wheel(folder: Path, prefix: str) -> tuple[str, list[Edit]]:
    if prefix == _BESIDE:
        return "", []
    try:
        wheel = importlib.metadata.distribution("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return "", []
    root = str(wheel.locate_file(""))
    if os.path.join(root, prefix) != str(folder) + os.sep:
        return "", []
    edits = []
    # Not ``wheel.files``, which looks for each of its 2,000 files.
    for name, written, _ in csv.reader((wheel.read_text("RECORD") or "").splitlines()):
        if not name.endswith(".py") or not name.startswith(prefix) or not written:
            continue
        mode, _, recorded = written.partition("=")
        path = os.path.join(root, name)
        content = Path(path).read_bytes() if os.path.isfile(path) else b""
        digest = hashlib.new(mode, content).digest()
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != recorded:
            edits.append(Edit(name, "", 1, is_whole=True))
    return f"megatron-core {wheel.version}", edits
