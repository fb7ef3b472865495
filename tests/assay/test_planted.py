# SPDX-License-Identifier: Apache-2.0
"""Errors planted into real runs: from twice the tolerance found, up to half of it not flagged."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey
from tests.assay.plant import Field
from tests.integration.jobs import SCRIPT, TINY, python, ttrace

MIXED = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--pipeline-model-parallel-size", "2"),
)
ZERO = ("--tensor-model-parallel-size", "2", "--use-distributed-optimizer")


def hold(directory: Path, nproc: int, arguments: tuple[str, ...], trials: int) -> None:
    """Check a job, keep its tensors, plant: 99 % are found, 1 % flagged."""
    checked = ttrace(
        *("check", "--nproc-per-node", nproc, "--quiet", "--ttrace-save-candidate"),
        *("--ttrace-no-wandb", "--", SCRIPT, *TINY, *arguments),
        cwd=directory,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr[-2000:]
    out = directory / "ttrace-out"
    words = ("-m", "tests.assay", "plant", out / "reference", out / "candidate")
    done = python(*words, "--trials", trials, cwd=directory, timeout=1500, cold=False)
    assert done.returncode == 0, done.stdout + done.stderr


def norms(directory: Path, error: float) -> set[Outcome]:
    """The verdicts on the gradient norm when one rank's is off by ``error``."""
    field = Field(directory / "ttrace-out/reference", directory / "ttrace-out/candidate")
    key = TraceKey(1, STEP_LEVEL, Kind.GRAD_NORM, "grad_norm")
    whole = field.whole(key)
    return {field.verdict(key, rank, whole * (1 + error)).verdict for rank in range(4)}


@pytest.mark.parametrize(
    "dtype",
    [(), pytest.param(("--bf16",), marks=pytest.mark.nightly)],
    ids=["fp32", "bf16"],
)
def test_planted_errors(tmp_path: Path, dtype: tuple[str, ...]) -> None:
    """TP 2 with sequence parallelism x PP 2; in fp32 a gradient norm off by 1e-5 is found."""
    hold(tmp_path, 4, (*MIXED, *dtype), 100)
    if not dtype:
        assert norms(tmp_path, 1e-5) == {Outcome.REPLICA_CONFLICT}
        assert norms(tmp_path, -1e-5) == {Outcome.REPLICA_CONFLICT}
        assert norms(tmp_path, 0.0) == {Outcome.PASS}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("dtype", [(), ("--bf16",)], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("nproc", "layout"), [(4, MIXED), (4, ZERO)], ids=["tp-pp", "tp-zero"])
def test_many_planted_errors(
    tmp_path: Path, nproc: int, layout: tuple[str, ...], dtype: tuple[str, ...]
) -> None:
    """Ten thousand of each sort."""
    hold(tmp_path, nproc, (*layout, *dtype), 10_000)
