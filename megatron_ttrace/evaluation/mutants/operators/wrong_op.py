# SPDX-License-Identifier: Apache-2.0
"""SUM for AVG, AVG for SUM, SUM for MAX."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.operators import names
from megatron_ttrace.evaluation.mutants.source import Source, last_name

_OTHER = {"SUM": "AVG", "AVG": "SUM", "MAX": "SUM", "MIN": "MAX"}
_AVERAGE = '__import__("torch").distributed.ReduceOp.AVG'


def wrong_op(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """Another ``ReduceOp``; where none is given and torch would sum, the average."""
    if isinstance(node, ast.Attribute) and last_name(node.value) == "ReduceOp":
        if node.attr in _OTHER:
            yield node, f"{source.of(node.value)}.{_OTHER[node.attr]}"
    elif names.moves(node) and isinstance(node, ast.Call) and _sums_by_default(node):
        text = source.of(node)
        head = text[: text.rindex(")")].rstrip().rstrip(",")
        yield node, f"{head}, op={_AVERAGE})"


def _sums_by_default(call: ast.Call) -> bool:
    torchs = ast.unparse(call.func).endswith(("distributed.all_reduce", "dist.all_reduce"))
    return torchs and len(call.args) < 2 and all(word.arg != "op" for word in call.keywords)
