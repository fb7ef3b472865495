# SPDX-License-Identifier: Apache-2.0
"""The functions of a Python file, and which of them differ between two versions of it."""

import ast
import dataclasses
import difflib
import functools
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef
_TRANSPARENT = frozenset(
    {
        *("abstractmethod", "classmethod", "contextmanager", "property", "staticmethod"),
        *("torch.no_grad()", "torch.inference_mode()"),
    }
)
"""Decorators that run a function's own code. One that compiles it would hide that it ran."""


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function or method; functions inside it belong to it.

    Attributes:
        spans: first and last lines, decorators included; several if it is defined several times.
        body: digest of its body. Neither comments nor line numbers count.
        whole: digest of its body, signature and decorators.
        is_seen: whether it is seen to run: no decorator may replace its code.
        inner: the functions inside it, by qualified name, with their spans; outer ones first.
    """

    spans: tuple[tuple[int, int], ...]
    body: str
    whole: str
    is_seen: bool
    inner: tuple[tuple[str, tuple[int, int]], ...] = ()

    def parts(self, name: str, lines: Iterable[int]) -> tuple[str, ...]:
        """The innermost functions that these lines are in; none without functions inside.

        ``name`` is this one's.
        """
        if not self.inner:
            return ()
        within = ([n for n, (a, b) in self.inner if a <= line <= b] for line in lines)
        return tuple(dict.fromkeys(names[-1] if names else name for names in within))


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A Python file: its functions by qualified name, and two digests.

    ``imported`` is of what runs, or may run, when it is imported: everything but the bodies of
    functions that are seen to run. ``outside`` is of what is outside of functions.
    """

    functions: dict[str, Function]
    imported: str
    outside: str


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A function that is new or different, or (without a name) lines outside of functions.

    ``name`` is qualified, ``line`` the first changed line of the new file, from 1, and ``is_seen``
    as of :class:`Function` (true outside of functions). ``parts`` are the innermost functions with
    changed lines, by qualified name; none without functions inside.
    """

    name: str
    line: int
    is_seen: bool = True
    parts: tuple[str, ...] = ()


@functools.lru_cache(maxsize=1)
def read(content: bytes) -> Source:
    """The functions of a file; none if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        digest = _digest(content.decode(errors="replace"))
        return Source({}, digest, digest)
    nodes_by_name: dict[str, list[tuple[FunctionNode, str]]] = defaultdict(list)
    for name, node in outermost(tree):
        nodes_by_name[name].append((node, ast.dump(node)))
    functions = {}
    for name, nodes in nodes_by_name.items():
        functions[name] = Function(
            tuple((first_line(node), node.end_lineno or node.lineno) for node, _ in nodes),
            _digest("\n".join(ast.dump(line) for node, _ in nodes for line in node.body)),
            _digest("\n".join(text for _, text in nodes)),
            all(ast.unparse(d) in _TRANSPARENT for node, _ in nodes for d in node.decorator_list),
            tuple(inner for node, _ in nodes for inner in _inner(node, name)),
        )
    for name, nodes in nodes_by_name.items():
        for node, _ in nodes if functions[name].is_seen else ():
            node.body = []
    imported = _digest(ast.dump(tree))
    return Source(functions, imported, _digest(ast.dump(_WithoutFunctions().visit(tree))))


def outermost(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, FunctionNode]]:
    """The outermost functions of a module or class, in order, with qualified names."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FunctionNode):
            yield f"{prefix}{node.name}", node
        else:
            inner = f"{prefix}{node.name}." if isinstance(node, ast.ClassDef) else prefix
            yield from outermost(node, inner)


def _inner(node: ast.AST, prefix: str) -> Iterator[tuple[str, tuple[int, int]]]:
    for child in ast.iter_child_nodes(node):
        name = prefix
        if isinstance(child, FunctionNode | ast.ClassDef):
            name = f"{prefix}.{child.name}"
        if isinstance(child, FunctionNode):
            yield name, (first_line(child), child.end_lineno or child.lineno)
        yield from _inner(child, name)


class _WithoutFunctions(ast.NodeTransformer):
    def visit(self, node: ast.AST) -> Any:
        return None if isinstance(node, FunctionNode) else super().visit(node)


def changes(before: bytes, after: bytes) -> list[Change]:
    """What is new or different in the second of two versions of a file, by its lines."""
    if before == after:
        return []
    old, new = read(before), read(after)
    lines = list(_changed_lines(before, after))
    changes = []
    for name, function in new.functions.items():
        former = old.functions.get(name)
        if former is None or former.whole != function.whole:
            spans = function.spans
            inside = [line for line in lines if any(a <= line <= b for a, b in spans)]
            line, parts = min(inside, default=spans[0][0]), function.parts(name, inside)
            changes.append(Change(name, line, function.is_seen, parts))
    if old.outside != new.outside:
        all_spans = [span for function in new.functions.values() for span in function.spans]
        outside = (line for line in lines if not any(a <= line <= b for a, b in all_spans))
        changes.append(Change("", next(outside, 1)))
    return sorted(changes, key=lambda change: change.line)


def _changed_lines(before: bytes, after: bytes) -> Iterator[int]:
    """Lines of ``after`` that ``before`` lacks, and those that follow removed ones."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, _, _, first, last in matcher.get_opcodes():
        if tag != "equal":
            yield from range(first + 1, max(last, min(first + 1, len(new))) + 1)


def first_line(node: FunctionNode) -> int:
    """As in ``co_firstlineno``: decorators count."""
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
