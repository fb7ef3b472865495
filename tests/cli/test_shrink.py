# SPDX-License-Identifier: Apache-2.0
"""``ttrace shrink`` prints what becomes of a command; bad commands are one line."""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_ttrace.cli import training
from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.saved import api
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Result, Summary

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"
LARGE = (
    "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 8 --context-parallel-size 4 "
    "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 8192 "
    "--max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 1536 --bf16 "
    "--transformer-impl transformer_engine --load checkpoints --train-iters 10 --lr 1e-4"
)
COMMAND = ["torchrun", "--nproc-per-node", "8", "--nnodes", "128", str(SCRIPT), *LARGE.split()]


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """A data set that is there already, so that Megatron is not imported to write it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "text.idx").touch()
    (tmp_path / "text.bin").touch()
    return tmp_path / "text"


def test_the_table(data, capsys):
    """Flag, was, is, why within 80 columns; what is lost; commands that a shell takes."""
    assert main(["shrink", "--data", str(data), "--", *COMMAND]) == 0
    out = capsys.readouterr().out
    table, *commands = out.split("\n\n")
    assert re.search(r"^ranks +1024 +8 ", table, re.MULTILINE)
    assert re.search(r"^--hidden-size +12288 +64 ", table, re.MULTILINE)
    assert "not kept: --load" in table
    assert max(map(len, table.splitlines())) <= 80
    assert len(commands) == 5
    for command in commands:
        words = shlex.split(command.replace("\\\n", " "), comments=True)
        assert words[:3] == ["ttrace", "check", "--nproc-per-node"]
        assert words[5] == str(SCRIPT)
        assert words[words.index("--data-path") + 1] == str(data)


def test_a_very_long_flag(data, capsys):
    """It is broken at a hyphen, so that the reasons keep their width."""
    flag = "--microbatch-group-size-per-virtual-pipeline-stage"
    more = ("--num-layers-per-virtual-pipeline-stage", "1", flag, "16")
    assert main(["shrink", "--data", str(data), "--", *COMMAND, *more]) == 0
    table = capsys.readouterr().out
    assert re.search(r"^--microbatch-group-size-per-virtual-  +16 +3 +\w+", table, re.MULTILINE)
    assert re.search(r"^pipeline-stage  ", table, re.MULTILINE)
    assert re.search(r"  microbatches( |$)", table, re.MULTILINE)


def test_json(data, capsys):
    """The same for machines."""
    assert main(["shrink", "--json", "--max-ranks", "16", "--data", str(data), "--", *COMMAND]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [job["ranks"] for job in answer["jobs"]] == [16, 4, 4, 2]
    assert ["--hidden-size", "12288", "64", "rows of a few blocks"] in answer["changes"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no script given: ttrace shrink -- torchrun"),
        (["--", "ls"], "no training script in this command"),
        (["--recipe", "x.yaml", "--", "x.py"], "give one of them"),
        (["--recipe", "x.yaml"], "x.yaml cannot be read"),
        (["--max-ranks", "2", "--", *COMMAND], "does not fit 2 ranks"),
        (["--", "bash", "absent.sh"], "absent.sh: no such script"),
        (["--", "python", "absent.py"], "absent.py: no such script"),
    ],
)
@pytest.mark.parametrize("command", ["shrink", "check"])
def test_bad_input(capsys, command, words, message):
    """One line that says what to do."""
    more = ["--shrink", "--quiet"] if command == "check" else []
    assert main([command, *more, *words]) == 2
    error = capsys.readouterr().err
    assert message.replace("shrink", command) in error
    assert len(error.splitlines()) == 1


@pytest.mark.parametrize(("verdict", "code"), [(Result.EQUIVALENT, 2), (Result.DIVERGED, 1)])
def test_one_of_several_jobs_that_cannot_be_checked(monkeypatch, capsys, verdict, code):
    """The others are checked and shown all the same; the worst answer counts."""
    checked = []

    def check(small, how, say, **more):
        checked.append(how.directory.name)
        if how.directory.name == "2":
            raise TTraceError("a rank died")
        summary = Summary(verdict, {}, (), {}, {}, {}, ())
        return api.Report(summary=summary, verdicts=(), directory=how.directory)

    monkeypatch.setattr(training, "check", check)
    monkeypatch.setattr(documents, "write", lambda *words: None)
    assert main(["check", "--shrink", "--no-fork", "--quiet", "--", *COMMAND]) == code
    shown = capsys.readouterr()
    assert checked == ["1", "2", "3", "4", "5"]
    assert shown.out.count(f"ttrace  {verdict}") == 4
    counts = shown.out.rpartition("jobs       5: ")[2].strip().split(", ")
    assert {*counts} == {f"4 {verdict}", "1 could not check"}
    assert "ttrace: job 2 of 5: a rank died" in shown.err


def test_this_directory(data, monkeypatch, capsys):
    """The data of small jobs have a place beside any --ttrace-dir."""
    prefixes = []
    monkeypatch.setattr(documents, "write", lambda prefix, words: prefixes.append(prefix))
    how = ["check", "--shrink", "--no-fork", "--quiet", "--ttrace-dir", "."]
    monkeypatch.setattr(training, "check", lambda *words, **more: refuse())

    def refuse():
        raise TTraceError("a rank died")

    assert main([*how, "--", *COMMAND]) == 2
    assert capsys.readouterr().err.startswith("ttrace: all 5 jobs: a rank died")
    assert prefixes == [Path(".-data/shrunk-text")]


def test_a_command_for_several_machines_is_not_started_here(capsys):
    """Nor silently made smaller."""
    assert main(["check", "--quiet", "--", *COMMAND]) == 2
    assert "for 128 machines: add --shrink" in capsys.readouterr().err
