# SPDX-License-Identifier: Apache-2.0
"""A run from a checkpoint: what its ranks loaded is compared with what one device loads."""

import json
from pathlib import Path

import pytest

from megatron_ttrace.trace.records import MAIN, ONE_DEVICE
from tests.integration.jobs import SCRIPT, TINY, torchrun, ttrace

SCRIPT_WITH_FAULTS = Path(__file__).with_name("misloaded.py")
SAVED = ("--ckpt-format", "torch_dist", "--train-iters", 1)
SAVING = (*SAVED, "--save", "ck", "--save-interval", 1)
PARTS = ("weight", "bias")
MODEL = ("--bf16", "--swiglu", "--untie-embeddings-and-output-weights")
BUCKETS = (
    "--use-distributed-optimizer --dist-ckpt-optim-fully-reshardable --overlap-grad-reduce "
    "--ddp-bucket-size 2000"
).split()


def save(cwd: Path, ranks: int, *job: object) -> None:
    """Train one step and save."""
    done = torchrun(ranks, SCRIPT, *TINY, *MODEL, *SAVING, *job, cwd=cwd)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def check(cwd: Path, ranks: int, script: Path, *job: object, **more: str) -> tuple[int, dict, list]:
    """Check the job that goes on: exit code, summary, verdicts about what was loaded."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", "--", "torchrun", "--nproc-per-node", ranks),
        *(script, *TINY, *MODEL, *SAVED, "--load", "ck", "--train-iters", 2),
        *("--override-opt_param-scheduler", *job),
        cwd=cwd,
        **more,
    )
    out = cwd / "ttrace-out"
    assert done.returncode < 2, done.stdout[-2000:] + done.stderr[-2000:]
    verdicts = map(json.loads, (out / "verdicts.jsonl").read_text().splitlines())
    loaded = [one for one in verdicts if one["kind"] == "loaded"]
    return done.returncode, json.loads((out / "summary.json").read_text()), loaded


def failed(loaded: list[dict]) -> set[tuple[str, int]]:
    """Name and index of what fails."""
    return {(one["name"], one["index"]) for one in loaded if one["verdict"] != "pass"}


def test_weights_of_other_ranks(tmp_path: Path) -> None:
    """Two wrong descriptions: both modules are culprits; a sound fork loads the same and passes."""
    save(tmp_path, 1)
    layout = ("--tensor-model-parallel-size", 2)
    code, summary, loaded = check(tmp_path, 2, SCRIPT_WITH_FAULTS, *layout)
    assert code == 1
    wrong = {name for name, index in failed(loaded) if index == ONE_DEVICE}
    assert wrong == {
        "embedding.word_embeddings.weight",
        *(f"decoder.layers.{layer}.mlp.linear_fc1.{part}" for layer in (0, 1) for part in PARTS),
    }
    assert {(one["direction"], one["kind"]) for one in summary["culprits"]} == {("start", "loaded")}
    assert {one["name"] for one in summary["culprits"]} == {
        name.rpartition(".")[0] for name in wrong
    }
    code, summary, loaded = check(tmp_path, 2, SCRIPT_WITH_FAULTS, *layout, SOUND="1")
    assert code == 0
    assert not failed(loaded)
    assert {one["index"] for one in loaded} == {ONE_DEVICE, MAIN}


@pytest.mark.nightly
def test_main_weights_of_other_places(tmp_path: Path) -> None:
    """Megatron saves shifted main weights (megatron-core 0.19); its weights are right."""
    save(tmp_path, 2, *BUCKETS)
    code, summary, loaded = check(tmp_path, 2, SCRIPT, *BUCKETS)
    assert code == 1
    assert {index for _, index in failed(loaded)} == {MAIN}
    assert {one["index"] for one in summary["culprits"]} == {MAIN}
