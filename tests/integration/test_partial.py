# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute summands: in Megatron's own layers, and in a fork that reduces late."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, ttrace

FORK = """
from megatron.core import parallel_state
from megatron.core.tensor_parallel import layers
from megatron.core.transformer.mlp import MLP

REDUCE, FORWARD = layers.reduce_from_tensor_model_parallel_region, MLP.forward


def late(self, *inputs, **more):
    group = parallel_state.get_tensor_model_parallel_group()
    layers.reduce_from_tensor_model_parallel_region = lambda summand, group=None: FAULTY
    try:
        output, bias = FORWARD(self, *inputs, **more)
    finally:
        layers.reduce_from_tensor_model_parallel_region = REDUCE
    return LATER, bias


MLP.forward = late
"""


def check(folder: Path, script: Path, ranks: int, words: str):
    """The exit code of a check, and the tensors that have a note or a failure."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", ranks, "--", script),
        *(*TINY, *words.split()),
        cwd=folder,
    )
    lines = (folder / "ttrace-out" / "verdicts.jsonl").read_text(encoding="utf-8").splitlines()
    verdicts = [found for line in lines if "verdict" in (found := json.loads(line))]
    failed = {(v["kind"], v["name"]) for v in verdicts if v["verdict"] not in ("pass", "unchecked")}
    noted = {(v["kind"], v["name"]) for v in verdicts if v["note"].startswith("partial by design")}
    return done.returncode, failed, noted


@pytest.mark.parametrize(
    ("summand", "later", "code"),
    [
        ("summand", "REDUCE(output, group=group)", 0),
        ("summand", "output", 1),
        pytest.param(
            *("summand * (1 + 0.01 * group.rank())", "REDUCE(output, group=group)", 1),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["late", "never", "wrong"],
)
def test_a_fork_that_reduces_late(summand: str, later: str, code: int, tmp_path: Path) -> None:
    """It is equivalent if it reduces at all, and if the sum is right."""
    script = tmp_path / "fork.py"
    fork = FORK.replace("FAULTY", summand).replace("LATER", later)
    script.write_text(f"{fork}\n{SCRIPT.read_text(encoding='utf-8')}", encoding="utf-8")
    found, failed, noted = check(tmp_path, script, 2, "--tensor-model-parallel-size 2")
    summands = {("output", f"decoder.layers.{layer}.mlp.linear_fc2") for layer in (0, 1)}
    assert found == code
    assert noted == (summands if code == 0 else set())
    assert (summands <= failed) == (code == 1)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, "--tensor-model-parallel-size 2 --group-query-attention --num-query-groups 1"),
        pytest.param(
            *(4, "--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 2"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_shared_groups(ranks: int, words: str, tmp_path: Path) -> None:
    """Fewer groups of keys and values than ranks: equivalent, and known without a conclusion."""
    assert check(tmp_path, SCRIPT, ranks, words) == (0, set(), set())
