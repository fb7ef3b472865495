# SPDX-License-Identifier: Apache-2.0
"""One answer, or one reason from many logs."""

import dataclasses
import errno
import json
import os
import re
import resource
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from megatron_ttrace.cli.main import build_parser
from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.jobs.job import Job
from megatron_ttrace.jobs.processes import ranks
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError
from megatron_ttrace.jobs.settings import Settings, settings_of, split
from megatron_ttrace.trace import codec, ends, files, owned
from megatron_ttrace.trace.ends import EndRecord, Frame
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Result

TRACEBACK = """\
some output
Traceback (most recent call last):
  File "arguments.py", line 1, in validate_args
    assert args.world_size % total == 0
AssertionError: world size (2) is not divisible by 3
"""


def ended(tmp_path, *codes):
    """Ranks that ended in this order; without a code those that we ended."""
    ends = [
        ranks.End(rank, code, rank + 1, ranks.log_of(tmp_path, rank))
        for rank, code in enumerate(codes)
        if code is not None
    ]
    return ranks.Observed(len(codes), ends)


def why(tmp_path, codes, *logs, step=1):
    """The reason for these exit codes and logs; the first log was written first, or last."""
    for rank, text in enumerate(logs):
        log = ranks.log_of(tmp_path, rank)
        log.write_text(text)
        os.utime(log, ns=2 * (9 + step * rank,))
    return jobs._why(ended(tmp_path, *codes), tmp_path)


def leave(tmp_path, rank, at, message, **more):
    """The record of a rank that failed at a time; one without an exception's type is ours."""
    record = EndRecord(code=2, at=at, message=message, **more)
    file = ends.file_of(ranks.log_of(tmp_path, rank))
    file.write_text(json.dumps(codec.encode(record)))


@pytest.mark.parametrize("needs_cpu", [True, False])
def test_a_library_that_does_not_load(monkeypatch, needs_cpu):
    """With a GPU each rank says so in its log; without one, ranks cannot run."""

    def fails(*_, **options):
        assert options["on_cpu"] is needs_cpu
        raise OSError("undefined symbol")

    monkeypatch.setattr(jobs.forkserver, "needs_cpu", lambda device: needs_cpu)
    monkeypatch.setattr(jobs.forkserver, "preload", fails)
    if needs_cpu:
        with pytest.raises(OSError, match="symbol"):
            jobs.prepare()
    else:
        assert jobs.prepare() is False


@pytest.mark.parametrize(
    ("imports", "unused", "forks"),
    [(False, True, True), (False, False, False), (True, True, False)],
)
def test_ranks_on_gpus_are_forked(monkeypatch, imports, unused, forks):
    """Unless an import uses the GPU; then nothing is imported if that is known before."""
    preloaded = []
    monkeypatch.setattr(jobs.forkserver, "needs_cpu", lambda device: False)
    monkeypatch.setattr(jobs.forkserver, "imports_use_gpu", lambda: imports)
    monkeypatch.setattr(jobs.forkserver, "is_gpu_unused", lambda: unused)
    monkeypatch.setattr(jobs.forkserver, "preload", lambda *_, **more: preloaded.append(more))
    assert jobs.prepare() is forks
    assert len(preloaded) == (not imports)


def test_what_a_rank_reports(tmp_path):
    """A rank that could not check leaves the reason, with details in further lines."""
    leave(tmp_path, 0, 1, "it failed: do this\n  a detail")
    reason = why(tmp_path, [2, 1], "ttrace: making the reference\nttrace: tracing\n", TRACEBACK)
    assert reason == "it failed: do this\n  a detail"


def test_a_line_of_ours_is_no_reason(tmp_path):
    """Ranks that end with exit code 2 and no record: the log is shown, and not interpreted."""
    reason = why(tmp_path, [2, 2], "ttrace: building the model\n", "")
    assert reason.startswith(("rank 1 failed with exit code 2", "rank 0 failed"))


