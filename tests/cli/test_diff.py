# SPDX-License-Identifier: Apache-2.0
"""``ttrace diff`` and ``ttrace check --against``: what they are given, and what they answer."""

import json
import os
from pathlib import Path

import pytest

from megatron_ttrace.cli import diff, record, training
from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.settings import Settings, split
from megatron_ttrace.report import wandb
from megatron_ttrace.saved import api
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import Result, Summary
from tests.run import kept

JOB = "pretrain_gpt.py --num-layers 2"


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Runs by hand."""
    monkeypatch.delenv("TTRACE_CACHE", raising=False)
    monkeypatch.chdir(tmp_path)
    kept.run(tmp_path / "one", kept.tensors())
    return tmp_path


def test_two_traces(place, capsys):
    """Equal or not, as text and as JSON."""
    kept.run(place / "same", kept.tensors(), ranks=1)
    kept.run(place / "other", kept.tensors(1))
    assert main(["diff", "one", "same"]) == 0
    assert capsys.readouterr().out.startswith("ttrace  equivalent")
    assert (place / "ttrace-diff" / "report.html").is_file()
    assert main(["diff", "--json", "one", "other"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "diverged"


def test_a_report_does_not_spoil_a_trace(place, monkeypatch, capsys):
    """Beside the candidate is never in it, however it is named."""
    monkeypatch.chdir(place / "one" / "candidate")
    assert main(["compare", "../reference", "."]) == 0
    assert (place / "one" / "report.html").is_file()
    assert main(["compare", "../reference", ".", "--output", "."]) == 2
    assert ". holds a trace: choose another directory" in capsys.readouterr().err
    monkeypatch.chdir(place)
    assert main(["diff", "one", "one", "--directory", "one/candidate"]) == 2
    assert main(["compare", "one/reference", "one/candidate"]) == 0


def test_commands_are_recorded(place, monkeypatch):
    """Each in its folder; the second one's vocabulary is padded like the first one's."""
    asked = []

    def stand_in(text, job, settings, *, quiet=False):
        folder = settings.directory
        asked.append((text.split()[0], folder.name, job.arguments[2:], job.ranks))
        kept.run(folder, kept.tensors())

    monkeypatch.setattr(record, "run_apart", stand_in)
    both = [f"torchrun --nproc-per-node 2 {JOB}", f"torchrun --nproc-per-node 4 {JOB}"]
    both[0] += " --seed 1" * 300
    both[1] += " --tensor-model-parallel-size 4"
    assert main(["diff", "--quiet", *both]) == 0
    padded = ("--make-vocab-size-divisible-by", "64")
    layout = ("--tensor-model-parallel-size", "4")
    first = ("torchrun", "a", ("--seed", "1") * 300, 2)
    assert asked == [first, ("torchrun", "b", (*layout, *padded), 4)]
    asked.clear()
    assert main(["diff", "--quiet", "one", f"{JOB} --tensor-model-parallel-size 2"]) == 0
    assert asked[0][2] == ("--tensor-model-parallel-size", "2")


def test_against_a_command(place, monkeypatch, capsys):
    """It is recorded first, with the same iterations, without the bug and variables of this run."""
    asked = []
    monkeypatch.setenv("NVTE_FUSED_ATTN", "1")

    def stand_in(text, job, settings, *, quiet=False):
        assert os.environ["NVTE_FUSED_ATTN"] == "1"
        asked.append(settings)
        kept.run(settings.directory, kept.tensors())

    def own(job, settings, say, *, fork, nproc):
        assert (settings.wandb_online, settings.wandb, settings.bug) == (False, False, "01")
        assert os.environ["NVTE_FUSED_ATTN"] == "0"
        assert not [word for word in job.arguments if word.startswith("--ttrace")]
        kept.run(Path("ttrace-out"), kept.tensors(1), ranks=4)
        summary = Summary(Result.EQUIVALENT, {}, (), {}, {}, {}, ())
        return api.Report(summary=summary, verdicts=(), directory=Path("ttrace-out"))

    monkeypatch.setattr(record, "run_apart", stand_in)
    monkeypatch.setattr(record, "kept", own)
    Path("x.py").touch()
    job = "NVTE_FUSED_ATTN=0 python x.py --num-layers 2"
    words = ["check", "--against", f"torchrun {JOB}", "--quiet", "--", *job.split()]
    more = ["--ttrace-bug", "01", "--ttrace-iterations", "1-2", "--ttrace-wandb"]
    more += ["--ttrace-memory-mb", "64", "--ttrace-isolate"]
    sent = []
    monkeypatch.setattr(wandb, "log", lambda *_, online, **__: sent.append(online))
    assert main([*words, *more]) == 1
    assert sent == [True]
    same = {"iterations": (1, 2), "memory_mb": 64, "isolate": True}
    assert asked == [Settings(directory=Path("ttrace-out/against"), wandb=False, **same)]
    assert capsys.readouterr().out.startswith("ttrace  diverged")
    assert (place / "ttrace-out" / "report.html").is_file()


@pytest.mark.parametrize(("verdict", "code"), [(Result.EQUIVALENT, 2), (Result.DIVERGED, 1)])
def test_a_model_that_cannot_be_compared(verdict, code, place, monkeypatch, capsys):
    """The check's own report is shown, and why there is no other; the worst answer counts."""
    summary = Summary(verdict, {}, (), {}, {}, {}, ())
    report = api.Report(summary=summary, verdicts=(), directory=Path("ttrace-out"))
    monkeypatch.setattr(training, "check", lambda *_, **__: report)
    monkeypatch.setattr(api, "is_model", lambda text: True)
    Path("x.py").touch()
    words = ["check", "--quiet", "--against", "hf:config.json", "--", "x.py", "--num-layers", "2"]
    assert main(words) == code
    shown = capsys.readouterr()
    assert shown.out.startswith(f"ttrace  {verdict}")
    (line,) = shown.err.splitlines()
    assert line.startswith("ttrace: ttrace-out holds no reference: ")


