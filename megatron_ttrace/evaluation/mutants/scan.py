# SPDX-License-Identifier: Apache-2.0
"""Find all single faults in Megatron's parallel code. Reads source; imports and runs nothing."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.evaluation.bugs.patching import Definition, functions
from megatron_ttrace.evaluation.mutants.operators import OPERATORS
from megatron_ttrace.evaluation.mutants.records import Mutant
from megatron_ttrace.evaluation.mutants.source import Source, span_of

PACKAGES = (
    "megatron.core.tensor_parallel",
    "megatron.core.distributed",
    "megatron.core.pipeline_parallel",
    "megatron.core.transformer.moe",
    "megatron.core.optimizer",
)


def scan() -> list[Mutant]:
    """All mutants of the installed Megatron, in the order of its source.

    Raises:
        TTraceError: when there is no Megatron.
    """
    return [
        mutant
        for module, path in modules()
        for mutant in scan_source(module, path.read_text(encoding="utf-8"))
    ]


def modules() -> list[tuple[str, Path]]:
    """Names and files of everything below :data:`PACKAGES`."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise TTraceError("megatron-core is not installed: see ttrace doctor")
    root = Path(spec.origin).parent
    return [
        (_name(path.relative_to(root)), path)
        for package in PACKAGES
        for path in sorted(root.joinpath(*package.split(".")[2:]).rglob("*.py"))
        if path.name != "__init__.py" or path.stat().st_size > 0
    ]


def _name(path: Path) -> str:
    """A package's own file goes by the package's name: by another it would be another module."""
    parts = ("megatron.core", *path.with_suffix("").parts)
    return ".".join(parts).removesuffix(".__init__")


def scan_source(module: str, text: str) -> Iterator[Mutant]:
    """The mutants of one module: every operator on every node inside a function."""
    source = Source(module, text)
    seen: Counter[str] = Counter()
    for qualname, function in functions(source.tree):
        for node in _body(function):
            for name, operator in OPERATORS.items():
                for target, replacement in operator(node, source):
                    yield _mutant(source, qualname, name, target, replacement, seen)


def _body(function: Definition) -> Iterator[ast.AST]:
    """What runs when the function does: not its decorators, defaults or annotations."""
    for statement in function.body:
        yield from ast.walk(statement)


def _mutant(
    source: Source,
    qualname: str,
    operator: str,
    target: ast.AST,
    replacement: str,
    seen: Counter[str],
) -> Mutant:
    fragment = source.of(target)
    words = (source.module, qualname, operator, _statement(source, target), fragment, replacement)
    content = "\n".join(_plain(word) for word in words)
    # Where the same stands twice in one function, the first has no number.
    number = seen[content]
    seen[content] += 1
    digest = hashlib.sha256(f"{content}\n{number}".encode()).hexdigest()[:6]
    place = source.module.removeprefix("megatron.core.")
    return Mutant(
        id=f"{place}:{qualname}:{operator}:{digest}",
        module=source.module,
        qualname=qualname,
        operator=operator,
        span=span_of(target),
        fragment=fragment,
        replacement=replacement,
    )


def _statement(source: Source, node: ast.AST) -> str:
    """The first line's worth of the statement around a node."""
    inner: ast.AST | None = node
    while inner is not None and not isinstance(inner, ast.stmt):
        inner = source.parent(inner)
    if inner is None:
        return ""
    text = ast.unparse(inner)
    return text.split("\n", 1)[0]


def _plain(text: str) -> str:
    """Without white space, so that a line break does not change a mutant's id."""
    return "".join(text.split())