def test_a_crash_before_a_lost_connection(tmp_path):
    """A rank that crashed is the cause; the one that then lost its connection is not."""
    leave(tmp_path, 1, 1, "lost the connection to the store", follows=True)
    leave(tmp_path, 0, 2, "heads do not divide", error="AssertionError")
    reason = why(tmp_path, [1, 2], "", "")
    assert reason.startswith("rank 0 failed: AssertionError: heads do not divide (log: ")


def test_the_first_of_several_failures(tmp_path):
    """Both failed by themselves: the first in time, with its place and a known finding."""
    leave(tmp_path, 0, 2, "second", error="ValueError")
    place = Frame("megatron/training/training.py", 7, "train")
    known = {"finding": 32, "advice": "add --eval-interval 1000"}
    leave(tmp_path, 1, 1, "first", error="TypeError", frames=(place,), **known)
    assert why(tmp_path, [1, 1], "", "") == (
        "rank 1 failed: TypeError: first, at megatron/training/training.py:7 in train "
        "[finding 32 of docs/findings.md: add --eval-interval 1000] "
        f"(log: {ranks.log_of(tmp_path, 1)})"
    )


def test_what_is_printed_after_an_exception(tmp_path):
    """The exception that ended the rank, not one that Python ignored while it ended."""
    code = (
        "class Index:\n"
        "    def __init__(self, path):\n"
        "        raise FileNotFoundError(f'no {path}.idx')\n"
        "    def __del__(self):\n"
        "        self.file\n"
        "Index('text')\n"
    )
    with pytest.raises(TTraceError) as caught:
        jobs.run(job(tmp_path, code), fork=False)
    script = tmp_path / "train.py"
    log = ranks.log_of(tmp_path / "out" / "logs", 0)
    assert "Exception ignored" in log.read_text()
    assert str(caught.value) == (
        f"rank 0 failed: FileNotFoundError: no text.idx, at {script}:3 in __init__ (log: {log})"
    )


def test_a_rank_that_never_stops_printing(tmp_path):
    """Its log is read from the end: the launcher needs no memory for it."""
    code = "import os\nprint('x' * 100, flush=True)\nos.truncate(1, 1 << 29)\nos.lseek(1, 0, 2)\n"
    code += "print('\\nRuntimeError: last words', flush=True)\nos._exit(3)\n"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TTraceError, match="RuntimeError: last words"):
        jobs.run(job(tmp_path, code), fork=False)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10  # KiB


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (TRACEBACK, "AssertionError: world size (2) is not divisible by 3 (log: "),
        (
            "torch.distributed.DistBackendError: no route\nmore output of a thread\n",
            "torch.distributed.DistBackendError: no route (log: ",
        ),
        # torch writes the rank before each line of a traceback.
        ("output\n[rank7]: AssertionError: no heads\nmore\n", "AssertionError: no heads (log: "),
        ("SystemExit: 3\n", "SystemExit: 3 (log: "),
    ],
)
def test_the_last_exception_of_a_log(tmp_path, log, reason):
    """Of any rank and module; and where to read more."""
    assert why(tmp_path, [1, None], log, "").startswith(f"rank 0 failed: {reason}{tmp_path}")


def test_the_first_to_die_is_the_cause(tmp_path):
    """Rank 0 lost its connection because rank 1 died first."""
    logs = "RuntimeError: Connection closed by peer\n", "AssertionError: heads do not divide\n"
    reason = why(tmp_path, [1, 1], *logs, step=-1)
    assert reason.startswith("rank 1 failed: AssertionError: heads do not divide")


def test_killed_without_last_words(tmp_path):
    """A signal, with the tail of the log."""
    reason = why(tmp_path, [-signal.SIGKILL, None], "step 1\nstep 2\n", "")
    assert reason.startswith(
        "rank 0 was killed by signal 9 (SIGKILL, out of memory?); its last lines"
    )
    assert "step 2" in reason


@pytest.mark.parametrize("crash_first", [True, False])
def test_a_crash_and_who_lost_it(tmp_path, crash_first):
    """A rank that lost its connection to a crashed one is not the cause; an earlier failure is."""
    ranks.log_of(tmp_path, 0).write_text("step 1\n")
    leave(tmp_path, 1, 0, "rank 1: lost the connection", follows=crash_first)
    observed = ended(tmp_path, -signal.SIGSEGV, 2)
    if not crash_first:
        observed.ends.reverse()
    reason = jobs._why(observed, tmp_path)
    crashed = "rank 0 was killed by signal 11 (SIGSEGV)"
    assert reason.startswith(crashed if crash_first else "rank 1: lost the connection")


