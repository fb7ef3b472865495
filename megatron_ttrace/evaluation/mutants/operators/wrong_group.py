# SPDX-License-Identifier: Apache-2.0
"""A collective over another axis of the mesh."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.operators import names
from megatron_ttrace.evaluation.mutants.source import Source

_STATE = '__import__("megatron.core.parallel_state", fromlist=["parallel_state"])'
TENSOR = f"{_STATE}.get_tensor_model_parallel_group()"
DATA = f"{_STATE}.get_data_parallel_group()"
_NOT_TENSOR = re.compile(r"dp|data_parallel|cp|context|ep\b|ep_|expert|bucket|optimizer")
_TENSOR = re.compile(r"tp|tensor|model_parallel|pp|pipeline|embd|embedding")


def wrong_group(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """The data-parallel group for the tensor-parallel one, the tensor-parallel one for others."""
    if not names.moves(node):
        return
    assert isinstance(node, ast.Call)
    for argument in [*node.args, *(word.value for word in node.keywords)]:
        if names.is_group(argument):
            yield argument, _other(source.of(argument), source.module)


def _other(group: str, module: str) -> str:
    if _NOT_TENSOR.search(group):
        return TENSOR
    if _TENSOR.search(group):
        return DATA
    # A plain "group" is that of the package.
    return TENSOR if re.search(r"\.(distributed|optimizer)\.", module) else DATA
