# SPDX-License-Identifier: Apache-2.0
"""Where to look for faults of which the traced step holds no trace.

All other places are computed from the code that ran (``diagnose/ran.py``). Layers that no stage has
and initial values go wrong before anything is traced, while the model is built. No module, call or
graph node leads to the function that went wrong.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

from megatron_ttrace.trace.findings import Cause, Finding

PLACES = {
    Cause.LAYERS: "core/transformer/transformer_block.py:get_num_layers_to_build",
    Cause.RANDOM_STATE: "core/tensor_parallel/random.py:model_parallel_cuda_manual_seed",
}
"""``file:function``; files are relative to the package ``megatron``."""


def by_hand(finding: Finding | None) -> str:
    """The place of a fault of the model's construction; empty for any other fault."""
    where = PLACES.get(finding.cause) if finding is not None else None
    return _shown(where) if where is not None else ""


def _shown(where: str) -> str:
    file, _, function = where.partition(":")
    line = _lines(file).get(function)
    return f"megatron/{file}" + (f":{line}" if line else "") + f" ({function})"


@functools.cache
def _lines(file: str) -> dict[str, int]:
    """Line of each function and class of a file of the installed Megatron."""
    try:
        found = importlib.util.find_spec("megatron.core")
        if found is None or found.origin is None:
            return {}
        source = (Path(found.origin).parent.parent / file).read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
    except (ImportError, OSError, ValueError, SyntaxError):
        return {}
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    return {node.name: node.lineno for node in reversed(nodes) if isinstance(node, kinds)}