@pytest.mark.parametrize("name", ["open", "write"])
def test_a_log_without_room(tmp_path, monkeypatch, name):
    """The reason of a rank that could not write to its log, or make a record beside it."""
    os.close(owned.create(ranks.log_of(tmp_path, 0)))
    function = getattr(os, name)

    def full(where, what, *more, **options):
        if name == "write" or what & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.ENOSPC, "No space left on device")
        return function(where, what, *more, **options)

    monkeypatch.setattr(os, name, full)
    reason = jobs._why(ended(tmp_path, 1), tmp_path)
    assert reason.startswith("rank 0 failed with exit code 1: ")
    assert reason.endswith("cannot be written (No space left on device)")


def test_a_log_with_room(tmp_path):
    """The test for space changes no log."""
    log = ranks.log_of(tmp_path, 0)
    assert why(tmp_path, [1], "step 1\n").endswith("step 1")
    assert log.read_text() == "step 1\n"


def test_no_log_at_all(tmp_path):
    """There is a reason even without a log."""
    assert jobs._why(ended(tmp_path, 3), tmp_path).startswith("rank 0 failed with exit code 3")
    assert jobs._why(ended(tmp_path, 0, 0), tmp_path).startswith("the job ended without a result")


ANSWER = """
import os, pathlib, sys
from megatron_ttrace.jobs import argv
words = argv.words()
assert "--ttrace" in words and "--ttrace-exit" in words and "--ttrace" not in sys.argv
directory = pathlib.Path(words[words.index("--ttrace-dir") + 1])
print("ttrace: measuring", flush=True)
from megatron_ttrace.trace.records import Result, Summary
from megatron_ttrace.trace import files

def answer(result, run=None):
    if sys.argv and os.environ["RANK"] == "0":
        files.write_records(directory / files.VERDICTS, [], run)
        summary = Summary(result, {}, (), {}, {}, {"step": 1.0})
        files.write_summary(directory / files.SUMMARY, summary, run)
"""


def job(tmp_path, code, nproc=1, **settings):
    """A job of a tiny script."""
    script = tmp_path / "train.py"
    script.write_text(code)
    return Job(script, ("--lr", "1"), nproc, Settings(directory=tmp_path / "out", **settings))


@pytest.mark.parametrize(
    ("result", "code"),
    [(Result.EQUIVALENT, 0), (Result.DIVERGED, 1), (Result.COULD_NOT_CHECK, 2)],
)
def test_an_answer(tmp_path, result, code):
    """The summary that the ranks wrote, with the wall time; our lines are echoed."""
    lines = []
    text = f"{ANSWER}\nanswer(Result.{result.name})\nsys.exit({code})"
    summary = jobs.run(job(tmp_path, text, nproc=2), fork=False, say=lines.append)
    assert summary.verdict is result
    assert summary.timings["step"] == 1.0
    assert summary.timings["wall"] > 0
    # A machine with much to do needs a line in between.
    assert [line for line in lines if "so far)" not in line] == ["starting 2 ranks", "measuring"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("answer(Result.EQUIVALENT)\nsys.exit(1)", "exit code 1, but .* says 'equivalent'"),
        ("answer(Result.DIVERGED)", "exit code 0, but .* says 'diverged'"),
        ("answer(Result.COULD_NOT_CHECK)", "exit code 0, but .* says 'could not check'"),
        ("answer(Result.EQUIVALENT, 'f' * 16)", "is of a different run"),
        (
            "answer(Result.EQUIVALENT)\n(directory / files.VERDICTS).write_text('{}')",
            "verdicts.jsonl is damaged",
        ),
        ("(directory / files.SUMMARY).write_text('{')", "is cut off or not JSON"),
    ],
)
def test_an_answer_that_is_not_believed(tmp_path, text, says):
    """Exit codes and the summary of this run must agree; otherwise one line says why."""
    with pytest.raises(TTraceError, match=says) as caught:
        jobs.run(job(tmp_path, f"{ANSWER}\n{text}"), fork=False)
    assert "\n" not in str(caught.value)


