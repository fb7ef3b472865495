# SPDX-License-Identifier: Apache-2.0
"""A run from a checkpoint: what its ranks loaded is compared with what is stored."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.records import Direction, Kind, LoadedIndex, Verdict
from tests.integration import jobs
from tests.integration.jobs import PP, SCRIPT, TINY, TP, ZERO, torchrun

L = LoadedIndex

SAVED = ("--ckpt-format", "torch_dist", "--train-iters", 1)
SAVING = (*SAVED, "--save", "ck", "--save-interval", 1)
PARTS = ("weight", "bias")
MODEL = ("--bf16", "--swiglu", "--untie-embeddings-and-output-weights")
ALL = {*L} - {L.AGREED, L.WEIGHT, L.BUFFER, L.OTHER}
WEIGHTS = {L.ONE_DEVICE, L.ROUNDED}
MOE = (
    "--disable-bias-linear --num-experts 4 --moe-router-topk 2 --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-router-load-balancing-type none"
).split()
IN_BUCKETS = (*ZERO[:2], "--ddp-bucket-size", 2000)
"""Optimizer state is stored as it is in buckets."""
RESHARDABLE = ("--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable")
EP = ("--expert-model-parallel-size", 2)
GROUPED = (
    *(*MOE, *EP, *IN_BUCKETS, "--moe-grouped-gemm", "--transformer-impl", "transformer_engine"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
BUCKETS = (*RESHARDABLE, "--overlap-grad-reduce", "--ddp-bucket-size", "2000")


def save(cwd: Path, ranks: int, *job: object) -> None:
    """Train one step and save."""
    torchrun(ranks, SCRIPT, *TINY, *MODEL, *SAVING, *job, cwd=cwd, code=0)


def check(cwd: Path, *job: object, **more: object) -> tuple[jobs.Checked, list[Verdict]]:
    """Check the job that goes on; verdicts about what was loaded."""
    again = (*SAVED, "--load", "ck", "--train-iters", 2, "--override-opt_param-scheduler")
    checked = jobs.check(cwd, *MODEL, *again, *job, **more)  # type: ignore[arg-type]
    return checked, [one for one in checked.verdicts if one.kind is Kind.LOADED]


@pytest.mark.nightly
def test_weights_of_other_ranks(tmp_path: Path) -> None:
    """Two wrong descriptions: both modules are culprits."""
    save(tmp_path, 1)
    checked, _ = check(tmp_path, *TP, code=1, mistake="descriptions_of_a_checkpoint")
    wrong = {
        one.name for one in checked.failed if (one.kind, one.index) == (Kind.LOADED, L.ONE_DEVICE)
    }
    assert wrong == {
        "embedding.word_embeddings.weight",
        *(f"decoder.layers.{layer}.mlp.linear_fc1.{part}" for layer in (0, 1) for part in PARTS),
    }
    culprits = checked.summary.culprits
    assert {(one.direction, one.kind) for one in culprits} == {(Direction.START, Kind.LOADED)}
    assert {one.name for one in culprits} == {name.rpartition(".")[0] for name in wrong}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("mistake", "wrong"),
    [("", set()), ("descriptions_of_a_checkpoint", {"word_embeddings", "linear_fc1"})],
)
def test_a_reference_on_several_ranks(tmp_path: Path, mistake: str, wrong: set[str]) -> None:
    """Each of its ranks has the stored values of its own part."""
    save(tmp_path, 2, *MOE, *EP)
    several = ("--ttrace-reference-layout", "ep=2")
    job = (*MOE, *TP, "--sequence-parallel", *EP)
    checked, loaded = check(
        tmp_path, *job, flags=several, nproc=4, mistake=mistake, code=int(bool(mistake))
    )
    failed = {one.name.split(".")[-2] for one in checked.failed if one.kind is Kind.LOADED}
    assert failed == wrong
    assert {one.index for one in loaded} >= {*ALL, L.BUFFER} - {L.NUMBER}


def test_states_that_are_not_loaded(tmp_path: Path) -> None:
    """Main weights, a moment, a router's bias, the schedule: each at its module, and why.

    All else is what is stored, to the bit.
    """
    job = (*MOE, *EP, *IN_BUCKETS)
    save(tmp_path, 2, *job)
    checked, loaded = check(
        tmp_path, *job, code=1, mistake="parts_of_a_checkpoint_that_are_not_loaded"
    )
    layers = "decoder.layers"
    assert {(one.name, one.index) for one in loaded if one.verdict.is_failure} == {
        (f"{layers}.0.self_attention.linear_proj.weight", L.ROUNDED),
        (f"{layers}.0.self_attention.linear_proj.weight", L.MAIN),
        (f"{layers}.1.self_attention.linear_qkv.weight", L.EXP_AVG_SQ),
        (f"{layers}.0.mlp.router.expert_bias", L.BUFFER),
        ("opt_param_scheduler.num_steps", L.NUMBER),
    }
    culprits = {one.name: one for one in checked.summary.culprits}
    assert set(culprits) == {
        f"{layers}.0.self_attention.linear_proj",
        f"{layers}.1.self_attention.linear_qkv",
        f"{layers}.0.mlp.router",
        "opt_param_scheduler",
    }
    assert culprits["opt_param_scheduler"].cause is Cause.NUMBER
    for name, function in {
        f"{layers}.0.self_attention.linear_proj": "Optimizer.sharded_state_dict",
        f"{layers}.0.mlp.router": "Module.sharded_state_dict",
        "opt_param_scheduler": "OptimizerParamScheduler.load_state_dict",
    }.items():
        assert function in culprits[name].where


@pytest.mark.nightly
def test_a_sharded_model(tmp_path: Path) -> None:
    """Weights that torch's FSDP2 divides are handed over, too."""
    fsdp = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion")
    save(tmp_path, 2, *fsdp, "--no-save-optim")
    checked, loaded = check(tmp_path, *fsdp, "--no-load-optim")
    assert not checked.failed
    assert loaded


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("ranks", "saving", "loading", "judged"),
    [
        pytest.param(1, (), TP, ALL, id="tp"),
        pytest.param(1, (), PP, ALL, id="pp"),
        pytest.param(2, (*MOE, *EP, *ZERO), (*MOE, *EP, *ZERO), ALL | {L.BUFFER}, id="ep-buckets"),
        pytest.param(2, GROUPED, GROUPED, ALL | {L.BUFFER}, id="grouped-experts"),
        pytest.param(2, (*IN_BUCKETS, *TP), (*IN_BUCKETS, *TP), ALL, id="tp-buckets"),
        pytest.param(1, ZERO[:1], ZERO, ALL, id="buckets-of-another-dp"),
        pytest.param(2, RESHARDABLE, (*RESHARDABLE, *TP), ALL, id="reshardable"),
        pytest.param(2, (), ("--finetune",), WEIGHTS, id="finetune"),
        pytest.param(2, (), ("--no-load-optim",), WEIGHTS | {L.NUMBER}, id="no-optimizer"),
    ],
)
def test_right_loads(
    tmp_path: Path,
    ranks: int,
    saving: Sequence[object],
    loading: Sequence[object],
    judged: set[LoadedIndex],
) -> None:
    """Of the checkpoint of another layout, or a part of it: all that is loaded passes."""
    save(tmp_path, ranks, *saving)
    checked, loaded = check(tmp_path, *loading)
    assert not checked.failed
    assert {one.index for one in loaded} == judged


@pytest.mark.nightly
def test_main_weights_of_other_places(tmp_path: Path) -> None:
    """Megatron saves shifted main weights (megatron-core 0.19); its weights are right."""
    save(tmp_path, 2, *BUCKETS)
    checked, loaded = check(tmp_path, *BUCKETS, code=1)
    assert {one.index for one in loaded if one.verdict.is_failure} == {L.ROUNDED}
    assert {one.index for one in checked.summary.culprits} == {L.ROUNDED}
