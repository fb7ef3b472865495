# SPDX-License-Identifier: Apache-2.0
"""An input of the model that is wrong is named, and not the modules that use it."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Direction, Kind
from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("misfed.py")
TP = ("--tensor-model-parallel-size", "2")


@pytest.mark.parametrize(
    "name", ["position_ids", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("labels",))]
)
def test_a_wrong_input(name, tmp_path):
    """It is the only culprit, with the name of the argument."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", 2, "--", SCRIPT),
        *(*TINY, *TP),
        cwd=tmp_path,
        MISFED=name,
    )
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-2000:]
    summary, verdicts = load_report(tmp_path / "ttrace-out")
    (culprit,) = summary.culprits
    assert (culprit.name, culprit.kind, culprit.direction) == (
        *(f"model.{name}", Kind.INPUT),
        Direction.START,
    )
    assert culprit.shown_by(verdicts).name == "model"