def test_two_at_once(tmp_path):
    """The second is refused, and the files of the first are not touched."""
    text = (
        f"{ANSWER}\nimport pathlib, time\n"
        "while not pathlib.Path('go').exists(): time.sleep(0.05)\nanswer(Result.DIVERGED)\n"
        "sys.exit(1)"
    ).replace("'go'", repr(str(tmp_path / "go")))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(jobs.run, job(tmp_path, text), fork=False)
        while not ranks.log_of(tmp_path / "out" / "logs", 0).exists():
            time.sleep(0.05)
        with pytest.raises(TTraceError, match="is in use by another check"):
            jobs.run(job(tmp_path, text), fork=False)
        (tmp_path / "go").write_text("")
        assert first.result().verdict is Result.DIVERGED


def test_an_answer_of_an_earlier_run_is_no_answer(tmp_path):
    """A stale summary is removed before the ranks start."""
    (tmp_path / "out").mkdir()
    owned.write(tmp_path / "out" / files.SUMMARY, ["{}"])
    with pytest.raises(TTraceError, match="the job ended without a result"):
        jobs.run(job(tmp_path, "pass"), fork=False)
    assert not (tmp_path / "out" / files.SUMMARY).exists()


def test_ranks_that_disagree_have_no_answer(tmp_path):
    """One rank says equivalent, the other died with the exit code of diverged."""
    text = "import os, sys; sys.exit(int(os.environ['RANK']))"
    with pytest.raises(TTraceError, match="rank 1 failed with exit code 1"):
        jobs.run(job(tmp_path, text, nproc=2), fork=False)


@pytest.mark.parametrize(
    ("others", "reason"),
    [
        (
            [2, None],
            r"rank 0 ended with exit code 0 .* \(log: .*00.log\); rank 1 failed .* code 2;",
        ),
        ([None, None], "rank 0 ended with exit code 0 before the check was over; .*step 1$"),
        ([0, 0], "the job ended without a result"),
    ],
)
def test_a_rank_that_leaves_as_if_all_was_well(tmp_path, others, reason):
    """What the others say is a consequence."""
    ranks.log_of(tmp_path, 0).write_text("step 1\n")
    said = jobs._without_answer(ended(tmp_path, 0, *others), tmp_path)
    assert re.match(reason, said, re.DOTALL)


def test_bad_input(tmp_path):
    """A missing script, an impossible directory."""
    blocked = job(tmp_path, "pass")
    with pytest.raises(TTraceError, match="no such script"):
        jobs.run(dataclasses.replace(blocked, script=tmp_path / "none.py"), fork=False)
    (tmp_path / "out").write_text("in the way")
    with pytest.raises(TTraceError, match=r"is not writable .*: choose another"):
        jobs.run(blocked, fork=False)


def test_out_of_time(tmp_path):
    """A job that hangs is ended at its limit, and leaves no process behind."""
    sleeps = dataclasses.replace(job(tmp_path, "import time\ntime.sleep(600)\n", 2), limit=2.0)
    with pytest.raises(OutOfTimeError, match="still running after 2 s"):
        jobs.run(sleeps, fork=False)
    commands = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
    assert not [words for words in commands if str(sleeps.script) in words]


def test_the_isolating_command_is_one_that_check_reads():
    """The same job and flags, in a directory of its own."""
    job = Job(Path("a.py"), ("--lr", "1e-3"), 2, Settings(directory=Path("out"), bug="11"))
    program, *words = job.isolating()
    args = build_parser().parse_args(words)
    ours, theirs = split(args.command_words[2:], settings_of(args))
    assert program == "ttrace"
    assert (args.command, args.nproc_per_node) == ("check", 2)
    assert args.command_words[:2] == ["--", "a.py"]
    assert ours == Settings(directory=Path("out-isolated"), isolate=True, bug="11")
    assert theirs == ["--lr", "1e-3"]
