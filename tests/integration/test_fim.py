# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle data: samples that are rearranged at random are the same in every layout."""

import json
from pathlib import Path

from megatron_ttrace.evaluation.suites import Data, data_arguments
from tests.integration.jobs import TINY, ttrace

SCRIPT = Path(__file__).with_name("fim.py")


def test_ranks_that_read_other_samples(tmp_path: Path) -> None:
    """Equivalent, tokens included; the report says what is not as in training."""
    model = [word for word in TINY if word != "--mock-data"]
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--nproc-per-node", 2, "--", SCRIPT, *model),
        *data_arguments(Data.DOCUMENTS, tmp_path, 64),
        *("--fim-data", "--fim-rate", 0.9, "--fim-spm-rate", 0.5),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    out = tmp_path / "ttrace-out"
    lines = (out / "verdicts.jsonl").read_text().splitlines()
    tokens = [one for one in map(json.loads, lines) if one["kind"] == "tokens"]
    assert {one["verdict"] for one in tokens if one["name"] == "tokens"} == {"pass"}
    notices = json.loads((out / "summary.json").read_text())["notices"]
    assert any("--fim-data" in notice for notice in notices)
