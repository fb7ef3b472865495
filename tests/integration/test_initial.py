# SPDX-License-Identifier: Apache-2.0
"""A wrong initialisation is found where it is, a right one raises no alarm in any layout."""

import json
import re
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, ttrace

FAULTY = Path(__file__).with_name("initial.py")
SAVED = "--ttrace-save-candidate"


def check(script: Path, *words: str, cwd: Path, **more: str) -> tuple[dict, list[dict], str]:
    """Summary, verdicts on initial values, and what was said."""
    done = ttrace(
        *("check", "--quiet", "--ttrace-no-wandb", SAVED, "--nproc-per-node", 2, "--", script),
        *(*TINY, *words),
        cwd=cwd,
        **more,
    )
    said = done.stdout + done.stderr
    out = cwd / "ttrace-out"
    assert (out / "summary.json").is_file(), said[-3000:]
    lines = map(json.loads, (out / "verdicts.jsonl").read_text().splitlines())
    initial = [line for line in lines if line["kind"] == "initial"]
    return json.loads((out / "summary.json").read_text()), initial, said


FAULTS = {
    "embedding.position_embeddings": (
        *("replica_conflict", [0, 1]),
        "differ between ranks that hold the same part$",
        "tensor_parallel/random.py",
    ),
    "decoder.layers.0.mlp.linear_fc1": (
        *("diverged", [0, 1]),
        "initial values are lost: all 0; ",
        "tensor_parallel/layers.py",
    ),
    "decoder.layers.0.mlp.linear_fc2": (
        *("diverged", [1]),
        "initial values differ in distribution: .* std ",
        "tensor_parallel/layers.py",
    ),
    "decoder.layers.1.mlp.linear_fc1": (
        *("diverged", [0, 1]),
        "unknown: .*bitwise equal to those of another part of it on rank 1$",
        "tensor_parallel/layers.py",
    ),
    "decoder.final_layernorm": (
        *("diverged", [0, 1]),
        "all 0; in the reference all 1",
        "transformer_block.py",
    ),
}
"""What tests/integration/initial.py does, and how it must be told."""


def test_faults(tmp_path: Path) -> None:
    """These modules are the culprits, no others; saved traces give the same answer."""
    layout = "--tensor-model-parallel-size", "2"
    summary, initial, said = check(FAULTY, *layout, cwd=tmp_path, INITIAL_FAULT="1")
    assert summary["verdict"] == "diverged", said[-3000:]
    culprits = {culprit["name"]: culprit for culprit in summary["culprits"]}
    assert set(culprits) == set(FAULTS)
    for name, (outcome, ranks, words, place) in FAULTS.items():
        culprit = culprits[name]
        assert (culprit["kind"], culprit["direction"]) == ("initial", "start")
        assert (culprit["verdict"], culprit["ranks"]) == (outcome, ranks)
        # Equal parts that did not come from one random state are reported without a cause.
        told = f"{culprit['explanation']}: {culprit['reason']}"
        assert re.search(words, told if words.startswith("unknown") else culprit["explanation"])
        assert place in culprit["where"], culprit["where"]
    wrong = {line["name"] for line in initial if line["verdict"] != "pass"}
    assert wrong == {f"{name}.weight" for name in FAULTS}
    out = tmp_path / "ttrace-out"
    again = ttrace("compare", "--json", out / "reference", out / "candidate", cwd=tmp_path)
    assert again.returncode == 1, again.stderr
    same = {one["name"]: one["explanation"] for one in json.loads(again.stdout)["culprits"]}
    assert same == {name: culprit["explanation"] for name, culprit in culprits.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "layout",
    [
        "--tensor-model-parallel-size 2 --sequence-parallel",
        "--pipeline-model-parallel-size 2",
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2 "
        "--moe-token-dispatcher-type alltoall --disable-bias-linear",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --untie-embeddings-and-output-weights",
    ],
)
def test_healthy(layout: str, tmp_path: Path) -> None:
    """Every parameter is judged, and none is off; the layouts' own tests have no alarm either."""
    if "fsdp" in layout:
        pytest.importorskip("einops")
    summary, initial, said = check(SCRIPT, *layout.split(), cwd=tmp_path)
    assert summary["verdict"] == "equivalent", said[-3000:]
    out = (tmp_path / "ttrace-out" / "verdicts.jsonl").read_text().splitlines()
    parameters = {
        line["name"]
        for line in map(json.loads, out)
        if (line["kind"], line["index"]) == ("param", 0)
    }
    assert {line["name"] for line in initial} == parameters
    assert {line["verdict"] for line in initial} == {"pass"}
    assert any(line["margin"] > 0 for line in initial), "nothing random was judged"


def test_without_initialisation(tmp_path: Path) -> None:
    """Memory that nobody wrote to is not judged, and that is said."""
    layout = ("--tensor-model-parallel-size", "2", "--no-initialization")
    summary, initial, _ = check(SCRIPT, *layout, cwd=tmp_path)
    assert summary["verdict"] == "equivalent"
    assert not initial
    assert "--no-initialization: initial values are not judged" in summary["notices"]
