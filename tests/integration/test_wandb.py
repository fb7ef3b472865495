# SPDX-License-Identifier: Apache-2.0
"""A diverged job reaches W&B: the table of verdicts, summary fields, and one alert."""

import json
from pathlib import Path

from tests.integration.jobs import SCRIPT, TINY, ttrace
from tests.report import wandb_file


def test_an_offline_run_holds_table_and_alert(tmp_path: Path) -> None:
    """Without a key and without a network the run is written offline and can be read back."""
    done = ttrace(
        *("check", "--nproc-per-node", 2, "--ttrace-bug", "01", "--", SCRIPT, *TINY),
        *("--tensor-model-parallel-size", 2),
        cwd=tmp_path,
        WANDB_MODE="offline",
        # As it is inherited from a process whose service has ended.
        WANDB_SERVICE=f"3-1-unix-{tmp_path}/absent",
    )
    assert done.returncode == 1, done.stderr[-3000:]
    run = next((tmp_path / "ttrace-out").glob("**/offline-run-*"))
    tables = list(run.glob("files/media/table/ttrace_verdicts*.table.json"))
    rows = json.loads(tables[0].read_text())["data"]
    assert any("embedding" in str(row) and "diverged" in str(row) for row in rows)
    records = wandb_file.records(next(run.glob("*.wandb")))
    alerts = [r.alert for r in records if r.WhichOneof("record_type") == "alert"]
    assert len(alerts) == 1
    assert "embedding.word_embeddings" in alerts[0].text
