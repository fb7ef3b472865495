# SPDX-License-Identifier: Apache-2.0
"""A training loop of somebody's own, of which one step is handed over."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_ttrace
from megatron_ttrace.mcore.fronts import own
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind, Result
from tests.integration.jobs import ROOT, python

SCRIPT = ROOT / "tests" / "own_loop" / "train.py"


def check(tmp_path: Path, *words: str) -> Any:
    """Two data-parallel ranks, each with microbatches that it makes itself."""
    done = python(
        *("-m", "megatron_ttrace", "check", "--quiet", "--nproc-per-node", 2),
        *("--ttrace-dir", tmp_path / "out", "--", SCRIPT, "1", *words),
        cwd=tmp_path,
        timeout=280,
        cold=False,
    )
    assert done.returncode in (0, 1), done.stderr
    return megatron_ttrace.load_report(tmp_path / "out")


def test_without_a_check():
    """The step is run, and nothing is asked of the model."""
    assert megatron_ttrace.step(len, None, None, [{}, {}]) == 2
    assert not megatron_ttrace.is_reference()


def test_data_parallel(tmp_path: Path) -> None:
    """The reference gets the microbatches of both ranks, although it could not read them itself."""
    report = check(tmp_path)
    assert report.summary.verdict is Result.EQUIVALENT
    assert report.summary.counts["pass"] > 400


def test_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    """Found at the reduction that leaves them out."""
    report = check(tmp_path, "--forget-to-finish")
    assert report.summary.verdict is Result.DIVERGED
    assert report.summary.culprits[0].kind is Kind.COUNTED


@pytest.mark.parametrize("batches", [[], [{"tokens": torch.rand(1, 2)}], [{"text": "a"}]])
def test_microbatches_without_tokens(batches) -> None:
    with pytest.raises(TTraceError, match="give batches"):
        own._shape(batches)


def test_the_shape_of_a_microbatch() -> None:
    assert own._shape([{"mask": torch.rand(2, 3), "tokens": torch.zeros(4, 8).long()}]) == (4, 8)
