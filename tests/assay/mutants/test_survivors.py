# SPDX-License-Identifier: Apache-2.0
"""Proofs: what is listed as equivalent gives the same numbers.

Functions are taken from Megatron's source, as they are and with the mutant; it is not imported.
"""

import __future__

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ReduceOp

from megatron_ttrace.mcore.sources import megatron_folder
from megatron_ttrace.mcore.versions import megatron_core_version, series
from megatron_ttrace.trace.changes import outermost
from tests.assay.mutants.campaign import survivors
from tests.assay.mutants.scan import modules, scan_source
from tests.assay.mutants.source import Source

pytestmark = pytest.mark.skipif(
    series(megatron_core_version()) != "0.19",
    reason="survivors.toml describes megatron-core 0.19",
)


def compiled(text: str, name: str) -> Callable[..., Any]:
    """One function of a module."""
    function = next(node for qualname, node in outermost(ast.parse(text)) if qualname == name)
    function.decorator_list = []
    flags = __future__.annotations.compiler_flag
    space: dict[str, Any] = {"torch": torch}
    exec(compile(ast.Module([function], []), name, "exec", flags), space)
    return space[function.name]


@cache
def versions(mutant: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The function that a mutant changes, without it and with it."""
    module, name, *_ = mutant.split(":")
    path = dict(modules())[f"megatron.core.{module}"]
    text = path.read_text(encoding="utf-8")
    found = next(one for one in scan_source(f"megatron.core.{module}", text) if one.id == mutant)
    changed = Source(found.module, text).replace(found.span, found.replacement)
    return compiled(text, name), compiled(changed, name)


LOGITS = "tensor_parallel.cross_entropy:VocabParallelCrossEntropy.calculate_predicted_logits"


@pytest.mark.parametrize("change", ["stale-buffer:3b391e", "stale-buffer:58f3b4"])
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 5), start=st.integers(0, 12))
def test_copies_of_copies(change: str, seed: int, rows: int, start: int) -> None:
    """The same results, and the same inputs afterwards."""
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(rows, 2, 4, generator=random)
    target = torch.randint(0, 16, (rows, 2), generator=random)

    def run(function: Callable[..., Any]) -> list[torch.Tensor]:
        inputs = [logits.clone(), target.clone(), logits.max(dim=-1)[0]]
        return [*inputs, *function(*inputs, start, start + 4)]

    assert survivors()[f"{LOGITS}:{change}"][0] == "equivalent"
    expected, found = map(run, versions(f"{LOGITS}:{change}"))
    assert all(map(torch.equal, expected, found))


BIAS = "transformer.moe.moe_utils:get_updated_expert_bias"


def biases(mutant: str, counts: list[int], ranks: int) -> list[list[float]]:
    """Updated without the mutant and with it; ``counts`` are summed over the ranks."""
    found = []
    for function in versions(mutant):
        sums = []

        def all_reduce(x: torch.Tensor, group: Any, op: Any = ReduceOp.SUM, sums=sums) -> None:
            if op == ReduceOp.AVG:
                x.div_(ranks)
            elif sums:
                x.mul_(ranks)
            sums.append(x)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_reduce", all_reduce)
            tokens = torch.tensor(counts, dtype=torch.float32)
            found.append(function(tokens, torch.zeros(len(counts)), 1e-3, object()))
        assert sums
    return [one.tolist() for one in found]


@given(counts=st.lists(st.integers(0, 10000), min_size=1, max_size=16), ranks=st.integers(1, 1024))
def test_signs_of_doubled_counts(counts: list[int], ranks: int) -> None:
    """An expert's bias depends on the sign of a difference of integers."""
    mutant = f"{BIAS}:double-collective:0e290a"
    assert survivors()[mutant][0] == "equivalent"
    expected, found = biases(mutant, counts, ranks)
    assert expected == found


@given(bits=st.sampled_from([torch.float16, torch.bfloat16]), size=st.integers(1, 9))
def test_wider_copies(bits: torch.dtype, size: int) -> None:
    """``float()`` of 16 bits is a copy, with or without ``clone()`` before it."""
    shard = torch.ones(size, dtype=bits)
    shard.float().zero_()
    assert shard.sum() == size


def test_one_rank_has_the_position_embeddings() -> None:
    """So its gradient is reduced over a group of one."""
    path = Path(megatron_folder(), "core", "parallel_state.py")
    chosen = compiled(path.read_text(encoding="utf-8"), "default_position_embedding_ranks")
    assert all(len(chosen(list(range(7, 7 + stages)))) == 1 for stages in range(1, 33))


BUCKET = "distributed.param_and_grad_buffer:_ParamAndGradBuffer._new_bucket:skip-item:ccedbb"


def test_nothing_reads_a_buffers_map() -> None:
    """Only the function that the mutant changes uses it, to assert that it has no entry yet."""
    assert survivors()[BUCKET][0] == "equivalent"
    path = dict(modules())["megatron.core.distributed.param_and_grad_buffer"]
    name = "param_to_bucket"
    for file in path.parents[2].rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if name in text:
            users = {
                (qualname, type(node.value).__name__ == "Name" and node.value.id)
                for qualname, function in outermost(ast.parse(text))
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute) and node.attr == name
            }
            of_buffers = {user for user in users if "_ParamAndGradBucketGroup." not in user[0]}
            made = {("_ParamAndGradBuffer.__init__", "self")}
            made |= {("_ParamAndGradBuffer._new_bucket", "self")}
            assert of_buffers == (made if file == path else set())
