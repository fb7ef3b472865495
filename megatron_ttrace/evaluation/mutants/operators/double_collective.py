# SPDX-License-Identifier: Apache-2.0
"""A collective done twice. Only what adds up: gathering twice is gathering once."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.operators import names
from megatron_ttrace.evaluation.mutants.source import Source


def double_collective(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``all_reduce(x)`` twice in a row; ``reduce_from_region(x)`` on its own result."""
    if not names.sums(node):
        return
    assert isinstance(node, ast.Call)
    text = source.of(node)
    waits = any(word.arg == "async_op" and _is_true(word.value) for word in node.keywords)
    if waits:
        # Two at once on one tensor would race, and the fault would come and go.
        yield node, f"({text}.wait(), {text})[1]"
    elif source.is_statement(node) or not names.returns_new(node):
        yield node, f"({text}, {text})[1]"
    else:
        tensor = names.tensor_of(node)
        if tensor is not None:
            inner = source.of(tensor)
            head, _, tail = text.partition(inner)
            yield node, f"{head}{text}{tail}"


def _is_true(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
