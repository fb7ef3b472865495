# SPDX-License-Identifier: Apache-2.0
"""What the user changed in the Megatron that is imported, and in the script beside it.

In a git checkout: what differs from the last release (:func:`release`). Else, in an installed wheel
that this package was not built for: the files whose content is not what its RECORD says; in a copy
of the same version: what differs from the wheel. Else: what differs from the nearest release or
commit of the main branch that it knows (``jobs/released.py``). Else, or if that is too much to
list: what differs from where the branch left the default branch of a remote, or from HEAD; without
git, the functions that none of these has. Always: the user's functions that replace Megatron's
since it was imported.
"""

import base64
import csv
import importlib.metadata
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from megatron_ttrace.jobs import provenance, released
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.mcore import contents, versions
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
"""With more changed files, a fork is compared with what is nearer: nobody reads such a list."""
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


def find(replacing: Iterable[Edit] = ()) -> Edits:
    """What differs from the release or commit; nothing where that is not known. Never raises.

    ``replacing``: the user's functions that replace Megatron's.
    """
    edits: list[Edit] = []
    since = ""
    try:
        if GIVEN in os.environ:
            return Edits.from_json(codec.parse(codec.read(Path(os.environ[GIVEN]))))
        trees: dict[str, dict[str, Path]] = {}
        for prefix, folder in folders().items():
            path = Path(folder)
            is_tracked = provenance.git(path, "ls-files", "--", "*.py")
            root = provenance.git(path, "rev-parse", "--show-toplevel") if is_tracked else None
            trees.setdefault(root or "", {})[prefix] = path
        for root, tree in trees.items():
            compared = _compared(tree, is_tracked=bool(root))
            base, more = next((it for it in compared if it[1] is not None), ("", []))
            since = since or (base if more else "")
            edits += more or []
        edits += replacing
    except Exception:  # noqa: BLE001 - an addition to the report
        return Edits()
    return Edits(since, tuple(edits[:_MOST]))


def release(folder: Path) -> str:
    """The tag, or the beginning of the id, of the last commit in common with a release; or empty.

    Upstream's releases have branches of their own: a fork of the main branch descends from none.
    """
    common = _common(folder, f"refs/tags/{_RELEASES}")
    words = ("describe", "--tags", "--exact-match", "--match", _RELEASES, common)
    return (provenance.git(folder, *words) or common if common else "").strip()


def _common(folder: Path, pattern: str) -> str:
    """The beginning of the id of the last commit in common with any of these refs; or empty."""
    refs = (provenance.git(folder, "for-each-ref", "--format=%(refname)", pattern) or "").split()
    commit = provenance.git(folder, "merge-base", "HEAD", *refs) if refs else ""
    return (commit or "").strip()[:12]


def installed(core: Path) -> tuple[importlib.metadata.Distribution, Path] | None:
    """The installed release, and the folder it is in, if its version is this megatron/core's."""
    try:
        wheel = importlib.metadata.distribution("megatron-core")
        version = versions.version_in((core / "package_info.py").read_text(encoding="utf-8"))
    except (importlib.metadata.PackageNotFoundError, OSError):
        return None
    return (wheel, Path(str(wheel.locate_file("")))) if wheel.version == version else None


def _compared(
    tree: Mapping[str, Path], *, is_tracked: bool
) -> Iterator[tuple[str, list[Edit] | None]]:
    """What folders can be compared with, and what differs: ``None`` if that is too much."""
    folder = next(iter(tree.values()))
    if is_tracked and (tag := release(folder)):
        yield tag, _since_commit(tree, tag)
    found = installed(folder.parent / "core") if _BESIDE not in tree else None
    if found and found[0].version not in versions.KNOWN:
        yield f"megatron-core {found[0].version}", _since_wheel(tree, *found)
    yield _since_release(tree, is_tracked=is_tracked)
    if is_tracked and (base := _common(folder, "refs/remotes/*/HEAD")):
        yield base, _since_commit(tree, base)
    if is_tracked and (head := provenance.git(folder, "rev-parse", "--short=12", "HEAD")):
        yield head.strip(), _since_commit(tree, head.strip())


def _since_commit(tree: Mapping[str, Path], base: str) -> list[Edit] | None:
    diff = ("diff", "--name-only", "-z", "--no-renames", "--diff-filter=d", "--relative", base)
    others = ("ls-files", "-z", "--others", "--exclude-standard")
    names: list[tuple[str, Path, str]] = []
    for prefix, folder in tree.items():
        files = "--", "*.py" if prefix != _BESIDE else ":(glob)*.py"
        listed = provenance.git(folder, *diff, *files)
        if listed is None:
            return None
        listed += provenance.git(folder, *others, *files) or ""
        names += sorted((prefix, folder, name) for name in {*listed.split("\0")} if name)
    if len(names) > _MOST_FILES:
        return None
    edits = []
    for prefix, folder, name in names:
        # As text on both sides, because that is how git's output is read.
        before = (provenance.git(folder, "show", f"{base}:./{name}") or "").encode()
        after = (folder / name).read_bytes().decode(errors="replace").encode()
        edits += [Edit.of(f"{prefix}{name}", change) for change in changes(before, after)]
    return edits


def _files(tree: Mapping[str, Path]) -> dict[str, Path]:
    """By their paths in :class:`Edit`; beside the script, only what is in its folder itself."""
    return {
        f"{prefix}{name}": Path(path)
        for prefix, folder in tree.items()
        for name, path in contents.python_files(folder, inside=prefix != _BESIDE).items()
    }


def _since_release(tree: Mapping[str, Path], *, is_tracked: bool) -> tuple[str, list[Edit] | None]:
    paths = _files(tree)
    held = {name: it for name, path in paths.items() if (it := contents.content_of(path))}
    compared: list[tuple[list[Edit], int]] = []
    for state, others in released.nearest(held):
        sources = [(name, paths[name].read_bytes()) for name in others]
        if len(others) <= _MOST_FILES:
            found = [released.edits(*source, state) for source in sources]
        elif is_tracked:
            continue
        else:  # it is of a commit after all of these
            found = [released.unknown(*source) for source in sources]
        compared.append(([edit for of_file in found for edit in of_file], state))
    # A commit that only changed what the user changed, too, has as many files as the one before.
    edits, state = min(compared, key=lambda it: len(it[0]), default=(None, 0))
    name = released.states()[state]
    is_short = edits is not None and len(edits) <= _MOST
    return f"megatron-core {name}" if name in versions.KNOWN else name, edits if is_short else None


def _since_wheel(
    tree: Mapping[str, Path], wheel: importlib.metadata.Distribution, root: Path
) -> list[Edit] | None:
    # Not ``wheel.files``, which looks for each of its 2,000 files.
    recorded = {
        name: digest
        for name, digest, _ in csv.reader((wheel.read_text("RECORD") or "").splitlines())
    }
    paths = _files(tree)
    held = {name: contents.content_of(path) for name, path in paths.items()}
    differing = [name for name, it in held.items() if it and _recorded(it) != recorded.get(name)]
    if len(differing) > _MOST_FILES:
        return None
    edits = []
    for name in differing:
        if name in recorded and paths[name] == root / name:
            edits.append(Edit(name, "", 0))
            continue
        before = (root / name).read_bytes() if name in recorded else b""
        after = paths[name].read_bytes()
        edits += [Edit.of(name, change) for change in changes(before, after)]
    return edits


def _recorded(content: contents.Content) -> str:
    """As in a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(content.sha256)
    return f"sha256={digest.rstrip(b'=').decode()}"
