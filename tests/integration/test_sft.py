# SPDX-License-Identifier: Apache-2.0
"""Packed conversations (``--sft``), with stand-ins for the packages that read them."""

import json
import os
from pathlib import Path

import pytest

from megatron_ttrace.jobs.shrink import documents
from tests.integration.jobs import ROOT, SCRIPT, ttrace

STAND_INS = ROOT / "tests" / "stand_ins"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --lr-warmup-iters 0 --eval-iters 0 --eval-interval 100 --attention-dropout 0 "
    "--hidden-dropout 0 --transformer-impl transformer_engine --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --calculate-per-token-loss "
    "--no-create-attention-mask-in-dataloader --sft"
).split()


def check(*words: object, cwd: Path, code: int = 0, **more: str) -> list[dict[str, object]]:
    """The verdicts of a check, which must end with this exit code."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", *words),
        cwd=cwd,
        cold=True,
        PYTHONPATH=os.pathsep.join(map(str, (ROOT, STAND_INS))),
        **more,
    )
    assert done.returncode == code, done.stdout[-2000:] + done.stderr[-2000:]
    lines = (cwd / "ttrace-out" / "verdicts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        "--context-parallel-size 2",
        "--context-parallel-size 2 --num-experts 4 --expert-model-parallel-size 2 "
        "--moe-grouped-gemm --moe-ffn-hidden-size 48 --micro-batch-size 1",
        "--pipeline-model-parallel-size 2 --micro-batch-size 1",
    ],
)
def test_layouts(tmp_path: Path, layout: str) -> None:
    """Equivalent; context parallelism divides every conversation."""
    data = documents.write(tmp_path / "text", MODEL)
    words = [*MODEL, *documents.arguments(str(SCRIPT), data, MODEL), *layout.split()]
    found = check("--nproc-per-node", 2, "--", SCRIPT, *words, cwd=tmp_path)
    assert any("sequences)" in str(one["placement"]) for one in found) == ("context" in layout)


@pytest.mark.nightly
def test_a_fault(tmp_path: Path) -> None:
    """Attention over two conversations at once, while context parallelism divides them."""
    data = documents.write(tmp_path / "text", MODEL)
    words = [
        *MODEL,
        *documents.arguments(str(SCRIPT), data, MODEL),
        *"--context-parallel-size 2".split(),
    ]
    script = SCRIPT.parents[1] / "tests" / "integration" / "broken.py"
    fault = {"BROKEN": "two_documents_in_one"}
    found = check("--nproc-per-node", 2, "--", script, *words, cwd=tmp_path, code=1, **fault)
    failed = {str(one["name"]) for one in found if one["verdict"] == "diverged"}
    assert "decoder.layers.0.self_attention.core_attention" in failed
    assert {one["verdict"] for one in found if one["kind"] == "tokens"} == {"pass"}


@pytest.mark.nightly
def test_shrunk(tmp_path: Path) -> None:
    """A large job's conversations are replaced, and still divided."""
    large = "--context-parallel-size 8 --tensor-model-parallel-size 4 --sequence-parallel".split()
    words = [SCRIPT, *MODEL, *large, "--sft-tokenizer-prompt-format", "nemotron-nano-v2"]
    found = check("--shrink", "--", *words, cwd=tmp_path)
    assert any("sequences)" in str(one["placement"]) for one in found)
