# SPDX-License-Identifier: Apache-2.0
"""``ttrace resume``: a restart from a checkpoint against the run that was not interrupted."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_ttrace.jobs import edited
from megatron_ttrace.trace.executed import Edit, Edits
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.resumed import Blame, Restart, Resumed, What
from tests.assay.planted.checkpoint_faults import Side
from tests.assay.planted.checkpoints import Fault
from tests.assay.planted.mistakes import PLANTED
from tests.integration.jobs import PP, SCRIPT, TINY, TP, TRAIN, check, torchrun, ttrace
from tests.integration.test_loaded import BUCKETS, RESHARDABLE
from tests.trace.test_owned import state_of

MODEL = ("--bf16", "--ckpt-format", "torch_dist")
OPTIMIZER = {What.MAIN, What.EXP_AVG, What.EXP_AVG_SQ}
FSDP = (
    "--use-megatron-fsdp --use-distributed-optimizer --no-gradient-accumulation-fusion "
    "--data-parallel-sharding-strategy optim_grads_params --init-model-with-meta-device "
    "--untie-embeddings-and-output-weights"
).split()
ONE = ("--tensor-model-parallel-size", "1")


def resume(
    cwd: Path, *job: object, into: Sequence[str] = (), code: int = 0, mistake: str = "", **more: str
) -> tuple[Restart, ...]:
    """The answers for all layouts; the command must end with ``code``."""
    layouts = [word for flags in into for word in ("--into", flags)]
    script = TRAIN if mistake else SCRIPT
    done = ttrace(
        *("resume", "--json", "--nproc-per-node", 2, *layouts, "--", script, *TINY, *MODEL, *job),
        cwd=cwd,
        **({PLANTED: mistake} if mistake else {}),
        **more,
        code=code,
    )
    written = json.loads((cwd / "ttrace-resume" / "resume.json").read_text())
    assert written == json.loads(done.stdout)
    return Resumed.from_json(written).restarts


def mine(cwd: Path) -> dict[str, tuple[str, int]]:
    """What a job wrote for its user, and when."""
    home = cwd / "mine"
    if not home.exists():
        home.mkdir()
        for name in ("progress.txt", "rejected"):
            (home / name).write_text("mine")
    return {
        name: (state, (home / name).lstat().st_mtime_ns) for name, state in state_of(home).items()
    }


def writing(cwd: Path) -> tuple[object, ...]:
    """Options of a job that writes."""
    home = cwd / "mine"
    return (
        *("--save", home, "--save-interval", 1, "--log-progress", "--exit-interval", 1),
        *("--tensorboard-dir", home / "events", "--config-logger-dir", home / "configs"),
        *("--result-rejected-tracker-filename", home / "rejected"),
        *("--save-wgrads-interval", 1, "--save-dgrads-interval", 1),
    )


def test_shifted_main_weights(tmp_path: Path) -> None:
    """Megatron saves shifted optimizer state (megatron-core 0.19); the weights are right."""
    before = mine(tmp_path)
    file, name = "megatron/core/optimizer/distrib_optimizer.py", "DistributedOptimizer.state_dict"
    edits = Edits(
        "v1", (Edit(file, name, 5), Edit(file, "DistributedOptimizer.load_state_dict", 6))
    )
    changes = tmp_path / "edits.json"
    changes.write_text(json.dumps(edits.to_json()))
    (found,) = resume(
        tmp_path, *BUCKETS, *writing(tmp_path), code=1, **{edited.GIVEN: str(changes)}
    )
    assert {one.what for one in found.differences} == OPTIMIZER
    assert {one.blame for one in found.differences} == {Blame.SAVING}
    assert all("DistributedOptimizer" in one.where for one in found.differences)
    # The other one runs while it is loaded.
    assert all(one.changed == (f"{file}:5 ({name})",) for one in found.differences)
    assert found.steps[-1].loss[0] != found.steps[-1].loss[1]
    assert mine(tmp_path) == before
    ttrace("clean", "ttrace-resume", "--yes", cwd=tmp_path, code=0)
    left = [path.name for path in (tmp_path / "ttrace-resume").rglob("*")]
    assert all(name.startswith(".ttrace-files") for name in left)


@pytest.mark.nightly
def test_a_healthy_job_in_other_layouts(tmp_path: Path) -> None:
    """Restarts in the same layout, in another one, and on another number of ranks."""
    layouts = [" ".join((*ONE, *PP)), " ".join(("--nproc-per-node 1", *ONE))]
    found = resume(tmp_path, *TP, into=layouts)
    assert [one.verdict for one in found] == [Result.EQUIVALENT] * 3
    assert all(one.compared == one.stored > 50 for one in found)
    assert found[1].steps


@pytest.mark.nightly
@pytest.mark.parametrize(
    "job",
    [
        ("--use-distributed-optimizer",),
        (*RESHARDABLE, "--async-save"),
        (*RESHARDABLE, "--ckpt-fully-parallel-save"),
        ("--use-distributed-optimizer", "--ckpt-format", "torch"),
        (*RESHARDABLE, "--hidden-dropout", "0.1"),
        (*FSDP, "--ckpt-format", "fsdp_dtensor"),
        (*RESHARDABLE, "--overlap-grad-reduce", "--overlap-param-gather"),
    ],
    ids=" ".join,
)
def test_healthy_formats(tmp_path: Path, job: tuple[str, ...]) -> None:
    """Whatever is saved by Megatron as it should be goes on as before."""
    (found,) = resume(tmp_path, *job)
    assert found.verdict is Result.EQUIVALENT


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("side", "mechanism", "what", "job"),
    [
        (Side.LOAD, "lost_moment", What.EXP_AVG_SQ, ("--use-distributed-optimizer",)),
        (Side.SAVE, "shifted", What.EXP_AVG_SQ, TP),
        (Side.SAVE, "lost_step_count", What.NUMBER, TP),
        (Side.LOAD, "lost_random_state", What.RANDOM, (*TP, "--hidden-dropout", "0.1")),
    ],
)
def test_what_megatron_read(
    tmp_path: Path, side: Side, mechanism: str, what: What, job: tuple[str, ...]
) -> None:
    """It distinguishes the sides where nothing is stored as tensors."""
    order = Fault(side, mechanism, 3).order
    (found,) = resume(tmp_path, *job, "--ckpt-format", "torch", code=1, mistake=order)
    blame = Blame.SAVING if side is Side.SAVE else Blame.LOADING
    assert {one.blame for one in found.differences} - {Blame.TRAINING} == {blame}
    assert what in {one.what for one in found.differences}
    assert found.compared == found.stored
    assert not found.notices


@pytest.mark.nightly
def test_shards_in_another_order(tmp_path: Path) -> None:
    """The same layout reads them as they were; one device does not."""
    found = resume(tmp_path, *TP, code=1, mistake="shards_in_another_order")
    assert [one.verdict for one in found] == [Result.EQUIVALENT, Result.DIVERGED]
    assert found[0].otherwise
    assert {one.blame for one in found[1].differences} == {Blame.SAVING}


@pytest.mark.nightly
def test_a_lost_moment_of_buckets(tmp_path: Path) -> None:
    """What is stored is right, also of the embedding, which both stages have in buckets."""
    order = Fault(Side.LOAD, "lost_moment", 3).order
    (found,) = resume(tmp_path, *PP, "--use-distributed-optimizer", code=1, mistake=order)
    assert {one.blame for one in found.differences} == {Blame.LOADING}
    assert What.EXP_AVG_SQ in {one.what for one in found.differences}
    assert found.compared == found.stored


@pytest.mark.nightly
def test_experts(tmp_path: Path) -> None:
    """With the biases of their routers; Megatron does not restore a generator that is not used."""
    experts = (
        "--num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --disable-bias-linear "
        "--transformer-impl transformer_engine --expert-model-parallel-size 2 "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid"
    ).split()
    (found,) = resume(tmp_path, *experts, *RESHARDABLE)
    assert found.verdict is Result.EQUIVALENT
    assert any("expert-parallel-rng" in notice for notice in found.notices)


@pytest.mark.nightly
def test_a_layout_that_megatron_refuses(tmp_path: Path) -> None:
    """It could not be checked, with Megatron's reason; the other layout has its answer."""
    found = resume(tmp_path, "--use-distributed-optimizer", into=[" ".join(TP)], code=2)
    assert [one.verdict for one in found] == [Result.EQUIVALENT, Result.COULD_NOT_CHECK]
    assert "mismatch" in found[1].reason
    assert "\n" not in found[1].reason


@pytest.mark.nightly
def test_the_users_own_files(tmp_path: Path) -> None:
    """A restart and a check from a real checkpoint leave all of it as it was."""
    saving = ("--save", "mine", "--save-interval", 2, "--exit-interval", 2)
    torchrun(2, SCRIPT, *TINY, *MODEL, *TP, *saving, cwd=tmp_path, code=0)
    before = mine(tmp_path)
    job = (*TP, "--load", "mine", *writing(tmp_path))
    (found,) = resume(tmp_path, *job)
    assert (found.verdict, mine(tmp_path)) == (Result.EQUIVALENT, before)
    check(tmp_path, *MODEL, *job)
    after = mine(tmp_path)
    assert {name: after[name] for name in before} == before
    assert all(name.startswith("events") for name in after.keys() - before.keys())
