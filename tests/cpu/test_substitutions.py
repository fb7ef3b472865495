# SPDX-License-Identifier: Apache-2.0
"""Each substitution, seen from a process that has activated the CPU backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace import cpu
from megatron_ttrace.trace.errors import TTraceError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def facts():
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("probe.py"))],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


EXPECTED = {
    "mesh": "cpu",
    # --init-model-with-meta-device builds the model under one.
    "default device": "meta",
    "scripted": [1.0, 1.0],
    # Only Megatron sees CUDA types.
    "types": {
        "megatron": "torch.cuda.FloatTensor",
        "megatron bf16": "torch.cuda.BFloat16Tensor",
        "others": "torch.FloatTensor",
    },
    "streams": {"done": True, "ordered": True, "capturing": False},
    # A data loader's seed, drawn on one rank only, would part the dropout masks of the others.
    "random": {
        "kept by a data loader": True,
        "restored": True,
        "another stream": True,
        "same as the CPU's": True,
    },
    # Activating twice wraps once.
    "wrapped once": True,
    "dynamo": "1",
    # torch.compile returns functions as they are, and nothing imports the compiler.
    "compiled": [True, True, True, False],
    # Optimizers import the compiler, which wants every function of torch.cuda to be another one.
    "optimizer": True,
}


@pytest.mark.parametrize("name", EXPECTED)
def test_fact(facts, name):
    assert facts[name] == EXPECTED[name]


def test_only_the_place_of_a_tensor_changes(facts):
    """In other threads too: checkpoints are written, and data sets built, by threads."""
    seen = facts["devices"]
    assert set(seen["asked"].values()) == {seen["thread"]} == {"cpu"}
    assert seen["same tensor"]
    assert seen["dtype kept"] == "torch.float32"
    assert seen["double"] == "torch.float64"
    assert seen["meta"] == "meta"


def test_megatron_finds_a_device_and_the_data_loader_none(facts):
    """After activation ``torch.cuda.is_available()`` says yes; the backend is needed still."""
    seen = facts["queries"]
    assert seen["available"]
    assert seen["still needed"]
    assert not seen["accelerator"]
    assert seen["allocated"] == 0
    assert seen["memory"]
    assert seen["capability"] >= [8, 0]  # bf16 is refused below


@pytest.mark.parametrize("rank", [0, 1])
def test_collectives_of_forked_ranks(facts, rank):
    seen = facts["forked"][rank]
    assert seen["parent's threads"] == 1
    assert seen["backend"] == "gloo"
    assert seen["all_gather"] == [[1.0, 1.0], [2.0] * 6]
    assert seen["reduce_scatter"] == [3.0] * (1 if rank == 0 else 3)
    assert seen["all_to_all"] == ([1.0, 2.0] if rank == 0 else [1.0, 1.0, 2.0, 2.0])
    assert seen["bf16"] == [3.0]
    assert seen["coalesced"] == [[3.0, 3.0], [3.0]]
    assert "undefined with NCCL" in seen["coalesced twice"]
    assert seen["changed meanwhile"] == [2.0, 2.0]


@pytest.mark.parametrize("rank", [0, 1])
def test_reducing_leaves_the_inputs_alone(facts, rank):
    """Gloo's own reduce writes partial sums into the buffers of the other ranks."""
    value = float(rank + 1)
    assert facts["forked"][rank]["inputs kept"] == [[value], [value] * 3]


def test_too_late_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(TTraceError, match=r"call megatron_ttrace.enable\(\) before importing"):
        cpu.activate()


@pytest.mark.parametrize(
    ("device", "has_cuda", "expected"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("cpu", True, True),
        ("cuda", False, False),
    ],
)
def test_needed(monkeypatch, device, has_cuda, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    assert cpu.needed(device) is expected
