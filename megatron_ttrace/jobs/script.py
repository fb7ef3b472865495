# SPDX-License-Identifier: Apache-2.0
"""Run a training script as ``python SCRIPT`` runs it, with the ``--ttrace`` flags known to it.

A process that was started with this file as its program, and a fork of one that imported Megatron,
both call :func:`run`. The script gets the ``sys.path`` of ``python SCRIPT`` in the same shell and
directory, so it imports the same Megatron, and the modules beside it. The first entry of the
launcher's path (the folder of the ``ttrace`` command, or the current directory with ``python -m``)
is left out. The script need not call ``megatron_ttrace.enable()``.
"""

import ast
import contextlib
import dataclasses
import functools
import importlib.machinery
import importlib.util
import io
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MEGATRON = ("megatron.core", "megatron.training")
"""Packages that must be imported from where the script would."""
_BRIDGE = "megatron.bridge"
PACKAGES = (*MEGATRON, _BRIDGE)
"""These, and those that a script may do without."""

PARSER = "megatron.training.arguments"
BRIDGE = "megatron.bridge.training.pretrain"
"""Modules of the training loops that can be checked: what a script imports before it trains."""

_ENTRY = "megatron_ttrace.run.entry"
"""By name: what a rank does is in a room above this one."""
_BACKEND = ("megatron", "transformer_engine", "apex")

_DECIDING = ("PYTHONPATH", "PYTHONSAFEPATH", "PYTHONHOME", "PYTHONNOUSERSITE")
"""Variables that ``sys.path`` depends on."""
is_program = False
"""Whether this file is the program of this process."""


def command(script: str | Path) -> list[str]:
    """The command of a new process that runs ``script``; its arguments are to be appended."""
    return [sys.executable, __file__, str(script)]


def search_path(script: str | Path, environment: Mapping[str, str] | None = None) -> list[str]:
    """The ``sys.path`` of ``python SCRIPT`` in this directory, and an environment or this one."""
    variables = os.environ if environment is None else environment
    deciding = tuple((name, value) for name in _DECIDING if (value := variables.get(name)))
    safe, base = _interpreter(os.getcwd(), deciding)
    return [*base] if safe else [_folder(script), *base]


def origins(path: Sequence[str]) -> dict[str, str]:
    """The files that the packages of Megatron would be imported from with this ``sys.path``.

    Nothing is imported. A package that is not found is left out.
    """
    files = {}
    with as_search_path(path):
        megatron = _find("megatron", None)
        folders = list(megatron.submodule_search_locations or ()) if megatron else []
        for name in PACKAGES if folders else ():
            spec = _find(name, folders)
            if spec is not None and spec.origin is not None:
                files[name] = _located(spec.origin)
    return files


def imported() -> dict[str, str]:
    """The files that the packages of Megatron were imported from in this process."""
    modules = {name: sys.modules.get(name) for name in PACKAGES}
    files = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return {name: _located(file) for name, file in files.items() if file}


def imports_bridge(script: str | Path) -> bool:
    """Whether a script's own code imports Megatron-Bridge. It is not run."""
    try:
        nodes = list(ast.walk(ast.parse(Path(script).read_bytes())))
    except (OSError, ValueError, SyntaxError, RecursionError):
        return False
    names = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    names += [name.name for node in nodes if isinstance(node, ast.Import) for name in node.names]
    return any(f"{name}.".startswith(f"{_BRIDGE}.") for name in names)


def require(script: str | Path) -> Path:
    """The path of a script. Raises ``TTraceError`` when there is no such file."""
    from megatron_ttrace.trace.errors import TTraceError

    path = Path(script)
    if not path.is_file():
        wrong = "is not a regular file" if path.exists() else "no such script"
        raise TTraceError(f"{path}: {wrong}{'' if path.is_absolute() else f' in {Path.cwd()}'}")
    return path


def require_flags(script: str | Path, action: str) -> None:
    """Refuse a script of Megatron-Bridge, whose configuration is code: ``action`` changes flags.

    Raises ``TTraceError``, naming the alternative.
    """
    from megatron_ttrace.trace.errors import TTraceError

    if imports_bridge(script):
        raise TTraceError(
            f"{action} changes flags of Megatron-LM, and {script} is a script of Megatron-Bridge, "
            "configured in its code: make its configuration small there, and use ttrace check"
        )


def shadowed(script: str | Path, path: Sequence[str]) -> str:
    """A module beside the script that this process has imported from elsewhere, or ``""``."""
    folder = _folder(script)
    if folder not in path:
        return ""
    with contextlib.suppress(OSError):
        for entry in sorted(os.listdir(folder)):
            name, ending = os.path.splitext(entry)
            module = sys.modules.get(name)
            if module is None or (ending != ".py" and not (Path(folder) / entry).is_dir()):
                continue
            spec = _find(name, [folder])
            # A folder without __init__.py has lower priority than a package anywhere on the path.
            if spec is None or spec.origin is None:
                continue
            if _located(getattr(module, "__file__", None) or "") != _located(spec.origin):
                return name
    return ""


