# SPDX-License-Identifier: Apache-2.0
"""``ttrace demo``: the healthy run passes, the bug is found, within the promised time."""

import json
import time
from pathlib import Path

from tests.integration.jobs import ttrace


def test_demo(tmp_path: Path) -> None:
    """Both outcomes stand in the files, and the report names the embedding."""
    began = time.monotonic()
    done = ttrace("demo", "--directory", "demo", cwd=tmp_path, WANDB_MODE="offline")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert time.monotonic() - began < 120
    healthy, sick = (
        json.loads((tmp_path / "demo" / name / "summary.json").read_text())
        for name in ("healthy", "sick")
    )
    assert healthy["verdict"] == "equivalent"
    assert sick["verdict"] == "diverged"
    first = sick["culprits"][0]
    assert (first["name"], first["kind"], first["direction"]) == (
        "embedding.word_embeddings",
        "output",
        "forward",
    )
    assert not [line for line in done.stdout.splitlines() if len(line) > 80]
