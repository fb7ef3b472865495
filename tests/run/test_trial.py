# SPDX-License-Identifier: Apache-2.0
"""The check of a reference's layout on a shrunk job: which job it is, and what its answers mean."""

import json
import sys
from pathlib import Path

import pytest

from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.run import trial
from megatron_ttrace.trace import codec, ends
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Kind
from tests.run import kept

LARGE = (
    *"pretrain_gpt.py --ttrace --ttrace-bug 01 --ttrace-reference-layout tp=2 --lr 1e-3".split(),
    *"--num-layers 64 --hidden-size 8192 --num-attention-heads 64 --seq-length 4096".split(),
    *"--tensor-model-parallel-size 8 --sequence-parallel --pipeline-model-parallel-size 4".split(),
    *"--num-layers-per-virtual-pipeline-stage 2 --bf16 --vocab-size 512 --mock-data".split(),
)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """What the check was started with; its end is as the test says."""
    process = {"code": 0, "says": ""}

    def run(command, environment, log, timeout):
        process.update(command=command, environment=environment, timeout=timeout)
        log.write_text("ttrace: tracing the step\n")
        if process["says"]:
            record = ends.EndRecord(code=process["code"], at=1, message=process["says"])
            ends.file_of(log).write_text(json.dumps(codec.encode(record)))
        if not process["code"]:
            kept.run(tmp_path / trial.FOLDER, kept.tensors())
        return process["code"]

    monkeypatch.setattr(trial, "run_subprocess", run)
    monkeypatch.setattr(trial.documents, "write", lambda prefix, words: prefix)
    monkeypatch.setattr(sys, "argv", list(LARGE))
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TTRACE_RUN_ID", "TTRACE_FORKSERVER"):
        monkeypatch.setenv(name, "1")
    return process


def checked(directory: Path):
    """Check tensor parallelism over two ranks."""
    settings = Settings(directory=directory, timeout=60.0, reference_args="--no-bias-swiglu-fusion")
    return trial.checked(Layout(tp=2), settings)


def test_the_job(tmp_path, started):
    """The reference's own, shrunk: its layout and arguments, no bug, a fresh environment."""
    assert checked(tmp_path) == ((Kind.OUTPUT, "decoder.layers.*.mlp", 0, (2, 1)),)
    at = started["command"].index("--")
    ours, (script, *job_words) = started["command"][:at], started["command"][at + 1 :]
    arguments = CommandFlags.parse(job_words)
    assert script == "pretrain_gpt.py"
    assert ours[ours.index("--nproc-per-node") + 1] == "2"
    assert "--ttrace-bug" not in ours
    assert arguments.text("tensor_model_parallel_size") == "2"
    assert arguments.text("pipeline_model_parallel_size") == "1"
    for option in ("bf16", "bias_swiglu_fusion"):
        assert arguments.has(option)
    for option in ("sequence_parallel", "num_layers_per_virtual_pipeline_stage"):
        assert not arguments.has(option)
    assert arguments.integer("hidden_size") < 1000
    assert "TTRACE_SHRUNK" in started["environment"]
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TTRACE_RUN_ID", "TTRACE_FORKSERVER"):
        assert name not in started["environment"]


def test_the_job_of_a_model_with_experts(tmp_path, started, monkeypatch):
    """Experts are divided along one axis, and dispatched in a way that a CPU can follow."""
    experts = "--num-experts 8 --moe-token-dispatcher-type flex --expert-tensor-parallel-size 8"
    monkeypatch.setattr(sys, "argv", [*LARGE, *experts.split()])
    trial.checked(Layout(tp=2, ep=2), Settings(directory=tmp_path, timeout=60.0))
    arguments = CommandFlags.parse(started["command"][started["command"].index("--") + 2 :])
    assert arguments.text("moe_token_dispatcher_type") == "alltoall"
    assert arguments.has("sequence_parallel")
    sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
    assert [arguments.integer(size) for size in sizes] == [2, 1]


@pytest.mark.parametrize(
    ("code", "says", "message"),
    [
        (1, "", "not equivalent to one device, so it cannot be a reference"),
        (2, "no space left", "could not be checked on a shrunk job: no space left"),
        (2, "", "could not be checked on a shrunk job: failed with exit code 2"),
        (-9, "", "could not be checked on a shrunk job: was killed by signal 9"),
    ],
)
def test_a_layout_that_is_not_trusted(tmp_path, started, code, says, message):
    """No reference is made."""
    started |= {"code": code, "says": says}
    with pytest.raises(TTraceError, match=message) as caught:
        checked(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_job_that_shrinks_to_another(tmp_path, started, monkeypatch):
    """What the shrunk job does not run was not checked."""
    argv = [*LARGE, "--dataloader-type", "external"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(TTraceError, match="the script's own loader is not known"):
        checked(tmp_path)
    assert "command" not in started
