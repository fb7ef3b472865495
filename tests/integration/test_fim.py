# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle data: samples that are rearranged at random are the same in every layout."""

import json
from pathlib import Path

import torch

from megatron_ttrace.jobs.shrink.documents import FIM_TOKENS
from megatron_ttrace.trace.records import Kind
from megatron_ttrace.trace.store import TraceReader
from tests.integration.jobs import SCRIPT, TINY, ttrace


def test_a_shrunk_job(tmp_path: Path) -> None:
    """Equivalent on ranks that read other samples; the samples are rearranged, and are the same."""
    model = [word for word in TINY if word != "--mock-data"]
    large = "--fim-data --fim-rate 0.9 --fim-split-sample <file> --fim-fragment-rate 0.9".split()
    done = ttrace(
        *("check", "--shrink", "--quiet", "--ttrace-no-wandb", "--max-ranks", 2, "--"),
        *("torchrun", "--nproc-per-node", 8, SCRIPT, *model, *large),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    out = tmp_path / "ttrace-out"
    lines = (out / "verdicts.jsonl").read_text().splitlines()
    tokens = [one for one in map(json.loads, lines) if one["kind"] == "tokens"]
    assert {one["verdict"] for one in tokens if one["name"] == "tokens"} == {"pass"}
    notices = json.loads((out / "summary.json").read_text())["notices"]
    assert any("--fim-data" in notice for notice in notices)
    reference = TraceReader(out / "reference")
    entries = [
        reference.entry(key)
        for key in reference
        if key.kind is Kind.TOKENS and key.name == "tokens"
    ]
    seen = torch.cat([reference.tensor(one).unique() for one in entries])
    assert {FIM_TOKENS[name] for name in ("prefix", "middle", "suffix")} <= set(seen.tolist())
