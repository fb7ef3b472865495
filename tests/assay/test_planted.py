# SPDX-License-Identifier: Apache-2.0
"""Errors planted into real runs: from twice the tolerance found, up to half of it not flagged."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey
from tests.assay.plant import Field
from tests.integration.jobs import PP, TP, check, python


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
    layout = (*TP, "--sequence-parallel", *PP)
    out = check(tmp_path, *layout, *dtype, nproc=4, flags=["--ttrace-save-candidate"]).out
    words = ("-m", "tests.assay", "plant", out / "reference", out / "candidate", "--trials", 100)
    python(*words, cwd=tmp_path, code=0)
    if not dtype:
        assert norms(tmp_path, 1e-5) == {Outcome.REPLICA_CONFLICT}
        assert norms(tmp_path, -1e-5) == {Outcome.REPLICA_CONFLICT}
        assert norms(tmp_path, 0.0) == {Outcome.PASS}
