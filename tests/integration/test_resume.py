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
from tests.integration.jobs import (
    PP,
    ROOT,
    SCRIPT,
    TINY,
    TP,
    TRAIN,
    check,
    python,
    torchrun,
    ttrace,
)
from tests.integration.test_loaded import BUCKETS
from tests.trace.test_owned import state_of

MODEL = ("--bf16", "--ckpt-format", "torch_dist")
OPTIMIZER = {What.MAIN, What.EXP_AVG, What.EXP_AVG_SQ}


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
@pytest.mark.parametrize(
    "name",
    [
        *("tp", "dropout", "fsdp", "experts-deep"),
        *("zero", "zero-async", "zero-torch", "zero-one-writer", "zero-overlap"),
    ],
)
def test_healthy_jobs(tmp_path: Path, name: str) -> None:
    """Whatever Megatron saves as it should goes on as before, in each layout of the job."""
    words = ("-m", "tests.assay", "checkpoints", "healthy", "--only", name)
    python(*words, "--directory", tmp_path, cwd=ROOT, code=0)


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