@pytest.mark.parametrize(
    ("words", "remaining"),
    [
        ("--bf16 --cross-entropy-loss-fusion", ""),
        ("--lr 1", "--lr 1"),
        ("--num-experts 4 --moe-aux-loss-coeff 0.1 --fp8-format hybrid", "--num-experts 4"),
        ("--moe-expert-capacity-factor 1.0 --reset-position-ids --lr 1", "--lr 1"),
    ],
)
def test_what_a_model_is_not_compared_with(words, remaining, place):
    """The job runs once more without it."""
    job = Command("x.py", tuple(words.split()))
    plain = diff._plain("hf:config.json", job, Settings(), None)
    assert " ".join(job.arguments if plain is None else plain[0].arguments) == remaining


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["diff", "one"], "the following arguments are required: B"),
        (["diff", "one", "absent"], "absent: neither a directory nor a command"),
        (["diff", "one", "ls -l"], "no training script in this command"),
        (["diff", "one", "."], ". holds no complete trace of a run"),
        (["diff", "--known", "absent.toml", "one", "one"], "absent.toml is not a list"),
        (["diff", "--allow-unchecked", "2", "one", "one"], "give a share from 0 to 1"),
        (["diff", "one", "nowhere/python x.py --a 1"], "nowhere/python: no such interpreter"),
        (["check", "--against", "one", "--shrink", "--", "x.py"], "--against and --shrink"),
        (["diff", f"torchrun {JOB}", "--directory", ".", "a"], "choose another --directory"),
        (["check", "--against", "ttrace-out", "--", "x.py"], "choose another --ttrace-dir"),
        (["check", "--against", "ttrace-out/reference", "--", "x.py"], "would be overwritten"),
        (["check", "--known", "x.toml", "--", "x.py"], "--known: only with --against"),
        (["record", "--ttrace-dir", "one", "--", "x.py"], "one holds a trace already"),
        (["record"], "no script given: ttrace record -- "),
    ],
)
def test_bad_input(capsys, words, message):
    """One line that says what to do."""
    for folder in ("a", "ttrace-out/reference"):
        Path(folder).mkdir(parents=True)
    assert main(words) == 2
    (error,) = (e for e in capsys.readouterr().err.splitlines() if not e.startswith("["))
    assert message in error


def test_a_command_that_fails(tmp_path, monkeypatch):
    """Its own last words, in one error."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    job = training.parsed(["absent.py --num-layers 2"], "record")
    place = Settings(directory=tmp_path / "a")
    with pytest.raises(TTraceError, match=r"no trace of 'absent.py .*absent.py: no such script"):
        record.run_apart("absent.py --num-layers 2", job, place, quiet=True)


def test_the_flags_of_a_command_do_not_contradict_ours(place, monkeypatch):
    """It is recorded where we look for it, and not logged."""
    asked = []
    monkeypatch.setattr(
        apart, "ttrace", lambda _, words, *more, **how: asked.append(words) or (0, "")
    )
    flags = ("--ttrace-wandb", "--ttrace-dir", "elsewhere", "--ttrace-seeds", "3")
    record.run_apart(JOB, Command("x.py", flags), Settings(directory=place / "a"), quiet=True)
    [words] = asked
    expected = Settings(directory=place / "a", wandb=False, seeds=3)
    assert split(words[: words.index("--")])[0] == expected
    assert words[words.index("--") :] == ["--", "x.py"]


def test_other_paddings(place):
    """A multiple that the tensor-parallel size does not divide is left as it is."""
    job = training.parsed([f"{JOB} --tensor-model-parallel-size 3"], "record")
    assert diff._padded_like(place / "one", job) == job
