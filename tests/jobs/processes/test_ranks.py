# SPDX-License-Identifier: Apache-2.0
"""Ranks are started, watched, and ended; tiny scripts instead of training."""

import os
import signal
import sys
import time

import pytest

from megatron_ttrace.jobs.processes import forkserver, ranks
from megatron_ttrace.jobs.processes.ranks import log_of, run_ranks
from megatron_ttrace.trace import owned


@pytest.fixture(autouse=True)
def long_grace(monkeypatch):
    """A slow machine ends no rank: a long grace time."""
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 30.0)


@pytest.fixture
def short_grace(long_grace, monkeypatch):
    """A short grace time, for ranks that hang."""
    monkeypatch.setattr(ranks, "_GRACE_SECONDS", 0.2)


def run(tmp_path, code, nproc=2, **others):
    """Exit codes of ranks that run ``code`` with ``rank`` set."""
    script = tmp_path / "script.py"
    script.write_text(f"import os, signal, sys, time\nrank = int(os.environ['RANK'])\n{code}\n")
    command = [sys.executable, "-S", str(script), "an argument"]
    return run_ranks(nproc, command, tmp_path / "logs", fork=False, **others).codes


def log(tmp_path, rank):
    """The output of a rank."""
    return log_of(tmp_path / "logs", rank).read_text()


def test_no_exit_code_is_lost(tmp_path):
    """A rank that ends before the next is started keeps its code; they are in order of ranks."""
    for delay in (0.0, 0.05):
        code = f"time.sleep({delay} * (4 - rank)); os._exit(rank + 1)"
        assert run(tmp_path, code, nproc=4) == [1, 2, 3, 4]


def test_every_rank_knows_its_place(tmp_path, monkeypatch):
    """torchrun's variables, one port, the arguments, our additions, and the user's environment."""
    monkeypatch.setenv("OF_THE_USER", "kept")
    names = "NAMES = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE ADDED OF_THE_USER'.split()\n"
    code = "print(*[os.environ[n] for n in NAMES], sys.argv[1])\n"
    code += "print(os.environ['MASTER_ADDR'], os.environ['MASTER_PORT'])"
    assert run(tmp_path, names + code, environment={"ADDED": "yes"}) == [0, 0]
    (first, place), (second, same) = (log(tmp_path, rank).splitlines() for rank in (0, 1))
    assert first == "0 0 2 2 yes kept an argument"
    assert second == "1 1 2 2 yes kept an argument"
    assert place == same
    assert int(place.split()[1]) > 1023


def test_ranks_on_two_machines(tmp_path):
    """So it seems: a rank's number is not the one on its machine."""
    names = "NAMES = 'RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE'.split()\n"
    run(tmp_path, names + "print(*[os.environ[n] for n in NAMES])", nproc=4, nodes=2)
    assert [log(tmp_path, rank) for rank in (1, 2)] == ["1 1 4 2\n", "2 0 4 2\n"]


@pytest.mark.parametrize(
    ("end", "code"),
    [("sys.exit(7)", 7), ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV)],
)
def test_a_rank_that_dies_ends_the_others(tmp_path, short_grace, end, code):
    """Ranks that wait for a dead one are killed and have no code; a signal's is negative."""
    text = f"{end} if rank == 1 else time.sleep(3600)"
    assert run(tmp_path, text, nproc=3) == [None, code, None]


def test_survivors_may_end_by_themselves(tmp_path):
    """Ranks that end within the grace time keep their code."""
    code = "sys.exit(7) if rank == 1 else (time.sleep(0.3), sys.exit(5))"
    assert run(tmp_path, code) == [5, 7]


def test_a_rank_that_hangs_when_the_others_are_done_is_ended(tmp_path, short_grace):
    """If one rank ends early, the others are killed after a while."""
    assert run(tmp_path, "time.sleep(3600) if rank == 1 else None") == [0, None]


def test_nothing_survives_the_job(tmp_path, short_grace):
    """The children of ranks are killed with the job, also those of a rank that ended."""
    code = (
        "import subprocess\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(3600)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(3600) if rank == 0 else None\n"
        "logs = os.path.join(os.path.dirname(sys.argv[0]), 'logs')\n"
        "while not os.path.getsize(os.path.join(logs, 'rank-00000.log')): time.sleep(0.02)\n"
        "sys.exit(3)"
    )
    assert run(tmp_path, code) == [None, 3]
    for rank in range(2):
        assert gone(int(log(tmp_path, rank)))


def gone(pid):
    """Whether a process ends within a minute."""
    for _ in range(1200):
        if not alive(pid):
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    """Whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_an_interrupted_job_leaves_no_ranks(tmp_path):
    """Ctrl-C (here: an error in the progress callback) kills all ranks."""
    calls = []

    def progress():
        calls.append(1)
        if len(calls) > 20 and (tmp_path / "logs" / "rank-00001.log").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "print(os.getpid(), flush=True); time.sleep(3600)", progress=progress)
    assert not alive(int(log(tmp_path, 1)))


def test_output_of_both_streams_is_kept(tmp_path):
    """A traceback is written to the rank's log; an old log is overwritten."""
    owned.make(tmp_path / "logs")
    owned.write(log_of(tmp_path / "logs", 0), ["of an earlier run\n"])
    assert run(tmp_path, "print('out'); raise ValueError('err')", nproc=1) == [1]
    text = log(tmp_path, 0)
    assert "out" in text
    assert text.rstrip().endswith("ValueError: err")
    assert "earlier" not in text


@pytest.mark.parametrize(
    ("codes", "answer"), [(["0", "0"], 0), (["3", "hang"], 3), (["hang", "4"], 4)], ids=str
)
def test_a_reference_on_two_ranks(tmp_path, monkeypatch, short_grace, codes, answer):
    """It ends when both have; if one fails the other is ended, and its code is the answer."""

    def fork(command, environment, log):
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.environ.update(environment)
            if command == ["rank"]:
                both = [({"CODE": text}, tmp_path / f"{n}.log") for n, text in enumerate(codes)]
                code, number = forkserver.request_ranks(["reference"], both)
                (tmp_path / "number").write_text(str(number))
            elif environment["CODE"] == "hang":
                time.sleep(3600)
            else:
                code = int(environment["CODE"])
        finally:
            os._exit(code)

    monkeypatch.setattr(forkserver, "fork", fork)
    assert run_ranks(1, ["rank"], tmp_path / "logs", fork=True).codes == [answer]
    number = codes.index(str(answer))
    assert (tmp_path / "number").read_text() == str(number)
