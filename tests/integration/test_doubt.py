# SPDX-License-Identifier: Apache-2.0
"""A training run whose check does not find the cause isolates modules at once."""

import json
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, torchrun

NOISY = Path(__file__).with_name("noisy.py")


def test_modules_are_isolated_at_once(tmp_path: Path) -> None:
    """The report tells what fails on its own, and training goes on as without a check."""
    words = [NOISY, SCRIPT, *TINY, "--use-distributed-optimizer"]
    plain, traced = (
        torchrun(2, *words, *flags, cwd=tmp_path)
        for flags in ((), ("--ttrace", "--ttrace-no-wandb"))
    )
    assert (plain.returncode, traced.returncode) == (0, 0), traced.stdout + traced.stderr
    bits = [
        sorted(line[line.index("BITS") :] for line in run.stdout.splitlines() if "BITS" in line)
        for run in (plain, traced)
    ]
    assert bits[0]
    assert bits[0] == bits[1]
    assert "checking with modules isolated" in traced.stdout
    summary = json.loads((tmp_path / "ttrace-out/summary.json").read_text())
    assert summary["verdict"] == "diverged"
    assert summary["culprits"][0]["cause"] is None
    told = [text for text in summary["notices"] if text.startswith("isolated: ")]
    assert "isolated: decoder.layers.1.mlp (output) fails on its own; cause: unknown" in told
    assert not (tmp_path / "ttrace-out/isolated").exists()


def test_the_verdict_outlives_a_failed_isolation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was found before is reported, from whichever rank the failure comes."""
    module = "megatron_ttrace.run"
    preparing, checking = "comparison:Comparison.initial", "candidate:CandidateSession._check"
    for rank, fault in enumerate((preparing, checking)):
        monkeypatch.setenv("FAULT", f"{module}.{fault}@{rank}=2")
        directory = tmp_path / str(rank)
        flags = ("--ttrace", "--ttrace-no-wandb", "--ttrace-dir", directory)
        ran = torchrun(2, NOISY, SCRIPT, *TINY, "--use-distributed-optimizer", *flags, cwd=tmp_path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert json.loads((directory / "summary.json").read_text())["verdict"] == "diverged"
        assert "injected; the verdict stands, training goes on" in ran.stderr
        assert "UNCHECKED" not in ran.stderr
