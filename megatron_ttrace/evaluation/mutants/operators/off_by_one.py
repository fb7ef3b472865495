# SPDX-License-Identifier: Apache-2.0
"""An offset, a bound or a mask off by one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.source import Source, last_name

_POSITION = re.compile(
    r"start|(^|_)end($|_)|offset|(^|_)(index|idx|rank|first|last|begin|mask|boundary|stage)($|_)"
)
_STRICT = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}


def off_by_one(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``<`` for ``<=``, an offset one more, a slice one further."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sign = _STRICT.get(type(node.ops[0]))
        sides = [node.left, node.comparators[0]]
        if sign and any(_POSITION.search(last_name(side)) for side in sides):
            yield node, f"{source.of(sides[0])} {sign} {source.of(sides[1])}"
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Sub):
        if _POSITION.search(last_name(node.right)):
            yield node.right, f"({source.of(node.right)} + 1)"
        elif _POSITION.search(last_name(node.left)):
            yield node.left, f"({source.of(node.left)} + 1)"
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        is_product = isinstance(node.value, ast.BinOp) and isinstance(
            node.value.op, ast.Mult | ast.FloorDiv
        )
        if is_product and _POSITION.search(last_name(node.targets[0])):
            yield node.value, f"{source.of(node.value)} + 1"
    elif isinstance(node, ast.Slice) and node.lower and node.upper and not node.step:
        yield node, f"({source.of(node.lower)}) + 1 : ({source.of(node.upper)}) + 1"
