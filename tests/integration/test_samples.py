# SPDX-License-Identifier: Apache-2.0
"""Samples whose order depends on the layout, or that are rearranged at random, are no fault."""

from pathlib import Path

import torch

from megatron_ttrace.jobs.shrink.documents import FIM_TOKENS
from megatron_ttrace.trace.records import Kind, Outcome
from megatron_ttrace.trace.store import TraceReader
from tests.integration.jobs import TINY, Checked, check

UNSHARDED = (
    "--use-megatron-fsdp --ckpt-format fsdp_dtensor --data-parallel-sharding-strategy no_shard "
    "--transformer-impl transformer_engine --bf16"
).split()


def tokens_of(checked: Checked) -> set[Outcome]:
    """What became of the tokens."""
    return {v.verdict for v in checked.verdicts if (v.kind, v.name) == (Kind.TOKENS, "tokens")}


def test_shuffled_samples(tmp_path: Path) -> None:
    """On two data-parallel ranks, here those of Megatron-FSDP without shards."""
    checked = check(tmp_path, *UNSHARDED, "--dataloader-type", "cyclic")
    assert tokens_of(checked) == {Outcome.PASS}


def test_a_shrunk_job_that_fills_in_the_middle(tmp_path: Path) -> None:
    """Equivalent on ranks that read other samples; the samples are rearranged, and are the same."""
    model = [word for word in TINY if word != "--mock-data"]
    large = "--fim-data --fim-rate 0.9 --fim-split-sample <file> --fim-fragment-rate 0.9".split()
    flags = ("--nproc-per-node", 8, "--shrink", "--max-ranks", 2)
    checked = check(tmp_path, *large, model=model, flags=flags, nproc=0)
    assert tokens_of(checked) == {Outcome.PASS}
    assert any("--fim-data" in notice for notice in checked.summary.notices)
    reference = TraceReader(checked.out / "reference")
    keys = [key for key in reference if key.kind is Kind.TOKENS and key.name == "tokens"]
    seen = torch.cat([reference.tensor(reference.entry(key)).unique() for key in keys])
    assert {FIM_TOKENS[name] for name in ("prefix", "middle", "suffix")} <= set(seen.tolist())
