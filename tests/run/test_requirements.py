# SPDX-License-Identifier: Apache-2.0
"""Runs that cannot be traced are refused with a reason; notices say how others are checked."""

import argparse
import contextlib
import sys
from pathlib import Path

import pytest
import torch

from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import versions
from megatron_ttrace.run import low_precision, requirements
from megatron_ttrace.trace.errors import TTraceError


@pytest.fixture(autouse=True)
def _job(monkeypatch):
    """A job without options, with a Megatron that has the ramp-up of 0.18."""
    monkeypatch.setattr(requirements.samples, "has_ramp", lambda: True)
    monkeypatch.setattr(sys, "argv", ["x.py"])


def arguments(**values):
    """Megatron's arguments of a plain run."""
    plain = dict.fromkeys(("rampup_batch_size", "load", "num_experts"))
    return argparse.Namespace(**{"train_iters": 9, "global_batch_size": 8, **plain, **values})


EXPERTS = {
    "num_experts": 4,
    "sequence_parallel": True,
    "tensor_model_parallel_size": 2,
    "context_parallel_size": 1,
}
REFUSED = [
    ({"rampup_batch_size": ["2", "2", "8"]}, {"iterations": (2,)}, "--rampup-batch-size"),
    (
        {"step_batch_size_schedule": "0:4 128:8"},
        {"iterations": (1, 2)},
        "--step-batch-size-schedule: only --ttrace-iterations 1",
    ),
    (
        {"use_torch_fsdp2": True, "init_model_with_meta_device": True},
        {},
        "--use-torch-fsdp2 with --init-model-with-meta-device",
    ),
    ({"logits_load_dir": "there"}, {}, "--logits-load-dir"),
    (
        {"linear_cp_layout": "contiguous", "context_parallel_size": 2},
        {},
        "contiguous context-parallel layout",
    ),
    (
        {"decrease_batch_size_if_needed": True, "data_parallel_size": 3, "micro_batch_size": 2},
        {},
        "leaves 2 of its samples out, .* --global-batch-size 6",
    ),
    ({"use_megatron_fsdp": True, "load": "there"}, {}, "--use-megatron-fsdp with --load"),
    (
        {"overlap_moe_expert_parallel_comm": True, "hybrid_layer_pattern": "M*E"},
        {},
        "--overlap-moe-expert-parallel-comm with --hybrid-layer-pattern",
    ),
    ({"fim_data": True, "data_parallel_size": 2}, {}, "--fim-data with data parallelism"),
    ({"cuda_graph_impl": "local"}, {}, "--cuda-graph-impl"),
    (
        {"dataloader_seq_length": 96, "context_parallel_size": 2},
        {},
        "--context-parallel-size in a model of images",
    ),
    ({"train_iters": 1}, {"iterations": (1, 5)}, "--ttrace-iterations 5: .* after iteration 1"),
    ({"exit_interval": 2}, {"iterations": (3,)}, "--ttrace-iterations 3: .* after iteration 2"),
    ({"iteration": 7}, {"iterations": (3,)}, "--ttrace-iterations 3: .* after iteration 2"),
    ({"main_params_dtype": torch.float16}, {}, "--main-params-dtype fp16"),
    ({**EXPERTS, "sft": True, "micro_batch_size": 2}, {}, "packed sequences with experts"),
    (
        {"use_precision_aware_optimizer": True, "load": "there"},
        {},
        "--use-precision-aware-optimizer with --load",
    ),
    ({"use_layer_wise_distributed_optimizer": True, "bf16": False}, {}, "only with --bf16"),
    (
        {**EXPERTS, "moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
        {},
        "--moe-pad-expert-input-to-capacity",
    ),
]


@pytest.mark.parametrize(("values", "ours", "words"), REFUSED)
def test_refused(values, ours, words, monkeypatch):
    """The reason is one line."""
    monkeypatch.setattr(requirements.loading, "directory_of", lambda args: args.load)
    with pytest.raises(TTraceError, match=words) as refused:
        requirements.require(arguments(**values), Settings(**ours))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "is_refused"), [(64, False), (65, True)])
