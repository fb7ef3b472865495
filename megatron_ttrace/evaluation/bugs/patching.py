# SPDX-License-Identifier: Apache-2.0
"""Put a known bug into this process: change functions of modules that may be imported already.

Ranks can be forks of a process that imported Megatron, in which other modules hold references to
its classes and functions. So no object is replaced: the changed source of the module is compiled,
and each function whose body differs gets the new code (``function.__code__``).
"""

import ast
import functools
import importlib.util
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from megatron_ttrace.evaluation.bugs import catalogue
from megatron_ttrace.evaluation.bugs.catalogue import Bug, SourcePatch
from megatron_ttrace.jobs import provenance
from megatron_ttrace.trace.changes import first_line, outermost
from megatron_ttrace.trace.errors import TTraceError, reported

Change = Callable[[str, Path], str]
"""From a module's source, and its file for messages, to the changed source."""

_introduced: set[str] = set()


def introduce(bug_id: str) -> None:
    """Re-create a known bug in this process; a second call does nothing.

    Raises ``TTraceError`` when the bug is unknown, or the installed Megatron lacks the code it was
    in.
    """
    bug = catalogue.find(catalogue.load_catalogue(), bug_id)
    if bug.id in _introduced:
        return
    _require_emulation(bug)
    apply(bug.patches)
    _introduced.add(bug.id)


def _require_emulation(bug: Bug) -> None:
    """A bug of TransformerEngine is in its stand-in, which must be the one that runs."""
    ours = all(patch.module.startswith("megatron_ttrace.") for patch in bug.patches)
    if ours and not provenance.emulates_transformer_engine():
        raise TTraceError(
            f"--ttrace-bug {bug.id}: is re-created in the emulated TransformerEngine, which runs "
            "only if the real one cannot be imported: ttrace eval bugs run"
        )


def apply(patches: Sequence[SourcePatch]) -> list[tuple[FunctionType, CodeType]]:
    """Change the functions that the patches touch.

    Returns:
        The changed functions with their former code.

    Raises:
        TTraceError: when a patch does not fit; then nothing was changed.
    """
    of_module: dict[str, list[SourcePatch]] = defaultdict(list)
    for patch in patches:
        of_module[patch.module].append(patch)
    changes = {module: functools.partial(_patched, some) for module, some in of_module.items()}
    return rewrite(changes, "a known bug's patch")


def rewrite(changes: Mapping[str, Change], origin: str) -> list[tuple[FunctionType, CodeType]]:
    """As :func:`apply`, by changes of modules' sources: only bodies of functions may differ.

    ``origin`` says in messages what kind of change it is.
    """
    codes = [code for name, change in changes.items() for code in _changes(name, change, origin)]
    before = [(function, function.__code__) for function, _ in codes]
    for function, code in codes:
        function.__code__ = code
    return before


def _patched(patches: Sequence[SourcePatch], old: str, path: Path) -> str:
    new = old
    for patch in patches:
        count = old.count(patch.fragment)
        if count != 1 or new.count(patch.fragment) != 1:
            first = patch.fragment.strip().splitlines()[0]
            raise TTraceError(
                f"{path}{_of_release(patch.module)} has changed: the code of a known bug that "
                f"begins with {first!r} occurs {count} times instead of once"
            )
        new = new.replace(patch.fragment, patch.replacement)
    return new


def _changes(name: str, change: Change, origin: str) -> list[tuple[FunctionType, CodeType]]:
    with reported(f"a known bug's module {name} cannot be imported", ImportError):
        module = sys.modules.get(name) or importlib.import_module(name)
    path = Path(inspect.getsourcefile(module) or "")
    old = path.read_text(encoding="utf-8")
    new = change(old, path)
    with reported(f"{path}: {origin} makes no valid Python", SyntaxError):
        compiled = compile(new, str(path), "exec", dont_inherit=True)
    before, after = ast.parse(old), ast.parse(new)
    changed = _changed(before, after)
    if _without_bodies(before) != _without_bodies(after):
        raise TTraceError(f"{path}: {origin} changes more than the bodies of functions")
    codes = []
    for qualname, line, new_line in changed:
        function = _live(module, path, qualname, line)
        code = _code(compiled, qualname, new_line)
        # The cells of outer variables (above all of super()) remain the function's own.
        if code.co_freevars != function.__code__.co_freevars:
            raise TTraceError(f"{path}: {origin} changes the outer variables of {qualname}")
        codes.append((function, code))
    return codes


def changed_functions(patches: Sequence[SourcePatch]) -> list[tuple[str, str]]:
    """Modules and qualified names of the functions that patches change; nothing is changed.

    Raises ``TTraceError`` when a patch does not fit.
    """
    names = []
    for patch in patches:
        spec = importlib.util.find_spec(patch.module)
        if spec is None or spec.origin is None:
            raise TTraceError(f"a known bug's module {patch.module} is not installed")
        path = Path(spec.origin)
        old = path.read_text(encoding="utf-8")
        trees = ast.parse(old), ast.parse(_patched([patch], old, path))
        names += [(patch.module, qualname) for qualname, _, _ in _changed(*trees)]
    return names


def _changed(before: ast.AST, after: ast.AST) -> list[tuple[str, int, int]]:
    """Names of the functions that differ, with their first lines in both."""
    return [
        (qualname, first_line(ours), first_line(theirs))
        for (qualname, ours), (_, theirs) in zip(outermost(before), outermost(after), strict=False)
        if ast.dump(ours) != ast.dump(theirs)
    ]


def _of_release(name: str) -> str:
    if not name.startswith("megatron."):
        return ""
    return f" of megatron-core {provenance.installed()['megatron-core']}"


def _without_bodies(tree: ast.AST) -> str:
    for _, function in list(outermost(tree)):
        function.body = []
    return ast.dump(tree)


def _code(module: CodeType, name: str, line: int) -> CodeType:
    """The code of one function out of a compiled module."""
    codes = [module]
    for code in codes:
        if (code.co_qualname, code.co_firstlineno) == (name, line):
            return code
        codes.extend(constant for constant in code.co_consts if isinstance(constant, CodeType))
    raise LookupError(f"{name}, line {line}")


def _live(module: ModuleType, path: Path, name: str, line: int) -> FunctionType:
    """The function object with this name, wherever decorators and descriptors have put it."""
    holder: Any = module
    *outer, last = name.split(".")
    try:
        for part in outer:
            holder = inspect.getattr_static(holder, part)
        value = inspect.getattr_static(holder, last)
    except AttributeError:
        value = None
    for function in _inside(value, set()):
        code = function.__code__
        if code.co_qualname == name and code.co_firstlineno == line:
            return function
    raise TTraceError(
        f"{path}: {name} in this process is not the one in the file{_of_release(module.__name__)}: "
        "something replaced it"
    )


def _inside(value: Any, seen: set[int]) -> Iterator[FunctionType]:
    """All functions in a function, through decorators, properties and the like."""
    if value is None or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, FunctionType):
        yield value
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:
                continue
            if callable(content):
                yield from _inside(content, seen)
    elif isinstance(value, staticmethod | classmethod):
        yield from _inside(value.__func__, seen)
    elif isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield from _inside(accessor, seen)
    elif isinstance(value, functools.cached_property | functools.partial):
        yield from _inside(value.func, seen)
    yield from _inside(getattr(value, "__wrapped__", None), seen)
