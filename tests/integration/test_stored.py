# SPDX-License-Identifier: Apache-2.0
"""What ranks had when Megatron saved is what is read from the checkpoint, element by element."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_ttrace.mcore.checkpoints.buckets import by_parameter
from megatron_ttrace.mcore.checkpoints.stored import open_checkpoint
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.records import LoadedIndex
from megatron_ttrace.trace.states import Bucketed, Item, State
from megatron_ttrace.trace.views import box_views
from tests.integration.jobs import TINY, TP, torchrun

STATES = {
    LoadedIndex.WEIGHT: State.WEIGHT,
    LoadedIndex.BUFFER: State.WEIGHT,
    LoadedIndex.MAIN: State.MAIN,
    LoadedIndex.EXP_AVG: State.EXP_AVG,
    LoadedIndex.EXP_AVG_SQ: State.EXP_AVG_SQ,
}
ZERO = ("--bf16", "--use-distributed-optimizer")
EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --disable-bias-linear "
    "--moe-router-enable-expert-bias --moe-router-score-function sigmoid "
    "--moe-token-dispatcher-type alltoall"
).split()
GROUPED = ("--moe-grouped-gemm", "--transformer-impl", "transformer_engine")


@pytest.mark.parametrize(
    "job",
    [
        pytest.param((*ZERO, *TP, "--ddp-bucket-size", 2000, "--overlap-grad-reduce"), id="tp"),
        pytest.param(ZERO, id="dp", marks=pytest.mark.nightly),
        pytest.param((*ZERO, *EXPERTS, *GROUPED), id="experts", marks=pytest.mark.nightly),
        pytest.param(("--bf16", *EXPERTS), id="sequential-experts", marks=pytest.mark.nightly),
        pytest.param(
            (*ZERO, *TP, "--dist-ckpt-optim-fully-reshardable"),
            id="full",
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_saved_state(tmp_path: Path, job: tuple[object, ...]) -> None:
    """Weights, main weights, moments and buffers; optimizer state in buckets, too."""
    saving = ("--save", "ck", "--save-interval", 2, "--train-iters", 2, "--swiglu")
    script = Path(__file__).with_name("saving.py")
    words = (script, *TINY, "--ckpt-format", "torch_dist", *saving, *job)
    torchrun(2, *words, cwd=tmp_path, TTRACE_TEST_SAVED=str(tmp_path), code=0)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    pieces = [codec.decode(Bucketed, one) for rank in ranks for one in rank["buckets"]]
    checkpoint = by_parameter(open_checkpoint(tmp_path / "ck"), pieces)
    assert not checkpoint.unread
    seen = set()
    for rank, written in enumerate(ranks):
        tensors = load_file(tmp_path / f"{rank}.safetensors")
        for line in written["tensors"]:
            index = LoadedIndex(line["index"])
            found = checkpoint.find(Item(STATES[index], line["name"]))
            assert found is not None, (index, line["name"])
            seen.add((index, line["name"]))
            whole, boxes = found[1].read(), [Box(*map(tuple, box)) for box in line["boxes"]]
            assert boxes or not tensors[line["tensor"]].numel()
            for ours, stored in box_views(tensors[line["tensor"]], whole, boxes):
                assert torch.equal(ours, stored), (index, line["name"])
    without = set() if "--num-experts" in job else {LoadedIndex.BUFFER}
    assert {index for index, _ in seen} == set(STATES) - without
    assert len(seen) > 4 * 10
