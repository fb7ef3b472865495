# SPDX-License-Identifier: Apache-2.0
"""Which functions of a checkout a check runs, so that a change to others needs no check.

Run as a program, with ``LOG ROOT WORDS``, it is ``ttrace WORDS`` and writes down the functions of
ROOT that run in it, in its ranks and in its reference run, which are its forks. What ran is kept
with digests of its code: where another commit has the same, its check would run the same code.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import runpy
import sys
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.report.files import write_atomically
from megatron_ttrace.trace import codec

Files = dict[str, dict[str, str]]
"""Path below the checkout -> function -> digest of its body; for ``""`` of the rest of the file."""

MODULE = "megatron_ttrace.evaluation.recipes.reached"
_HARMLESS = frozenset(
    {
        *("abstractmethod", "classmethod", "contextmanager", "property", "staticmethod"),
        *("torch.no_grad()", "torch.inference_mode()"),
    }
)
"""Decorators that run a function's own code. One that compiles it would hide that it ran."""


def record(log: Path, root: Path) -> None:
    """From now on write down which functions of files below ``root`` run, here and in forks.

    Raises:
        TTraceError: when other tools use all places of ``sys.monitoring``.
    """
    log.unlink(missing_ok=True)
    inside = f"{root}{os.sep}"
    monitoring = sys.monitoring
    tool = next((tool for tool in range(6) if monitoring.get_tool(tool) is None), None)
    if tool is None:
        raise TTraceError("no room for another tool in sys.monitoring: run without a profiler")

    def start(code: CodeType, _: int) -> Any:
        # Reported once per process. Opened each time: a fork may have closed what it inherited.
        if code.co_filename.startswith(inside):
            file = code.co_filename.removeprefix(inside)
            words = json.dumps([os.getpid(), file, code.co_qualname])
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
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
    found: Files = {}
    for file, names in ran.items():
        own = digests(root / file)
        found[file] = {name: own[name] for name in sorted({"", *names} & own.keys())}
    return found


def merged(*several: Files) -> Files:
    """What ran in any of several runs of the same code."""
    found: Files = {}
    for files in several:
        for file, functions in files.items():
            found[file] = {**found.get(file, {}), **functions}
    return found


def changed(files: Files, root: Path) -> Iterator[tuple[str, str]]:
    """What ran and is different code, or absent, in ``root``: file and function."""
    for file, functions in files.items():
        own = digests(root / file)
        yield from ((file, name) for name, digest in functions.items() if own.get(name) != digest)


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
    content = path.read_bytes()
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return {"": _digest(content.decode(errors="replace"))}
    bodies: dict[str, list[str]] = defaultdict(list)

    def take_out(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                if all(ast.unparse(one) in _HARMLESS for one in child.decorator_list):
                    # Of two with the same name either may have run.
                    bodies[f"{prefix}{child.name}"] += map(ast.dump, child.body)
                    child.body = []
            else:
                inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
                take_out(child, inner)

    take_out(tree, "")
    found = {name: _digest("\n".join(body)) for name, body in bodies.items()}
    return {**found, "": _digest(ast.dump(tree))}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _environment() -> str:
    names = ("megatron-ttrace", "torch", "numpy")
    versions = []
    for name in names:
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{name} of unknown version")
    return ", ".join([f"Python {platform.python_version()}", *versions])


@dataclasses.dataclass(frozen=True)
class Records:
    """What checks ran.

    Attributes:
        environment: versions with which it ran; with others, other code may run.
        jobs: by key, of each small job.
        references: by name, of each cached reference: a check that finds one does not run it.
    """

    environment: str = dataclasses.field(default_factory=_environment)
    jobs: dict[str, Files] = dataclasses.field(default_factory=dict)
    references: dict[str, Files] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Records:
        """Those of a file; none if it is absent, damaged, or of another environment."""
        try:
            found = codec.decode(cls, codec.parse(codec.read(path)))
        except (OSError, codec.CodecError):
            return cls()
        return found if found.environment == _environment() else cls()

    def save(self, path: Path) -> None:
        """Write them to a file. Raises ``TTraceError`` when that fails."""
        write_atomically(path, [json.dumps(codec.encode(self))])


def main() -> None:
    """Record, and be ``ttrace``."""
    log, root = map(Path, sys.argv[1:3])
    del sys.argv[1:3]
    record(log, root)
    runpy.run_module("megatron_ttrace", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