def run(script: str, arguments: Sequence[str], path: Sequence[str]) -> None:
    """Run ``script`` as ``__main__`` of this process.

    With ``--ttrace`` among its arguments, our flags are added to Megatron's parser on its import.
    What it raises is left as a record (``trace/ends.py``), and raised.
    """
    from megatron_ttrace.jobs import failures
    from megatron_ttrace.jobs.commands import disclosure
    from megatron_ttrace.trace import ends

    ends.begin()
    disclosure.withhold(["python", script, *arguments])
    try:
        _run(script, arguments, path)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        if code:
            ends.write(failures.record_of(leaving, code))
        raise
    except Exception as error:
        ends.write(failures.record_of(error, 1))
        raise


def _run(script: str, arguments: Sequence[str], path: Sequence[str]) -> None:
    sys.argv = [script, *arguments]
    sys.path[:] = path
    if "--ttrace" in arguments:
        from megatron_ttrace.jobs import argv, opened

        argv.take()
        opened.watch()
        _enable_on_import()
    file = os.path.abspath(script)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=file, __builtins__=__builtins__)
    with io.open_code(file) as source:
        code = compile(source.read(), file, "exec", dont_inherit=True)
    # multiprocessing, where it was imported, knows it by the other name.
    sys.modules.update(dict.fromkeys({"__main__", "__mp_main__"} & sys.modules.keys(), main))
    exec(code, main.__dict__)  # noqa: S102 - this is what running a script is


def _enable_on_import() -> None:
    """Do what ``megatron_ttrace.enable()`` does, for a script that does not call it.

    The script itself may put Megatron's folder on ``sys.path``, so Megatron is not imported before
    the script does.
    """
    if "megatron.core" in sys.modules:  # a fork of a process that imported it
        _entry().enable()
        return
    sys.meta_path.insert(0, _BeforeMegatron())
    for loop in (PARSER, BRIDGE):
        when_imported(loop, lambda: _entry().enable())


def _entry() -> types.ModuleType:
    return importlib.import_module(_ENTRY)  # not earlier than needed: this imports torch


class _BeforeMegatron:
    """Import hook: the CPU backend, before the first module of Megatron or of what it needs."""

    _active = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Called for every module to be imported; finds none."""
        del path, target
        if name in _BACKEND and not self._active:
            self._active = True
            if not _entry().is_enabled():
                _entry().activate()


def when_imported(name: str, do: Callable[[], object]) -> None:
    """Call ``do`` when a module is imported: now, if it is."""
    if name in sys.modules:
        do()
    else:
        sys.meta_path.insert(0, _After(name, do))


@dataclasses.dataclass(frozen=True, slots=True)
class _After:
    """Import hook: something to do once, after a module was imported."""

    name: str
    do: Callable[[], object]

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Called for every module to be imported; finds only this one."""
        del path, target
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_first(module: types.ModuleType) -> None:
                execute(module)
                self.do()

            spec.loader.exec_module = execute_first  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def as_search_path(path: Sequence[str]) -> Iterator[None]:
    """Import what a process with this ``sys.path`` would import."""
    before = sys.path[:]
    sys.path[:] = path
    try:
        yield
    finally:
        sys.path[:] = before


def _located(file: str) -> str:
    """A path in one spelling. A link to a file is kept, because its neighbours are others."""
    folder, name = os.path.split(os.path.abspath(file))
    return os.path.join(os.path.realpath(folder), name)


def _folder(script: str | Path) -> str:
    """The first entry of ``sys.path``: the script's folder, with symbolic links resolved."""
    return os.path.dirname(os.path.realpath(script))


@functools.cache
def _interpreter(
    directory: str, deciding: tuple[tuple[str, str], ...]
) -> tuple[bool, tuple[str, ...]]:
    """Whether the script's folder is left out, and the rest of a new interpreter's path.

    A new interpreter is asked, because this process was not started as a script is.
    """
    others = {name: value for name, value in os.environ.items() if name not in _DECIDING}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, sys; print(json.dumps([sys.flags.safe_path, sys.path]))",
        ],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=directory,
        env={**others, **dict(deciding)},
    )
    safe, path = json.loads(done.stdout.splitlines()[-1])
    return bool(safe), tuple(path if safe else path[1:])


def _find(name: str, where: Sequence[str] | None) -> importlib.machinery.ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, where)
        if spec is not None:
            return spec
    return None


def _main() -> None:
    # The first entry is the folder of this file.
    if not sys.flags.safe_path:
        sys.path[0] = _folder(sys.argv[1])
    path = sys.path[:]
    # The same megatron_ttrace as the launcher's, whatever else the path holds.
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from megatron_ttrace.jobs import script

    script.is_program = True
    script.run(sys.argv[1], sys.argv[2:], path)


if __name__ == "__main__":
    _main()
