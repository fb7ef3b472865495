# SPDX-License-Identifier: Apache-2.0
"""The runs that are made from one training command."""

import dataclasses
from pathlib import Path

import pytest

from megatron_ttrace.jobs.restarts import AFTER, CHECKPOINT, Plan, elsewhere, plan
from megatron_ttrace.trace.errors import TTraceError

HOME = Path("/home/resume")
JOB = ("--tensor-model-parallel-size", "2", "--train-iters", "100", "--bf16")


def made(*words: str, into: tuple[str, ...] = (), steps: int = 3) -> Plan:
    """The runs of a job with some more flags."""
    return plan((*JOB, *words), 2, steps, into, HOME)


def test_where_it_saves() -> None:
    """In our folder, whatever the job says; options that have no effect are named."""
    logging = ("--tensorboard-dir", "/data/tb")
    runs = made("--save", "/data/mine", "--save-interval", "500", *logging)
    words = runs.uninterrupted.arguments
    assert words == (*JOB, *logging, "--save", f"{HOME}/{CHECKPOINT}", "--save-interval", "3")
    assert (runs.uninterrupted.order.steps, runs.uninterrupted.order.save_after) == (3 + AFTER, 3)
    assert any("--tensorboard-dir" in notice for notice in runs.notices)


def test_where_it_restarts(tmp_path: Path) -> None:
    """From our folder, without saving; the uninterrupted run keeps a start from a checkpoint."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("97")
    runs = made("--load", str(tmp_path), "--ckpt-step", "97", "--finetune", "--no-load-optim")
    assert str(tmp_path) in runs.uninterrupted.arguments
    again = runs.restarted.arguments
    assert again == (*JOB, "--no-load-optim", "--load", f"{HOME}/{CHECKPOINT}")
    assert runs.perturbed.arguments == again
    assert runs.perturbed.order.seed
    assert runs.restarted.order.seed == runs.restarted.order.save_after == 0


def test_a_first_start(tmp_path: Path) -> None:
    """A job that loads what it will save starts without it."""
    runs = made("--load", str(tmp_path))
    assert "--load" not in runs.uninterrupted.arguments
    assert any(str(tmp_path) in notice for notice in runs.notices)


@pytest.mark.parametrize(("steps", "iterations"), [(3, "100"), (200, "202")])
def test_a_short_job(steps: int, iterations: str) -> None:
    """It trains long enough; otherwise its schedule is not touched."""
    runs = made(steps=steps)
    for run in (runs.uninterrupted, runs.restarted):
        at = len(run.arguments) - 1 - run.arguments[::-1].index("--train-iters")
        assert run.arguments[at + 1] == iterations
    assert bool(runs.notices) == (iterations != "100")


def test_longer_than_its_checkpoint(tmp_path: Path) -> None:
    """Steps count from the iteration that the job starts from."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("97")
    runs = made("--load", str(tmp_path))
    words = runs.uninterrupted.arguments
    assert words[-7:-5] == ("--train-iters", "102")
    # Megatron would refuse the schedules of a shorter job; those of the restarts must be restored.
    assert words[-1] == "--override-opt_param-scheduler"
    assert words[-1] not in runs.restarted.arguments


@pytest.mark.parametrize("nproc", ["--nproc-per-node 4", "--nproc-per-node=4"])
def test_other_layouts(nproc: str) -> None:
    """Their flags come last; ranks are ours; the vocabulary is padded as before."""
    flags = f"{nproc} --tensor-model-parallel-size 1"
    (run,) = made(into=(flags,)).into
    padding = ("--make-vocab-size-divisible-by", "256")
    assert (run.nproc, run.layout) == (4, flags)
    assert run.arguments[-4:] == ("--tensor-model-parallel-size", "1", *padding)


def test_the_layout_of_the_checkpoint() -> None:
    """With it Megatron would not restart in another layout."""
    flag = "--use-mp-args-from-checkpoint-args"
    assert flag in made(flag).restarted.arguments
    with pytest.raises(TTraceError, match=f"{flag}: the checkpoint has the layout"):
        made(flag, into=("--pipeline-model-parallel-size 2",))


@pytest.mark.parametrize("nproc", [1, 2])
def test_on_one_device(nproc: int) -> None:
    """All sizes of the job's layout are one; a job on one device has no other."""
    runs = made(into=("--pipeline-model-parallel-size 2",))
    restarted = dataclasses.replace(runs.restarted, nproc=nproc)
    run = elsewhere(dataclasses.replace(runs, restarted=restarted))
    assert (run is None) is (nproc == 1)
    if run is not None:
        assert (run.nproc, run.layout) == (1, "--nproc-per-node 1 --tensor-model-parallel-size 1")
        assert run.arguments[: len(runs.restarted.arguments)] == runs.restarted.arguments
        # Each run has a directory of its own.
        assert run.name != runs.into[0].name


@pytest.mark.parametrize("flags", ["dp 2", "--nproc-per-node many", "'", "--ttrace-seeds 3"])
def test_no_layout(flags: str) -> None:
    """One line for what is none."""
    with pytest.raises(TTraceError, match="--into"):
        made(into=(flags,))
