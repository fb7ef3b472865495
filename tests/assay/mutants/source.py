# SPDX-License-Identifier: Apache-2.0
"""A module's source as operators see it, and the replacement of a piece of it."""

import ast
import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A piece of source; as in ``ast``, lines count from 1 and columns (bytes) from 0."""

    first_line: int
    first_column: int
    last_line: int
    last_column: int


class Source:
    """The text and the syntax tree of one module.

    Attributes:
        module: its name.
        tree: its parsed source.
    """

    def __init__(self, module: str, text: str) -> None:
        self.module = module
        self.tree = ast.parse(text)
        self._lines = [line.encode() for line in text.splitlines(keepends=True)]
        self._parents = {
            child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)
        }
        self._functions = {
            node.name: node for node in self.tree.body if isinstance(node, ast.FunctionDef)
        }
        self._found_by = {
            node.targets[0].id: node.value.func.id
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Call)
            and isinstance(node.value.func, ast.Name)
        }

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node around a node."""
        return self._parents.get(node)

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The statement that a node is, or is in."""
        inner: ast.AST | None = node
        while inner is not None and not isinstance(inner, ast.stmt):
            inner = self.parent(inner)
        return inner

    def of(self, node: ast.AST) -> str:
        """The text of a node."""
        return self.between(span_of(node))

    def between(self, span: Span) -> str:
        """The text of a piece."""
        lines = self._lines[span.first_line - 1 : span.last_line]
        lines[-1] = lines[-1][: span.last_column]
        lines[0] = lines[0][span.first_column :]
        return b"".join(lines).decode()

    def finder(self, name: str) -> str:
        """The text of the module's function whose result has this name; empty if none has."""
        function = self._functions.get(self._found_by.get(name, ""))
        return "" if function is None else ast.unparse(function)

    def is_statement(self, node: ast.AST) -> bool:
        """Whether the value of a call is ignored."""
        return isinstance(self.parent(node), ast.Expr)

    def replace(self, span: Span, replacement: str) -> str:
        """The whole text with a piece replaced."""
        head = self._lines[: span.first_line - 1]
        tail = self._lines[span.last_line :]
        first = self._lines[span.first_line - 1][: span.first_column]
        last = self._lines[span.last_line - 1][span.last_column :]
        return b"".join([*head, first, replacement.encode(), last, *tail]).decode()


def span_of(node: ast.AST) -> Span:
    """Where a node is."""
    return Span(
        node.lineno,  # type: ignore[attr-defined]
        node.col_offset,  # type: ignore[attr-defined]
        node.end_lineno,  # type: ignore[attr-defined]
        node.end_col_offset,  # type: ignore[attr-defined]
    )


def last_name(node: ast.AST) -> str:
    """``all_reduce`` of ``torch.distributed.all_reduce``; empty if it is not a name."""
    if isinstance(node, ast.Name):
        return node.id
    return node.attr if isinstance(node, ast.Attribute) else ""
