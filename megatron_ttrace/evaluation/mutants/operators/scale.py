# SPDX-License-Identifier: Apache-2.0
"""A scale lost, or applied twice."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.source import Source, last_name

_FACTOR = re.compile(r"scal|factor|coeff|num_microbatches|num_tokens")
_COUNT = re.compile(r"world_size|_size\b|\.size\(|num_|total|degree|\bn\b")
_METHODS = {"mul": "*", "mul_": "*", "div": "/", "div_": "/"}


def lost_scale(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``x / n`` becomes ``x``, ``x *= s`` nothing, ``x.mul_(s)`` becomes ``x``."""
    for whole, kept, _ in _scalings(node, source):
        yield whole, kept


def double_scale(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``x / n`` becomes ``x / n / n``, ``x *= s`` becomes ``x *= s * s``."""
    for whole, _, twice in _scalings(node, source):
        yield whole, twice


def _scalings(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    """What scales, what is left without, and what does it twice."""
    if isinstance(node, ast.BinOp):
        yield from _product(node, source)
    elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult | ast.Div):
        factor = source.of(node.value)
        if _is_scale(factor, node.op):
            sign = "*" if isinstance(node.op, ast.Mult) else "/"
            yield node, "pass", f"{source.of(node.target)} {sign}= ({factor}) * ({factor})"
    elif isinstance(node, ast.Call) and last_name(node.func) in _METHODS and len(node.args) == 1:
        assert isinstance(node.func, ast.Attribute | ast.Name)
        factor = source.of(node.args[0])
        if isinstance(node.func, ast.Attribute) and re.search(r"[a-z]", factor):
            call = f".{node.func.attr}({factor})"
            yield node, f"({source.of(node.func.value)})", f"{source.of(node)}{call}"


def _product(node: ast.BinOp, source: Source) -> Iterator[tuple[ast.AST, str, str]]:
    left, right = source.of(node.left), source.of(node.right)
    if isinstance(node.op, ast.Div) and _is_scale(right, node.op):
        yield node, f"({left})", f"(({source.of(node)}) / ({right}))"
    elif isinstance(node.op, ast.Mult):
        if _is_scale(right, node.op):
            yield node, f"({left})", f"(({source.of(node)}) * ({right}))"
        elif _is_scale(left, node.op):
            yield node, f"({right})", f"(({source.of(node)}) * ({left}))"


def _is_scale(text: str, op: ast.operator) -> bool:
    # Products of counts are sizes; a division by a count is a mean.
    return bool(_FACTOR.search(text) or (isinstance(op, ast.Div) and _COUNT.search(text)))
