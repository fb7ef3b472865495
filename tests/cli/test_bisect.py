# SPDX-License-Identifier: Apache-2.0
"""``ttrace bisect``: what is searched, with a checker that only looks for a mark in a file."""

import itertools
import json
import os
from pathlib import Path

import pytest

from megatron_ttrace.cli import bisect, record
from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.processes.worktrees import Hunk
from megatron_ttrace.jobs.settings import split
from megatron_ttrace.saved import api
from megatron_ttrace.trace.blamed import Blame, BlamedChange, BlamedHunk, Blaming
from megatron_ttrace.trace.executed import Execution
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Culprit, Outcome
from tests.jobs.processes.test_worktrees import git
from tests.report.synthetic_report import culprit_of, make_verdict
from tests.run import kept

COMMITS = 64
FAULT = 41
JOB = ["--num-layers", "2"]


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A checkout: a good commit, and 64 after it, of which one has a fault."""
    home = tmp_path_factory.mktemp("history")
    git(home, "init", "-q", "-b", "main")
    (home / "layers.py").write_text("right\n")
    for number in range(COMMITS + 1):
        (home / "pretrain.py").write_text(f"print({number})\n")
        if number == FAULT:
            (home / "layers.py").write_text("wrong\n")
        git(home, "add", ".")
        git(home, "commit", "-q", "-m", f"change {number}")
    return home


@pytest.fixture
def checked(tmp_path, monkeypatch, blaming):
    """Commits that are checked, by a stand-in that knows only files of the worktree."""
    monkeypatch.chdir(tmp_path)
    right = kept.run(tmp_path / "right", kept.tensors())
    wrong = kept.run(tmp_path / "wrong", kept.tensors(1))
    asked = []

    def stand_in(interpreter, words, environment, *, quiet):
        script = Path(words[words.index("--") + 1])
        number = int(script.read_text()[6:-2])
        asked.append(number)
        if number in stand_in.broken:
            return 2, "the rank died"
        is_right = (script.parent / "layers.py").read_text() == "right\n"
        at = words.index("--")
        # As the command reads them: flags behind the script override others.
        settings, _ = split(words[at + 2 :], split(words[:at])[0])
        stand_in.against.update(b for a, b in itertools.pairwise(words) if a == "--against")
        report = api.diff(right, right if is_right else wrong, output=settings.directory)
        return int(report.verdict.exit_code), ""

    stand_in.broken = set()
    stand_in.asked = asked
    stand_in.against = set()
    monkeypatch.setattr(apart, "ttrace", stand_in)
    return stand_in


def test_a_fault_among_64_commits(history, checked, capsys):
    """Found in 7 checks: the commit, its culprit, and what it changed; whatever the job's flags."""
    before = git(history, "status", "--porcelain", "--branch")
    ours = ["--ttrace-wandb", "--ttrace-dir", "elsewhere"]
    words = [f"HEAD~{COMMITS}", "HEAD", "--", str(history / "pretrain.py"), *JOB, *ours]
    assert main(["bisect", "--json", *words]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["commit"] == git(history, "rev-parse", f"HEAD~{COMMITS - FAULT}")
    assert answer["described"].endswith(f": change {FAULT}")
    assert answer["culprits"][0]["name"] == "decoder.layers.0.mlp"
    assert any("-right\n+wrong" in text for text in answer["lines"])
    assert answer["checked"] == len(checked.asked) <= 7
    assert git(history, "status", "--porcelain", "--branch") == before
    assert git(history, "worktree", "list").count("\n") == 0


def test_the_hunks_of_the_commit(history, checked, blaming, capsys):
    """Those that are to blame, compared with the last good commit, in the commit's worktree."""
    hunk = BlamedHunk("layers.py", 1, "", ("right\n",), ("wrong\n",), Execution.ELSEWHERE)
    blaming.answer = Blame(Blaming.PROVEN, "before", (BlamedChange((hunk,), ("decoder",)),))
    words = [f"HEAD~{COMMITS}", "HEAD", "--", str(history / "pretrain.py"), *JOB]
    assert main(["bisect", "--quiet", *words]) == 0
    out = capsys.readouterr().out
    assert "layers.py:1 (outside of functions)\n- right\n+ wrong\n" in out
    assert "proven: with this hunk on before the job diverges" in out
    trial, script, good = blaming.asked
    commit = git(history, "rev-parse", f"HEAD~{COMMITS - FAULT}")
    assert good == f"{commit}^1"
    assert (script.name, script.parent.name) == ("pretrain.py", commit[:12])
    assert trial.arguments == tuple(JOB)


def test_against_a_command(history, checked, monkeypatch):
    """It is recorded once, in the user's environment, of which commits have a part of their own."""
    recorded = []

    def record_apart(text, job, settings, *, quiet):
        recorded.append((settings.directory, os.environ.get("TTRACE_TESTED")))

    monkeypatch.setattr(record, "run_apart", record_apart)
    monkeypatch.delenv("TTRACE_TESTED", raising=False)
    words = ["bisect", "--quiet", "--against", "python x.py --num-layers 2", "HEAD~9", "HEAD", "--"]
    assert main([*words, "TTRACE_TESTED=1", "python", str(history / "pretrain.py"), *JOB]) == 0
    assert recorded == [(Path("ttrace-bisect/against"), None)]
    assert checked.against == {"ttrace-bisect/against"}


def test_commits_that_cannot_be_checked(history, checked, capsys):
    """The fault may be in one of them: this is said, and is no success."""
    checked.broken = {FAULT, FAULT - 1}
    words = [f"HEAD~{COMMITS}", "HEAD", "--", str(history / "pretrain.py"), *JOB]
    assert main(["bisect", "--quiet", *words]) == 2
    out = capsys.readouterr().out
    after = git(history, "rev-parse", "--short=12", f"HEAD~{COMMITS - FAULT - 1}")
    assert f"the first bad commit is {after} or, which could not be checked, " in out
    assert "the rank died" in out
    assert "culprit    decoder.layers.0.mlp" in out


def test_nothing_to_find(history, checked, capsys):
    """BAD is checked first."""
    words = [f"HEAD~{COMMITS}", f"HEAD~{COMMITS - FAULT + 1}", "--", str(history / "pretrain.py")]
    assert main(["bisect", "--quiet", *words, *JOB]) == 2
    assert "BAD does not diverge" in capsys.readouterr().err
    assert checked.asked == [FAULT - 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "--", "x.py"], "give two commits after all options"),
        (["a", "b"], "no training command: give it after --, ttrace bisect a b -- COMMAND"),
        (["a", "b", "--quiet", "--", "x.py"], "give two commits after all options"),
        (["--recipe", "absent.yaml", "a", "b"], "absent.yaml cannot be read"),
        (["a", "b", "--", "absent.py"], "absent.py: no such script"),
        (["a", "b", "--", "here.py"], "not in a git checkout: give Megatron's with --checkout"),
        (["a", "b", "--", "srun", "-N", "2", "here.py"], "several machines"),
        (["a", "b", "--"], "no script given: ttrace bisect -- "),
    ],
)
def test_bad_input(capsys, tmp_path, monkeypatch, words, message):
    """One line that says what to do."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here.py").touch()
    assert main(["bisect", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def culprit(where: str, name: str = "a") -> Culprit:
    """One that says where to look."""
    places = [place] if (place := Place.of(where, Clue.RAN)) else []
    verdict = make_verdict(name, verdict=Outcome.DIVERGED)
    return culprit_of(verdict, "", "", where=where, places=tuple(places))


def test_culprits_with_one_cause(capsys):
    """They are shown once, as in a report."""
    shared = {"direction": "gradient", "explanation": "partial sums", "where": "a.py:1 (f)"}
    answer = {
        "commit": "a" * 40,
        "described": "",
        "commits": 1,
        "checked": 1,
        "suspects": [],
        "skipped": {},
        "culprits": [{"name": name, **shared} for name in "xyz"],
        "lines": [],
        "report": "",
    }
    bisect._show(answer)
    out = capsys.readouterr().out
    assert "culprit    x and 2 more with this cause, gradient\n" in out
    assert out.count("partial sums") == 1


def test_lines_next_to_the_culprit():
    """Only those of its file, the nearest first; all if its file was not changed."""
    far, near = Hunk("megatron/core/a.py", 10, 2, "far"), Hunk("megatron/core/a.py", 90, 2, "near")
    other = Hunk("megatron/core/b/a.py", 100, 2, "other")
    place = [culprit("megatron/core/a.py:100 (A.forward)")]
    hunks = bisect.nearest([far, other, near], place)
    assert [hunk.text for hunk in hunks] == [f"{near.file}\nnear", f"{far.file}\nfar"]
    assert len(bisect.nearest([far, other, near], [culprit("megatron/core/c.py:1 (f)")])) == 3
    assert len(bisect.nearest([far, other, near], [])) == 3
