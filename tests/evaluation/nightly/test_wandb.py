# SPDX-License-Identifier: Apache-2.0
"""W&B, offline: what was logged is read back from the run's files."""

from pathlib import Path

import pytest

from megatron_ttrace.evaluation.nightly import history
from megatron_ttrace.evaluation.nightly import wandb as sink
from tests.evaluation.nightly.synthetic import nights
from tests.report.wandb_file import OfflineRun, no_account  # noqa: F401

pytest.importorskip("wandb")
pytestmark = pytest.mark.usefixtures("no_account")


@pytest.mark.slow
def test_a_bad_night(tmp_path: Path) -> None:
    """A row per case, summary fields, and one alert that says what changed."""
    tonight = nights()[-1]
    lines = history.changes(tonight, nights()[0])
    assert "offline run" in sink.log(tonight, lines, directory=tmp_path, online=True)
    run = OfflineRun(tmp_path)
    table = run.tables()["ttrace_nightly"]
    assert table["columns"] == list(sink.COLUMNS)
    assert len(table["data"]) == len(tonight.cases)
    assert table["data"][0][:3] == ["bugs", "01 tp-embedding-mask [TP 2]", "missed"]
    fields = run.summary()
    assert fields["nightly/exit_code"] == 2
    assert fields["nightly/bugs/missed"] == 1
    assert fields["nightly/weakest_culprit_margin"] == pytest.approx(5.3)
    (alert,) = run.alerts()
    assert alert.title == "ttrace nightly: 1 missed"
    assert "torch: 2.15.0 -> 2.16.0" in alert.text
    # A good night alerts nobody.
    good = tmp_path / "good"
    sink.log(nights()[0], [], directory=good, online=True)
    assert OfflineRun(good).summary()["nightly/exit_code"] == 0
    assert OfflineRun(good).alerts() == []
