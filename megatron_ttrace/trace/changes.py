# SPDX-License-Identifier: Apache-2.0
"""The functions of a Python file, and which of them differ between two versions of it."""

import ast
import dataclasses
import difflib
import hashlib
import warnings
from collections import defaultdict
from collections.abc import Iterator

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
    """

    spans: tuple[tuple[int, int], ...]
    body: str
    whole: str
    is_seen: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A Python file.

    Attributes:
        functions: by qualified name.
        imported: digest of what runs, or may run, when it is imported: everything but the bodies of
            functions that are seen to run.
        outside: digest of what is outside of functions.
    """

    functions: dict[str, Function]
    imported: str
    outside: str


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A function that is new or different, or (without a name) lines outside of functions.

    Attributes:
        name: qualified.
        line: the first changed line of the new file, from 1.
        is_seen: as of :class:`Function`; true outside of functions.
    """

    name: str
    line: int
    is_seen: bool = True


def read(content: bytes) -> Source:
    """The functions of a file; none if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(content)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        digest = _digest(content.decode(errors="replace"))
        return Source({}, digest, digest)
    found: dict[str, list[tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]]] = defaultdict(list)

    def collect(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{prefix}{child.name}"].append((child, ast.dump(child)))
            else:
                inner = f"{prefix}{child.name}." if isinstance(child, ast.ClassDef) else prefix
                collect(child, inner)

    collect(tree, "")
    functions = {}
    for name, nodes in found.items():
        functions[name] = Function(
            tuple((_first(node), node.end_lineno or node.lineno) for node, _ in nodes),
            _digest("\n".join(ast.dump(one) for node, _ in nodes for one in node.body)),
            _digest("\n".join(text for _, text in nodes)),
            all(_is_transparent(node) for node, _ in nodes),
        )
    for name, nodes in found.items():
        for node, _ in nodes if functions[name].is_seen else ():
            node.body = []
    imported = _digest(ast.dump(tree))
    return Source(functions, imported, _digest(ast.dump(_Emptied().visit(tree))))


class _Emptied(ast.NodeTransformer):
    """Removes functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        del node

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        del node


def changes(before: bytes, after: bytes) -> list[Change]:
    """What is new or different in the second of two versions of a file, by its lines."""
    if before == after:
        return []
    old, new = read(before), read(after)
    lines = list(_changed_lines(before, after))
    found = []
    for name, function in new.functions.items():
        known = old.functions.get(name)
        if known is None or known.whole != function.whole:
            spans = function.spans
            inside = (line for line in lines if any(a <= line <= b for a, b in spans))
            found.append(Change(name, next(inside, spans[0][0]), function.is_seen))
    if old.outside != new.outside:
        every = [span for function in new.functions.values() for span in function.spans]
        outside = (line for line in lines if not any(a <= line <= b for a, b in every))
        found.append(Change("", next(outside, 1)))
    return sorted(found, key=lambda change: change.line)


def _changed_lines(before: bytes, after: bytes) -> Iterator[int]:
    """Lines of ``after`` that ``before`` lacks, and those that follow removed ones."""
    old, new = before.splitlines(), after.splitlines()
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, _, _, first, last in matcher.get_opcodes():
        if tag != "equal":
            yield from range(first + 1, max(last, min(first + 1, len(new))) + 1)


def _first(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return min([node.lineno, *(one.lineno for one in node.decorator_list)])


def _is_transparent(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return all(ast.unparse(one) in _TRANSPARENT for one in node.decorator_list)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]
