# SPDX-License-Identifier: Apache-2.0
"""A collective dropped: what it should have changed stays as it is."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.operators import names
from megatron_ttrace.evaluation.mutants.source import Source


def drop_collective(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``all_reduce(x)`` becomes nothing, ``y = reduce_from_region(x)`` becomes ``y = x``."""
    if not names.moves(node):
        return
    assert isinstance(node, ast.Call)
    if source.is_statement(node):
        yield node, "None"
    elif names.returns_new(node):
        tensor = names.tensor_of(node)
        if tensor is not None:
            yield node, f"({source.of(tensor)})"