def test_samples_that_a_script_of_images_pads(text, is_refused):
    """For two ranks; an image has 576 tokens."""
    values = {
        "dataloader_seq_length": text,
        "seq_length": 576,
        "decoder_seq_length": 640 + 2 * is_refused,
        "sequence_parallel": True,
    }
    refused = pytest.raises(TTraceError, match="--dataloader-seq-length 65 in a model of images")
    with refused if is_refused else contextlib.nullcontext():
        requirements.require_built(arguments(**values), Settings())


@pytest.mark.parametrize(
    ("spec", "is_refused"),
    [(["no_such.layers", "spec"], True), (["json", "dumps"], False), (["local"], False)],
)
def test_a_spec_that_cannot_be_imported(spec, is_refused):
    """Megatron has only logged an error."""
    refused = pytest.raises(TTraceError, match=r"--spec no_such\.layers spec: No module named")
    with refused if is_refused else contextlib.nullcontext():
        requirements.require_built(arguments(spec=spec), Settings())


ACCEPTED = [
    ({"fim_data": True, "data_parallel_size": 2}, {"exit_after": True}),
    ({"rampup_batch_size": ["2", "2", "8"]}, {}),
    ({"step_batch_size_schedule": "0:4"}, {"iterations": (1, 2)}),
    ({"decrease_batch_size_if_needed": True, "data_parallel_size": 4}, {}),
    ({"use_megatron_fsdp": True}, {}),
    ({"overlap_moe_expert_parallel_comm": True}, {}),
    ({"use_torch_fsdp2": True}, {}),
    ({"load": "there"}, {}),
    ({"load": "there", "use_precision_aware_optimizer": True, "finetune": True}, {}),
    ({"cuda_graph_impl": "none"}, {}),
]


@pytest.mark.parametrize(("values", "ours"), ACCEPTED)
def test_accepted(values, ours, monkeypatch):
    """Similar runs are not refused."""
    monkeypatch.setattr(requirements.loading, "directory_of", lambda args: args.load)
    requirements.require(arguments(**values), Settings(**ours))


ABSENT = [
    ({"load": "there"}, "--load there does not exist"),
    ({"load": "empty"}, "--load empty has no checkpoint"),
    ({"load": "file"}, "--load file is not a directory"),
    ({"load": "full", "ckpt_step": 7}, "has no iteration 7"),
    ({"pretrained_checkpoint": "there"}, "--pretrained-checkpoint there does not exist"),
    ({"load": "first", "pretrained_checkpoint": "there"}, "--pretrained-checkpoint there"),
]


def checkpoints(home):
    """A directory with a checkpoint of iteration 3, one without, and a file."""
    (home / "empty").mkdir()
    (home / "file").touch()
    (home / "full" / "iter_0000003").mkdir(parents=True)
    (home / "full" / "latest_checkpointed_iteration.txt").write_text("3")


@pytest.mark.parametrize(("values", "words"), ABSENT)
def test_an_absent_checkpoint_is_refused(values, words, tmp_path, monkeypatch):
    """Megatron would start from random weights; training that goes on is not refused its check."""
    monkeypatch.chdir(tmp_path)
    checkpoints(tmp_path)
    with pytest.raises(TTraceError, match=words) as refused:
        requirements.require(arguments(**values), Settings(exit_after=True))
    assert "\n" not in str(refused.value)
    requirements.require(arguments(**values), Settings())
    assert len(notices_of_loading(values, Settings())) == 1


def test_an_absent_checkpoint_ends_a_job_that_asks_for_it():
    values = {"load": "/no/such", "exit_on_missing_checkpoint": True}
    with pytest.raises(TTraceError, match="Megatron would end the job: give the directory"):
        requirements.require(arguments(**values), Settings(exit_after=True))


def notices_of_loading(values, chosen):
    """The notices that nothing was loaded; others are about pytest's own options."""
    notices = requirements.notices(arguments(**values), chosen)
    return [notice for notice in notices if notice.startswith("nothing was loaded")]


