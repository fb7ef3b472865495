# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron writes, resharded by it."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, torchrun, ttrace
from tests.integration.test_loaded import BUCKETS

SAVING = ("--ckpt-format", "torch_dist", "--save-interval", 1, "--train-iters", 1)
FROZEN = ("--lr", 0, "--finetune", "--weight-decay", 0)
"""A step that changes nothing."""


def save(cwd: Path, folder: str, *job: object) -> None:
    """Train one step on two ranks and save."""
    torchrun(2, SCRIPT, *TINY, *SAVING, "--save", folder, *job, cwd=cwd, code=0)


def same(cwd: Path, a: str, b: str, *flags: str) -> tuple[int, dict]:
    """Exit code and answer of ``ttrace checkpoint``."""
    done = ttrace("checkpoint", "--json", *flags, a, b, cwd=cwd)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.nightly
def test_a_step_in_another_layout(tmp_path: Path) -> None:
    """With another padding of the vocabulary, too; a step changes all weights."""
    layout = ("--use-distributed-optimizer", "--make-vocab-size-divisible-by", 192)
    save(tmp_path, "tp", "--tensor-model-parallel-size", 2)
    save(tmp_path, "zero", "--load", "tp", *FROZEN, *layout)
    code, answer = same(tmp_path, "tp", "zero", "--weights-only")
    assert (code, set(answer["counts"])) == (0, {"same"})
    save(tmp_path, "trained", "--load", "tp", "--finetune", *layout)
    code, answer = same(tmp_path, "tp", "trained", "--weights-only")
    assert code == 1
    assert answer["counts"]["different"] == len(answer["weights"])


@pytest.mark.nightly
def test_shifted_optimizer_state(tmp_path: Path) -> None:
    """Megatron saves main weights and moments of other places (megatron-core 0.19)."""
    shape = ("--bf16", "--swiglu")
    save(tmp_path, "plain", *shape)
    save(tmp_path, "shifted", *shape, *BUCKETS)
    code, answer = same(tmp_path, "plain", "shifted")
    assert (code, {one["same"] for one in answer["weights"]}) == (1, {"same"})
    wrong = [one for one in answer["optimizer"] if one["same"] == "different"]
    assert {one["state"] for one in wrong} == {"main weight", "exp_avg", "exp_avg_sq"}
    assert sum(one["note"].endswith("in B they do not round to the weights") for one in wrong) > 8
