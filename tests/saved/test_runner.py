# SPDX-License-Identifier: Apache-2.0
"""The runner of small jobs, without running one."""

import dataclasses
import functools
import json
import os
import signal
import time

import pytest

from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs import provenance
from megatron_ttrace.jobs.processes import forkserver
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.saved.runner import Case, Runner
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Result, Summary


def answer(job, fork, result=Result.EQUIVALENT):
    """The summary of a job that was not run."""
    return Summary(result, {}, (), {"fork": fork}, {}, {}, notices=("too few tensors",))


def test_a_case_without_an_answer(asked, tmp_path, monkeypatch):
    """The reason is the report's own."""
    undecided = functools.partial(answer, result=Result.COULD_NOT_CHECK)
    monkeypatch.setattr(jobs, "run", lambda job, *, fork, say: undecided(job, fork))
    with pytest.raises(TTraceError, match=r"^too few tensors$"):
        Runner(tmp_path).run(Case(name="one", arguments=()))


@pytest.fixture
def asked(monkeypatch):
    """Calls to ``prepare``; no process is started."""
    calls = []

    def prepare(device, script):
        calls.append((device, script))
        return True

    monkeypatch.setattr(jobs, "prepare", prepare)
    monkeypatch.setattr(jobs, "run", lambda job, *, fork, say: answer(job, fork))
    return calls


def test_a_case_becomes_a_job(asked, tmp_path):
    """Its own flags and environment come after the runner's; references are shared."""
    runner = Runner(tmp_path, flags=("--ttrace-device", "cpu", "--ttrace-isolate"))
    case = Case(
        name="one",
        arguments=("--x", "1"),
        nproc=2,
        flags=("--ttrace-seeds", "2"),
        environment={"K": "v"},
        limit=3,
    )
    checked = runner.run(case)
    [(device, script)] = asked
    assert (device, script.name) == ("cpu", "pretrain_gpt.py")
    assert checked.summary.config == {"fork": True}
    environment = dict(checked.job.environment)
    assert json.loads(environment.pop(provenance.COMMAND)) == checked.job.checking()
    assert dataclasses.replace(checked.job, environment=environment) == jobs.Job(
        script=script,
        arguments=("--x", "1"),
        nproc=2,
        settings=Settings(directory=tmp_path / "one", device="cpu", isolate=True, seeds=2),
        environment={"TTRACE_CACHE": str(tmp_path / "references"), "K": "v"},
        limit=3,
    )


def test_a_script_of_its_own(asked, tmp_path):
    """A case's script wins over the runner's."""
    runner = Runner(tmp_path, script=tmp_path / "mine.py")
    assert asked[0][1] == tmp_path / "mine.py"
    assert runner.job(Case(name="a", arguments=())).script == tmp_path / "mine.py"
    other = runner.job(Case(name="a", arguments=(), script=tmp_path / "other.py"))
    assert other.script == tmp_path / "other.py"


@pytest.fixture
def two_cores(asked, monkeypatch):
    """A machine where two jobs run at a time."""
    monkeypatch.setattr(forkserver, "needs_cpu", lambda device: True)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})


def test_several_at_a_time(two_cores, tmp_path, monkeypatch):
    """Each of two waits for the other; answers, and reasons for none, come in order."""

    def run(job, *, fork, say):
        mine = job.directory.with_suffix(".began")
        mine.touch()
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("*.began"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        if job.directory.name == "a":
            time.sleep(0.2)
            raise TTraceError("no answer")
        return answer(job, os.getpid())

    monkeypatch.setattr(jobs, "run", run)
    names = ["a", "b", "c"]
    ended = [*Runner(tmp_path).run_all([Case(name=name, arguments=()) for name in names])]
    assert [end.case.name for end in ended] == names
    assert [end.reason for end in ended] == ["no answer", "", ""]
    assert ended[0].checked is None
    assert os.getpid() not in {end.checked.summary.config["fork"] for end in ended[1:]}
    assert ended[1].seconds < 10


def test_a_worker_that_is_killed(two_cores, tmp_path, monkeypatch):
    """One line; nobody waits for what another one does."""

    def run(job, *, fork, say):
        if job.directory.name == "b":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    monkeypatch.setattr(jobs, "run", run)
    cases = [Case(name=name, arguments=()) for name in "ab"]
    with pytest.raises(TTraceError, match="was killed"):
        list(Runner(tmp_path).run_all(cases))
