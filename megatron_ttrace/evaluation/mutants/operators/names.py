# SPDX-License-Identifier: Apache-2.0
"""How Megatron names what moves data between ranks."""

from __future__ import annotations

import ast
import re

from megatron_ttrace.evaluation.mutants.source import last_name

_MOVES = re.compile(
    r"(^|_)(all_?reduce|all_?gather|reduce_scatter|all_to_all|all2all|broadcast"
    r"|gather_along|reduce_scatter_along|split_along|(grad|param)_sync)(_|$)"
)
_REGION = re.compile(r"^(copy_to|reduce_from|gather_from|scatter_to|reduce_scatter_to)\w*_region$")
_IN_PLACE = re.compile(r"(^|\.)(torch\.distributed|dist)\.\w+$|^dist_\w+_func$")


def moves(call: ast.AST) -> bool:
    """Whether a node calls a collective, or what Megatron has around one."""
    if not isinstance(call, ast.Call):
        return False
    name = last_name(call.func)
    return bool(_MOVES.search(name) or _REGION.match(name) or name == "_reduce")


def returns_new(call: ast.Call) -> bool:
    """Whether the call takes a tensor and returns another (not torch's own, which fill buffers)."""
    return bool(call.args) and not _IN_PLACE.search(ast.unparse(call.func))


def tensor_of(call: ast.Call) -> ast.expr | None:
    """What goes into a call that returns a new tensor; all-to-alls take the group first."""
    for argument in call.args:
        if not isinstance(argument, ast.Starred) and not is_group(argument):
            return argument
    return None


def sums(call: ast.AST) -> bool:
    """Whether doing it twice gives something else than doing it once: it adds up in place."""
    if not moves(call):
        return False
    assert isinstance(call, ast.Call)
    name = last_name(call.func)
    return bool(re.search(r"all_?reduce|^_reduce$|^reduce_from", name))


def is_group(node: ast.AST) -> bool:
    """Whether an expression is a process group, by its name."""
    if isinstance(node, ast.Call):
        return bool(re.match(r"get_\w*group$", last_name(node.func)))
    return bool(re.search(r"(^|_)(group|pg)$", last_name(node)))
