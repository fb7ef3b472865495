# SPDX-License-Identifier: Apache-2.0
"""A model that is not deterministic is not equivalent because its tolerances are wide."""

import json
from pathlib import Path

from tests.integration.jobs import TINY, ttrace


def test_noise_of_no_seed(tmp_path: Path) -> None:
    """Too many tensors are unchecked for this reason; the notice names the first one."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--", "torchrun", "--nproc-per-node", 2),
        *(Path(__file__).with_name("unrepeatable.py"), *TINY, "--tensor-model-parallel-size", 2),
        cwd=tmp_path,
    )
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    out = tmp_path / "ttrace-out"
    lines = (out / "verdicts.jsonl").read_text().splitlines()
    verdicts = list(map(json.loads, lines))
    noisy = [one["name"] for one in verdicts if one["reason"] == "non-deterministic"]
    assert "decoder.layers.1.mlp" in noisy
    assert not [one for one in verdicts if one["verdict"] not in ("pass", "unchecked")]
    notices = json.loads((out / "summary.json").read_text())["notices"]
    (told,) = [one for one in notices if "not deterministic" in one]
    assert "decoder.layers.1.mlp output" in told
