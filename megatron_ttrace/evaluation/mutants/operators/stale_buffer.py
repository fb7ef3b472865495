# SPDX-License-Identifier: Apache-2.0
"""A stale buffer: not filled, not emptied, or shared where it should be a copy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.source import Source, last_name

_FILLS = {"copy_", "zero_", "fill_"}


def stale_buffer(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``a.copy_(b)``, ``a.zero_()`` and ``a.fill_(0)`` do nothing, ``a.clone()`` is ``a``.

    A ``wait()`` left out would be of this kind too. Whether it harms depends on the moment, and a
    fault that comes and goes says nothing about a checker.
    """
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return
    if last_name(node.func) in _FILLS and source.is_statement(node):
        yield node, "None"
    elif last_name(node.func) == "clone" and not node.args:
        yield node, f"({source.of(node.func.value)})"
