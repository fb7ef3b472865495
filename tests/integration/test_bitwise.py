# SPDX-License-Identifier: Apache-2.0
"""Watching a run changes no bit of it."""

import json
import re
import time
from pathlib import Path

import pytest

from tests.integration.jobs import ZERO, bits_of, our_lines, train

TRACED = ("--ttrace", "--ttrace-no-wandb")


@pytest.mark.nightly
def test_without_the_flag_nothing_is_hooked(tmp_path: Path) -> None:
    """A run without --ttrace is bitwise a run without this package's integration."""
    bare, absent = (train(tmp_path, *ZERO, mode=mode, cold=True) for mode in ("bare", ""))
    assert bits_of(bare.stdout) == bits_of(absent.stdout)


FSDP = [
    *("--use-megatron-fsdp", "--ckpt-format", "fsdp_dtensor"),
    *("--data-parallel-sharding-strategy", "optim_grads_params"),
]
FSDP2 = [
    *("--use-torch-fsdp2", "--ckpt-format", "torch_dist", "--no-gradient-accumulation-fusion"),
    "--untie-embeddings-and-output-weights",
]
STEP = [
    *("--pipeline-model-parallel-size", "2", "--num-layers", "4"),
    *("--num-virtual-stages-per-pipeline-rank", "2", "--ckpt-format", "torch"),
    *(*ZERO, "--overlap-param-gather-with-optimizer-step"),
]
"""An update whose gather has begun when the step ends."""


@pytest.mark.parametrize(
    ("sharding", "dtype"),
    [
        # Numbers that stand for masks are drawn in a rehearsal.
        (ZERO, ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]),
        (ZERO, ["--bf16"]),
        pytest.param(STEP, ["--bf16"], marks=pytest.mark.nightly),
        (FSDP, ["--bf16"]),
        pytest.param(FSDP2, ["--bf16"], marks=pytest.mark.nightly),
        pytest.param(ZERO, ["--fp16"], marks=pytest.mark.nightly),
        pytest.param(ZERO, ["--fp16", "--initial-loss-scale", "1024"], marks=pytest.mark.nightly),
    ],
    ids=["fp32", "bf16", "step-bf16", "fsdp-bf16", "fsdp2-bf16", "fp16-skipped", "fp16"],
)
def test_a_traced_run_trains_the_same(
    tmp_path: Path, sharding: list[str], dtype: list[str]
) -> None:
    """With --ttrace, losses, gradient norms and weights are bitwise those of the untraced run.

    Megatron's own functions are in place without the flag, and wrapped with it. In bf16 the copies
    of the training state are in files.
    """
    plain = train(tmp_path, *sharding, *dtype)
    assert "LOOP untouched" in plain.stdout
    assert not [line for line in our_lines(plain.stdout) if "no accelerator" not in line]
    is_spilling = dtype == ["--bf16"]
    # Later steps have another learning rate.
    steps = ("--ttrace-iterations", "2-3" if is_spilling else "1-2")
    words = (*sharding, *dtype, *TRACED, *steps)
    traced = train(tmp_path, *words, mode="spilling" if is_spilling else "")
    assert "LOOP watched" in traced.stdout
    assert not is_spilling or re.search("COPIES [1-9]", traced.stdout)
    assert bits_of(traced.stdout) == bits_of(plain.stdout)
    assert len(bits_of(plain.stdout)) == 9
    summary = json.loads((tmp_path / "ttrace-out/summary.json").read_text())
    assert summary["verdict"] == "equivalent"
    # A process makes it while training goes on; forked ranks do not wait for that when they end.
    page = tmp_path / "ttrace-out/report.html"
    deadline = time.monotonic() + 100
    while not page.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert summary["run"]["id"] in page.read_text()
    # Both steps are judged: a replay whose second step had another learning rate would blind it.
    assert dtype or set(summary["counts"]) == {"pass"}


def test_a_traced_run_from_a_checkpoint_trains_the_same(tmp_path: Path) -> None:
    """The same with --load: training goes on from the loaded state as if it had never ended."""
    layout = (*ZERO, "--bf16", "--lr-decay-iters", 10, "--train-iters", 5)
    plain = train(tmp_path, *layout, "--save", "ck", "--save-interval", 3)
    (tmp_path / "ck" / "latest_checkpointed_iteration.txt").write_text("3")
    traced = train(tmp_path, *layout, "--load", "ck", *TRACED)
    rest = [bits for bits in bits_of(plain.stdout) if bits.split()[1] in ("4", "5")]
    assert bits_of(traced.stdout) == rest != []
    summary = json.loads((tmp_path / "ttrace-out/summary.json").read_text())
    assert summary["verdict"] == "equivalent"