PRESENT = [
    ({"load": "first", "save": "./first"}, 1),
    ({"load": "full"}, 0),
    ({"load": "full", "ckpt_step": 3}, 0),
    ({"load": "first", "pretrained_checkpoint": "full"}, 0),
    ({"load": "full", "pretrained_checkpoint": "there"}, 0),
    ({"load": "first", "non_persistent_ckpt_type": "local"}, 0),
]


@pytest.mark.parametrize(("values", "notices"), PRESENT)
def test_a_first_start_is_checked(values, notices, tmp_path, monkeypatch):
    """A job that loads what it saves has nothing the first time: there is a notice."""
    monkeypatch.chdir(tmp_path)
    checkpoints(tmp_path)
    requirements.require(arguments(**values), Settings(exit_after=True))
    assert len(notices_of_loading(values, Settings(exit_after=True))) == notices
    directory = requirements.loading.directory_of(arguments(**values))
    assert (directory is not None) == ("full" in values.values())


@pytest.mark.parametrize("asks", [False, True])
def test_low_precision_isolates_and_says_so(asks, monkeypatch):
    """The notice says whether it was requested."""
    monkeypatch.setattr(low_precision.te, "emulated", lambda: True)
    chosen = Settings(isolate=asks)
    assert requirements.isolates(arguments(fp8="hybrid"), chosen)
    assert requirements.notices(arguments(fp8="hybrid"), chosen) == (
        [requirements._ISOLATED] if asks else [low_precision.NOTICE]
    )
    assert requirements.isolates(arguments(), chosen) == asks
    assert requirements.notices(arguments(), chosen) == [requirements._ISOLATED] * asks


def test_a_ramp_that_megatron_ignores(monkeypatch):
    """All its batches are alike, so all can be traced, with a notice."""
    monkeypatch.setattr(requirements.samples, "has_ramp", lambda: False)
    ramp = arguments(rampup_batch_size=["2", "2", "8"])
    requirements.require(ramp, Settings(iterations=(1, 2), role="candidate"))
    assert requirements.growing_batch(ramp) == ("", 0)
    [notice] = requirements.notices(ramp, Settings())
    assert "every batch has 8 samples" in notice


def test_another_megatrons_reference_is_told():
    """There is a notice where another Megatron was allowed."""
    chosen = Settings(reference=Path("there"), allow_other_megatron=True)
    assert len(requirements.notices(arguments(), chosen)) == 1


def test_options_that_nobody_knows_are_told(monkeypatch):
    """A fork's own: the reference has them, too."""
    monkeypatch.setattr(sys, "argv", ["x.py", "--ttrace", "--my-layout=2", "--bf16", "--lr", "-1"])
    monkeypatch.setattr(versions, "megatron_core_version", lambda: "0.19.2")
    (notice,) = requirements.notices(arguments(), Settings())
    assert notice.startswith("--my-layout: not an option of a known Megatron")


def test_a_version_before_its_release_is_told(monkeypatch):
    """With the commit that was tried."""
    monkeypatch.setattr(versions, "megatron_core_version", lambda: "0.20.1")
    (notice,) = requirements.notices(arguments(), Settings())
    assert versions.MAIN_COMMIT in notice
    tried = argparse.Namespace(commit=f"{versions.MAIN_COMMIT}0123")
    monkeypatch.setattr(provenance, "megatron", lambda: tried)
    assert not requirements.notices(arguments(), Settings())


@pytest.mark.parametrize(
    ("values", "ours", "interval"),
    [
        ({"eval_interval": None}, {"exit_after": True}, 1000),
        ({"eval_interval": None}, {"role": "reference"}, 1000),
        ({"eval_interval": None}, {}, None),
        ({"eval_interval": None, "full_validation": True}, {"exit_after": True}, None),
        ({"eval_interval": 7}, {"exit_after": True}, 7),
    ],
)
def test_an_option_that_megatron_crashes_without(values, ours, interval):
    """A check gives it, with a notice; training is left as it is."""
    args = arguments(**values)
    notices = requirements.complete(args, Settings(**ours))
    assert (args.eval_interval, bool(notices)) == (interval, interval == 1000)
