# SPDX-License-Identifier: Apache-2.0
"""Where a rank waits is known of every function of torch.distributed that waits."""

import ast
from pathlib import Path

import torch.distributed as dist

from megatron_ttrace.capture.waiting import _AGREED

OBJECTS = {"recv_object_list"}
"""From any rank: nobody can be named."""


def test_every_function_that_waits_is_known() -> None:
    """A release that renames one, or calls another within it, is noticed."""
    module = dist.distributed_c10d
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    waiting = {
        function.name
        for function in tree.body
        if isinstance(function, ast.FunctionDef)
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "work.wait"
    }
    assert {"all_reduce", "all_gather"} <= waiting
    assert waiting - _AGREED.keys() == OBJECTS
