# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that Megatron writes, resharded by it."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, torchrun, ttrace

SAVING = ("--ckpt-format", "torch_dist", "--save-interval", 1, "--train-iters", 1)
FROZEN = ("--lr", 0, "--finetune", "--weight-decay", 0)
"""A step that changes nothing."""


def save(cwd: Path, folder: str, *job: object) -> None:
    """Train one step on two ranks and save."""
    done = torchrun(2, SCRIPT, *TINY, *SAVING, "--save", folder, *job, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def same(cwd: Path, a: str, b: str) -> tuple[int, dict]:
    """Exit code and answer of ``ttrace checkpoint``."""
    done = ttrace("checkpoint", "--json", a, b, cwd=cwd)
    return done.returncode, json.loads(done.stdout)


@pytest.mark.parametrize(
    "layout",
    [
        ("--pipeline-model-parallel-size", 2),
        pytest.param(
            ("--use-distributed-optimizer", "--make-vocab-size-divisible-by", 192),
            marks=pytest.mark.nightly,
        ),
    ],
    ids=["pp2", "zero"],
)
def test_another_layout(tmp_path: Path, layout: tuple[object, ...]) -> None:
    """Loaded into another layout and saved again: the same weights, until a step changes them."""
    save(tmp_path, "tp", "--tensor-model-parallel-size", 2)
    save(tmp_path, "other", "--load", "tp", *FROZEN, *layout)
    code, answer = same(tmp_path, "tp", "other")
    assert (code, set(answer["counts"])) == (0, {"same"})
    assert answer["counts"]["same"] > 10
    save(tmp_path, "trained", "--load", "tp", "--finetune", *layout)
    code, answer = same(tmp_path, "tp", "trained")
    assert code == 1
    assert answer["counts"]["different"] == len(answer["weights"])
