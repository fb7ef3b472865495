# SPDX-License-Identifier: Apache-2.0
"""A bucket, a parameter, a chunk skipped: the first one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from megatron_ttrace.evaluation.mutants.source import Source

_ITEMS = re.compile(r"bucket|buffer|grad|param|group|chunk|microbatch")


def skip_item(node: ast.AST, source: Source) -> Iterator[tuple[ast.AST, str]]:
    """``for bucket in buckets`` goes through all but the first."""
    if isinstance(node, ast.For) and _ITEMS.search(source.of(node.iter)):
        yield node.iter, f"list({source.of(node.iter)})[1:]"
