# SPDX-License-Identifier: Apache-2.0
"""A training run whose check does not find the cause isolates modules at once."""

import json
from pathlib import Path

import pytest

from tests.assay.planted.mistakes import PLANTED
from tests.assay.planted.train import ORDER
from tests.integration.jobs import TINY, TRAIN, bits_of, torchrun, train

NOISE = {PLANTED: "noise_of_a_seed"}
TRACED = ("--ttrace", "--ttrace-no-wandb")


def test_modules_are_isolated_at_once(tmp_path: Path) -> None:
    """The report tells what fails on its own, and training goes on as without a check."""
    plain, traced = (
        train(tmp_path, "--use-distributed-optimizer", *flags, **NOISE) for flags in ((), TRACED)
    )
    assert bits_of(plain.stdout) == bits_of(traced.stdout) != []
    assert "checking with modules isolated" in traced.stdout
    summary = json.loads((tmp_path / "ttrace-out/summary.json").read_text())
    assert summary["verdict"] == "diverged"
    assert summary["culprits"][0]["cause"] is None
    isolated = [text for text in summary["notices"] if text.startswith("isolated: ")]
    assert "isolated: decoder.layers.1.mlp (output) fails on its own; cause: unknown" in isolated
    assert not (tmp_path / "ttrace-out/isolated").exists()


@pytest.mark.parametrize(
    ("rank", "function"),
    [
        (0, "run/comparison.py:Comparison.initial"),
        pytest.param(*(1, "run/rehearsal.py:Rehearsal.trace"), marks=pytest.mark.nightly),
    ],
)
def test_the_verdict_outlives_a_failed_isolation(tmp_path: Path, rank: int, function: str) -> None:
    """What was found before is reported, from whichever rank the failure comes."""
    failure = {"function": function, "call": 2, "error": "RuntimeError", "mark": "mark"}
    order = json.dumps({str(rank): failure})
    words = (*TINY, "--use-distributed-optimizer", *TRACED)
    ran = torchrun(2, TRAIN, *words, cwd=tmp_path, **NOISE, **{ORDER: order}, code=0)
    assert (tmp_path / "mark").exists()
    summary = json.loads((tmp_path / "ttrace-out" / "summary.json").read_text())
    assert summary["verdict"] == "diverged"
    assert "; the verdict stands, training goes on" in ran.stderr
    assert "UNCHECKED" not in ran.stderr
