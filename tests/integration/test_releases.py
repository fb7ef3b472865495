# SPDX-License-Identifier: Apache-2.0
"""What `make test-versions` runs with every supported release of megatron-core."""

import os
from pathlib import Path

import pytest

from megatron_ttrace.mcore.versions import megatron_core_version
from tests.integration.jobs import SCRIPT, ttrace
from tests.integration.test_layouts import alarms, rows_of

pytestmark = [pytest.mark.releases, pytest.mark.timeout(900)]

LAYOUTS = (
    *("tp2/gpt/fp32", "tp2-sp/gpt/bf16", "pp2/llama/bf16", "dp2-zero/llama/fp32"),
    *("dp2-zero-overlap/gpt/fp32", "tp2-pp2/llama/fp32", "recompute-uniform/gpt/fp32"),
    *("te-tp2-sp/llama-te/bf16", "cp2/gpt-te/fp32", "mtp-tp2/llama-te/fp32"),
)
EXPERTS = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 1 "
    "--lr 1e-3 --lr-warmup-iters 0 --mock-data --tokenizer-type NullTokenizer --vocab-size 128 "
    "--eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --transformer-impl local --swiglu "
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 "
    "--moe-token-dispatcher-type alltoall"
).split()

GROUPED = [
    *(word if word != "local" else "transformer_engine" for word in EXPERTS),
    *"--moe-grouped-gemm --tensor-model-parallel-size 2 --sequence-parallel".split(),
    *("--expert-tensor-parallel-size", "1"),
]

BIASES = [
    *EXPERTS,
    *"--bf16 --overlap-grad-reduce --moe-router-score-function sigmoid".split(),
    "--moe-router-enable-expert-bias",
]


def test_the_release_is_the_one_that_is_meant() -> None:
    """The path decides which release is tested; a slip would test another one in silence."""
    meant = os.environ.get("TTRACE_TEST_RELEASE")
    # Inside a git checkout Megatron 0.18 adds that checkout's commit to its version.
    assert meant in (None, megatron_core_version().partition("+")[0])


def test_healthy_layouts(tmp_path: Path) -> None:
    """One layout of each sort raises no alarm."""
    rows = rows_of(*LAYOUTS, cwd=tmp_path)
    assert len(rows) == len(LAYOUTS)
    assert not alarms(rows)


def test_virtual_pipeline(tmp_path: Path) -> None:
    """Interleaved stages, which send while they compute."""
    assert not alarms(rows_of("pp2-vpp2/*/fp32", cwd=tmp_path))


def test_experts(tmp_path: Path) -> None:
    """Experts spread over two ranks."""
    ttrace("check", "--nproc-per-node", 2, "--", SCRIPT, *EXPERTS, cwd=tmp_path, code=0)


def test_biases_of_routers(tmp_path: Path) -> None:
    """In 0.18 they are bf16 until a first forward pass, which only the candidate makes here."""
    ttrace("check", "--nproc-per-node", 2, "--", SCRIPT, *BIASES, cwd=tmp_path, code=0)


def test_grouped_experts_over_tensor_parallel_ranks(tmp_path: Path) -> None:
    """0.19 marks their weights; before, nothing does: docs/findings.md, 29."""
    words = ["--nproc-per-node", "2", "--ttrace-no-wandb", "--", SCRIPT, *GROUPED]
    done = ttrace("check", *words, cwd=tmp_path)
    unmarked = megatron_core_version() < "0.19"
    assert done.returncode == int(unmarked), done.stdout[-3000:] + done.stderr[-3000:]
    assert ("never counted in the gradient norm" in " ".join(done.stdout.split())) == unmarked


def test_known_bugs(tmp_path: Path) -> None:
    """A forward and a gradient bug: the healthy jobs pass, the faulty ones are found."""
    ttrace("bugs", "run", "01", "11", cwd=tmp_path, timeout=600, code=0)
