# SPDX-License-Identifier: Apache-2.0
"""Watching a run changes no bit of it."""

import importlib.metadata
import json
import re
import time
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, our_lines, torchrun

BITS = Path(__file__).with_name("bits.py")
ZERO = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]


def bits_of(mode: str, *words: object, cwd: Path, cold: bool = False) -> list[str]:
    """The numbers that a two-rank run logs."""
    done = torchrun(2, BITS, mode, SCRIPT, *TINY, *words, cwd=cwd, cold=cold)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert mode != "spilling" or re.search("COPIES [1-9]", done.stdout)
    found = [line[line.index("BITS") :] for line in done.stdout.splitlines() if "BITS" in line]
    assert len(found) >= 3
    return sorted(set(found))


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_without_the_flag_nothing_is_hooked(tmp_path: Path, cold: bool) -> None:
    """A run without --ttrace is bitwise a run without this package's integration."""
    bare = bits_of("bare", *ZERO, cwd=tmp_path, cold=True)
    absent = bits_of("enabled", *ZERO, cwd=tmp_path, cold=cold)
    assert bare == absent


def test_the_loop_is_untouched_without_the_flag(tmp_path: Path) -> None:
    """Megatron's own functions are in place without --ttrace, and wrapped with it."""
    words = [BITS, "enabled", SCRIPT, *TINY, "--train-iters", "1"]
    plain = torchrun(1, *words, cwd=tmp_path)
    watched = torchrun(1, *words, "--ttrace", "--ttrace-no-wandb", cwd=tmp_path)
    assert "LOOP untouched" in plain.stdout
    assert "LOOP watched" in watched.stdout
    assert not [line for line in our_lines(plain.stdout) if "no accelerator" not in line]


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
        (ZERO, []),
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
    """With --ttrace, losses and gradient norms are bitwise those of the untraced run.

    In bf16 the copies of the training state are in files.
    """
    if sharding == FSDP and not importlib.metadata.version("megatron-core").startswith("0.19"):
        pytest.skip("Megatron-FSDP of older releases does not train on this torch, traced or not")
    plain = bits_of("enabled", *sharding, *dtype, cwd=tmp_path)
    traced = bits_of(
        *(
            "spilling" if dtype == ["--bf16"] else "enabled",
            *sharding,
            *dtype,
            "--ttrace",
            "--ttrace-no-wandb",
            "--ttrace-iterations",
            # Later ones have another learning rate.
            "2-3" if dtype == ["--bf16"] else "1-2",
        ),
        cwd=tmp_path,
    )
    assert traced == plain
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
    """The same with --load: the loaded state is the common start, and training goes on from it."""
    layout = [*ZERO, "--bf16", "--lr-decay-iters", "10"]
    saved = bits_of(
        "enabled", *layout, "--save", tmp_path / "ck", "--save-interval", 3, cwd=tmp_path
    )
    assert len(saved) == 3
    again = [
        *layout,
        "--load",
        tmp_path / "ck",
        "--train-iters",
        6,
        "--override-opt_param-scheduler",
    ]
    plain = bits_of("enabled", *again, cwd=tmp_path)
    traced = bits_of("enabled", *again, "--ttrace", "--ttrace-no-wandb", cwd=tmp_path)
    assert traced == plain
    assert not set(saved) & set(plain)
    summary = (tmp_path / "ttrace-out/summary.json").read_text()
    assert re.search(r'"verdict": "equivalent"', summary)
