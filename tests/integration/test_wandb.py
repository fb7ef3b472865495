# SPDX-License-Identifier: Apache-2.0
"""A diverged job reaches W&B: the table of verdicts, summary fields, and one alert."""

import json
import re
from pathlib import Path

from tests.integration.jobs import ROOT, SCRIPT, TINY, TP, ttrace
from tests.report import wandb_file


def masked(text: str) -> str:
    """Without line breaks, marks of a quotation, and measured numbers."""
    return re.sub(r"\d[\d.e+-]*(?=[×ε .,(])", "N", " ".join(text.replace("\n>", "\n").split()))


def test_an_offline_run_holds_table_and_alert(tmp_path: Path) -> None:
    """Without a key and without a network the run is written offline and can be read back."""
    done = ttrace(
        *("check", "--nproc-per-node", 2, "--ttrace-bug", "01", "--", SCRIPT, *TINY, *TP),
        cwd=tmp_path,
        WANDB_MODE="offline",
        # As it is inherited from a process whose service has ended.
        WANDB_SERVICE=f"3-1-unix-{tmp_path}/absent",
        code=1,
    )
    assert "W&B: an offline run; upload it with: wandb sync ttrace-out/wandb/off" in done.stdout
    run = next((tmp_path / "ttrace-out").glob("**/offline-run-*"))
    tables = list(run.glob("files/media/table/ttrace_verdicts*.table.json"))
    rows = json.loads(tables[0].read_text())["data"]
    assert any("embedding" in str(row) and "diverged" in str(row) for row in rows)
    records = wandb_file.records(next(run.glob("*.wandb")))
    alerts = [r.alert for r in records if r.WhichOneof("record_type") == "alert"]
    assert len(alerts) == 1
    document = (ROOT / "docs" / "wandb.md").read_text()
    assert alerts[0].title in document
    assert masked(alerts[0].text) in masked(document)
    worst = [row[:4] for row in rows][:3]
    assert all(f"| {' | '.join(map(str, row))} |" in document for row in worst), worst
