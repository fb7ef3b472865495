# SPDX-License-Identifier: Apache-2.0
"""Which functions of a checkout a check runs, so that a change to others needs no check.

Run as a program, with ``LOG ROOT WORDS``, it is ``ttrace WORDS`` and writes down the functions of
ROOT that run in it, in its ranks and in its reference run, which are its forks.

What ran is kept with digests of its code, in a cache that may be damaged or shared: a record counts
only if its file is undamaged and was made with this checker, and it has the digests of a commit's
files as they are computed now. Then a check of that commit would run the same code.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType
from typing import Any, Self

from megatron_ttrace.trace import changes, codec, owned
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.files import write_atomically
from megatron_ttrace.trace.sealing import open_sealed, seal_json

Files = dict[str, dict[str, str]]
"""Path below the checkout -> function -> digest of its body; for ``""`` of the rest of the file."""

MODULE = "megatron_ttrace.evaluation.recipes.reached"
_PACKAGE = Path(__file__).parents[2]


def record(log: Path, root: Path) -> None:
    """From now on write down which functions of files below ``root`` run, here and in forks.

    Raises ``TTraceError`` when other tools use all places of ``sys.monitoring``.
    """
    os.close(owned.create(log))
    inside = f"{root}{os.sep}"
    monitoring = sys.monitoring
    tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise TTraceError("all tool ids of sys.monitoring are in use: run without a profiler")

    def start(code: CodeType, _: int) -> Any:
        # Reported once per process. Opened each time: a fork may have closed what it inherited.
        if code.co_filename.startswith(inside):
            file = code.co_filename.removeprefix(inside)
            words = json.dumps([os.getpid(), file, code.co_qualname])
            output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
            os.write(output, f"{words}\n".encode())
            os.close(output)
        return monitoring.DISABLE

    monitoring.use_tool_id(tool, "ttrace ci")
    monitoring.register_callback(tool, monitoring.events.PY_START, start)
    monitoring.set_events(tool, monitoring.events.PY_START)


def read_log(log: Path, root: Path, ranks: int) -> Files | None:
    """What ran, with the digests of the code in ``root``.

    ``None`` if not all ranks were forks of the recorded process: what they ran is not known.
    """
    processes: set[int] = set()
    ran: dict[str, set[str]] = defaultdict(set)
    for line in log.read_text(encoding="utf-8").splitlines() if log.is_file() else ():
        process, file, name = json.loads(line)
        processes.add(process)
        ran[file].add(name.partition(".<locals>")[0])
    if len(processes) <= ranks:
        return None
    files: Files = {}
    for file, names in ran.items():
        digests_of = digests(root / file)
        files[file] = {name: digests_of[name] for name in sorted({"", *names} & digests_of.keys())}
    return files


def merged(first: Files, second: Files) -> Files:
    """What ran in either of two runs of the same code."""
    return {file: first.get(file, {}) | second.get(file, {}) for file in first | second}


def changed(files: Files, root: Path) -> Iterator[tuple[str, str]]:
    """What ran and is different code, or absent, in ``root``: file and function."""
    for file, functions in files.items():
        digests_of = digests(root / file)
        yield from (
            (file, name) for name, digest in functions.items() if digests_of.get(name) != digest
        )


def digests(path: Path) -> dict[str, str]:
    """Digests of a Python file: of the body of each function and method, and of the rest.

    Neither comments nor line numbers count. The body of a function whose decorator may replace its
    code counts as a part of the rest, which runs wherever the file is imported.
    """
    try:
        stat = path.stat()
    except OSError:
        return {}
    return _digests(path, stat.st_mtime_ns, stat.st_size)


@functools.cache
def _digests(path: Path, *_: int) -> dict[str, str]:
    source = changes.read(path.read_bytes())
    seen = {name: function.body for name, function in source.functions.items() if function.is_seen}
    return {**seen, "": source.imported}


def is_complete(ran: Files) -> bool:
    """Whether this can be all that a check ran: functions of Megatron's, in files it imported."""
    return all("" in functions for functions in ran.values()) and any(
        "megatron" in Path(file).parts[:-1] and len(functions) > 1
        for file, functions in ran.items()
    )


@functools.cache
def _environment() -> str:
    versions = []
    for name in ("torch", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    checksum = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        checksum.update(path.read_bytes())
    checker = f"megatron-ttrace {checksum.hexdigest()[:16]}"
    return ", ".join([f"Python {platform.python_version()}", checker, *versions])


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """What a check ran; ``tree`` is git's id of the content of the commit that was checked."""

    tree: str
    ran: Files


@dataclasses.dataclass(frozen=True)
class Records:
    """What checks ran.

    Attributes:
        jobs: by key, of each small job: a record per commit.
        references: by name, what made each cached one: a check that finds one does not run that.
    """

    jobs: dict[str, tuple[Record, ...]] = dataclasses.field(default_factory=dict)
    references: dict[str, Files] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Those of a file; none if it is absent, damaged, or was made with other versions."""
        try:
            document = open_sealed(codec.read(path))
            return codec.decode(cls, document) if document["made"] == _environment() else cls()
        except (OSError, ValueError, KeyError):
            return cls()

    def save(self, path: Path) -> None:
        """Write them to a file. Raises ``TTraceError`` when that fails."""
        document = {"made": _environment(), **codec.encode(self)}
        write_atomically(path, [seal_json(document)], sealed=False)

    def of_job(self, key: str, tree: str, root: Path) -> Files | None:
        """What a job ran in the commit whose files are in ``root``; ``None`` if that is not known.

        The files must have the digests of the record.
        """
        for record in self.jobs.get(key, ()):
            if record.tree == tree and not any(changed(record.ran, root)):
                return record.ran
        return None

    def keep_job(self, key: str, tree: str, ran: Files | None, trees: Sequence[str]) -> None:
        """Replace what a job ran in a commit; ``None`` forgets it.

        Records of commits other than ``trees`` go: nothing will ask for them.
        """
        kept = [
            record
            for record in self.jobs.pop(key, ())
            if record.tree in trees and record.tree != tree
        ]
        if ran is not None and is_complete(ran):
            kept.append(Record(tree, ran))
        if kept:
            self.jobs[key] = tuple(kept)


def main() -> None:
    """Record, and be ``ttrace``."""
    log, root = map(Path, sys.argv[1:3])
    del sys.argv[1:3]
    record(log, root)
    runpy.run_module("megatron_ttrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
