# SPDX-License-Identifier: Apache-2.0
"""A lost mark: an attribute by which Megatron's code knows how a tensor is divided."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.source import Source

MARKS = {
    "allreduce": "True",
    "average_gradients_across_tp_domain": "False",
    "is_embedding_or_output_parameter": "False",
    "sequence_parallel": "False",
    "shared": "False",
    "shared_embedding": "False",
    "tensor_model_parallel": "False",
}
"""The value of each if it is not set."""


def lost_mark(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Never set: ``setattr`` gone, an assignment of the default; or not read."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) == 3:
        mark = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
        if mark in MARKS and node.func.id == "setattr":
            yield node, "None"
        elif mark in MARKS and node.func.id == "getattr":
            yield node, MARKS[str(mark)]
    elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
        default = MARKS.get(node.targets[0].attr)
        if default and source.of(node.value) != default:
            yield node.value, default
