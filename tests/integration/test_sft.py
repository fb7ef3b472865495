# SPDX-License-Identifier: Apache-2.0
"""Packed conversations (``--sft``), with stand-ins for the packages that read them."""

import os
from pathlib import Path

import pytest

from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Kind, Outcome
from tests.integration import jobs
from tests.integration.jobs import CP, PP, ROOT, SCRIPT

STAND_INS = ROOT / "tests" / "stand_ins"
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 4 --train-iters 3 "
    "--lr 1e-3 --lr-warmup-iters 0 --eval-iters 0 --eval-interval 100 --attention-dropout 0 "
    "--hidden-dropout 0 --transformer-impl transformer_engine --position-embedding-type rope "
    "--normalization RMSNorm --swiglu --disable-bias-linear --calculate-per-token-loss "
    "--no-create-attention-mask-in-dataloader --sft"
).split()


def check(folder: Path, *words: object, **more: object) -> jobs.Checked:
    """A check with conversations, and with stand-ins for the packages that read them."""
    path = os.pathsep.join(map(str, (ROOT, STAND_INS)))
    return jobs.check(folder, *words, model=MODEL, cold=True, PYTHONPATH=path, **more)  # type: ignore[arg-type]


def conversations(folder: Path) -> list[str]:
    """Arguments for data that this writes."""
    data = documents.write(folder / "text", MODEL)
    return documents.arguments(str(SCRIPT), data, MODEL)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        CP,
        (
            *(*CP, "--num-experts", 4, "--expert-model-parallel-size", 2, "--moe-grouped-gemm"),
            *("--moe-ffn-hidden-size", 48, "--micro-batch-size", 1),
        ),
        (*PP, "--micro-batch-size", 1),
    ],
)
def test_layouts(tmp_path: Path, layout: tuple[object, ...]) -> None:
    """Equivalent; context parallelism divides every conversation."""
    checked = check(tmp_path, *conversations(tmp_path), *layout)
    divided = any("sequences)" in str(one.placement) for one in checked.verdicts)
    assert divided == (CP[0] in layout)


@pytest.mark.nightly
def test_a_fault(tmp_path: Path) -> None:
    """Attention over two conversations at once, while context parallelism divides them."""
    words = (*conversations(tmp_path), *CP)
    checked = check(tmp_path, *words, code=1, mistake="two_documents_in_one")
    assert "decoder.layers.0.self_attention.core_attention" in {one.name for one in checked.failed}
    tokens = {one.verdict for one in checked.verdicts if one.kind is Kind.TOKENS}
    assert tokens == {Outcome.PASS}


@pytest.mark.nightly
def test_shrunk(tmp_path: Path) -> None:
    """A large job's conversations are replaced, and divided where a small job does that."""
    large = "--context-parallel-size 8 --tensor-model-parallel-size 4 --sequence-parallel".split()
    format = ("--sft-tokenizer-prompt-format", "nemotron-nano-v2")
    checked = check(tmp_path, *large, *format, flags=("--shrink",), nproc=0)
    small = [load_report(folder) for folder in checked.out.iterdir()]
    assert any("cp" in summary.config for summary, _ in small)
    for summary, verdicts in small:
        divided = any("sequences)" in str(verdict.placement) for verdict in verdicts)
        assert divided == ("cp" in summary.config)
