# SPDX-License-Identifier: Apache-2.0
"""``ttrace blame``: what is tried and reported, with a checker that runs a function of the tree."""

import dataclasses
import json
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs import edited, provenance
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.settings import split
from megatron_ttrace.saved import api, blame
from megatron_ttrace.trace import files
from megatron_ttrace.trace.blamed import Blaming
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Edits, Execution
from megatron_ttrace.trace.records import Result
from tests.jobs.processes.test_worktrees import commit, git
from tests.jobs.test_overlay import write
from tests.run import kept

LAYERS = "megatron/core/layers.py"
OTHERS = "megatron/core/others.py"
FUNCTION = "def f{0}(x):\n    a = 1\n    y = x + {0}\n    return y\n\n\n"
COUNT = 12
GOOD = {
    "megatron/core/__init__.py": "",
    LAYERS: "".join(map(FUNCTION.format, range(COUNT))),
    OTHERS: "def idle(x):\n    return x\n",
    "pretrain.py": "import megatron.core\n",
}
EXPECTED = sum(range(COUNT))
ELSEWHERE = "elsewhere"
"""A job that diverges in another module: only if it does not diverge where it usually does."""


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A fork of a release, checked out."""
    root = tmp_path / "fork"
    write(root, GOOD)
    commit(root, "a release", "core_v0.19.7")
    monkeypatch.chdir(root)
    return root


def edit(root, *edits, file=LAYERS):
    """Replace texts in a file."""
    text = (root / file).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new, 1)
    (root / file).write_text(text)


def harmless(*spared):
    """A comment, or another spelling, in each function."""
    kinds = ("    # why\n    y = x + {0}", "    y = {0} + x", "    y = x + {0} + 0")
    for number in range(COUNT):
        if number not in spared:
            new = kinds[number % len(kinds)].format(number)
            yield f"    y = x + {number}\n", f"{new}\n"


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """The reports of a job that is equivalent, and of one that diverges."""
    home = tmp_path_factory.mktemp("reports")
    right = kept.run(home / "right", kept.tensors())
    wrong = kept.run(home / "wrong", kept.tensors(1))
    runs = {Result.EQUIVALENT: right, Result.DIVERGED: wrong}
    by_answer = {answer: api.diff(right, run, output=home / answer) for answer, run in runs.items()}
    report = api.diff(right, wrong, output=home / ELSEWHERE)
    culprits = tuple(dataclasses.replace(culprit, name="embedding") for culprit in report.culprits)
    by_answer[ELSEWHERE] = api.rewritten(
        report, dataclasses.replace(report.summary, culprits=culprits)
    )
    return {answer: report.directory for answer, report in by_answer.items()}


@pytest.fixture
def checked(reports, monkeypatch):
    """Checks, by a stand-in: a job diverges where its functions do not add up."""
    monkeypatch.setattr(apart, "import_torch", lambda script, device: None)

    def stand_in(interpreter, words, environment, *, quiet, warm=False):
        root = Path(words[words.index("--") + 1]).parent
        stand_in.asked.append(words)
        stand_in.environment = environment
        try:
            names = runpy.run_path(str(root / LAYERS))
            total = sum(names[f"f{number}"](0) for number in range(COUNT))
        except (ArithmeticError, AttributeError, NameError) as error:
            return 2, repr(error)
        answer = Result.EQUIVALENT if total == EXPECTED else Result.DIVERGED
        is_elsewhere = getattr(total, "imag", 0) and total.real == EXPECTED
        folder = Path(words[words.index("--ttrace-dir") + 1])
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(reports[ELSEWHERE if is_elsewhere else answer], folder)
        report = api.load_report(folder)
        if edited.GIVEN in environment:
            edits = Edits.from_json(json.loads(Path(environment[edited.GIVEN]).read_text()))
            changed = ChangedCode(edits.since, tuple(map(stand_in.ran, edits.functions)))
            api.rewritten(report, dataclasses.replace(report.summary, changed_code=changed))
        return int(answer.exit_code), ""

    def ran(change):
        ran = Execution.ELSEWHERE if change.file == LAYERS else Execution.NOT_RUN
        if change.function in stand_in.culprits:
            ran = Execution.IN_CULPRIT
        return ChangedFunction(change.file, change.function, change.line, ran)

    stand_in.ran, stand_in.culprits, stand_in.asked = ran, (), []
    monkeypatch.setattr(apart, "ttrace", stand_in)
    return stand_in


def test_the_report_keeps_its_other_files(tmp_path):
    """A blame is written into the report of the check."""
    right = kept.run(tmp_path / "right", kept.tensors())
    report = api.diff(right, right, output=tmp_path / "report")
    collectives = report.directory / files.COLLECTIVES
    files.write_records(collectives, (), files.run_of(report.directory))
    api.rewritten(report, dataclasses.replace(report.summary, notices=("one more",)))
    assert collectives.is_file()
    assert api.load_report(report.directory).summary.notices == ("one more",)


def run(capsys, *words, code=1):
    """The summary that the command prints."""
    assert main(["blame", "--json", *words, "--", "pretrain.py", "--num-layers", "2"]) == code
    return json.loads(capsys.readouterr().out)


def test_one_change_among_others(fork, checked, capsys):
    """The hunk, proven with and without it, in few checks; committed or not. No file is touched."""
    edit(fork, *harmless(7, 8))
    git(fork, "commit", "-q", "-a", "-m", "harmless")
    edit(fork, ("x + 7", "x + 9"))
    edit(fork, ("return x", "return x + 0"), file=OTHERS)
    before = git(fork, "status", "--porcelain"), (fork / LAYERS).read_text()
    answer = run(capsys)["blame"]
    assert answer["result"] == Blaming.PROVEN
    [change] = answer["changes"]
    [hunk] = change["hunks"]
    assert (hunk["file"], hunk["function"], hunk["ran"]) == (LAYERS, "f7", "elsewhere")
    assert (fork / LAYERS).read_text().splitlines()[hunk["line"] - 1] == "    y = x + 9"
    assert (hunk["removed"], hunk["added"]) == (["    y = x + 7\n"], ["    y = x + 9\n"])
    assert change["culprits"] == ["decoder.layers.*.mlp"]
    # Comments do not run, and the other file does not.
    assert (answer["hunks"], answer["idle"]) == (COUNT, len([0, 3, 6, 9]) + 1)
    assert answer["checks"] == len(checked.asked) <= 2 * (COUNT - 1).bit_length() + 6
    assert (git(fork, "status", "--porcelain"), (fork / LAYERS).read_text()) == before
    assert not (fork / "ttrace-out-blame" / "trees").exists()


def test_the_report(fork, checked, capsys):
    """In the terminal, in the page and in its summary: the user's tree, not its copy."""
    edit(fork, *harmless(7), ("x + 7", "x + 9"))
    assert main(["blame", "--quiet", "--", "pretrain.py"]) == 1
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    place = f"{LAYERS}:"
    assert out.index("ttrace  diverged") < out.index(place) < out.index("culprit  ")
    for text in ("(f7)", "- y = x + 7", "+ y = x + 9", "proven: with this hunk on core_v0.19.7"):
        assert text in out
        assert text.lstrip("+- ") in (fork / "ttrace-out" / "report.html").read_text()
    report = api.load_report("ttrace-out")
    assert report.summary.blame.changes[0].hunks[0].function == "f7"
    assert main(["blame", "--", "pretrain.py"]) == 1
    assert f"grouping {COUNT} hunks by the names" in capsys.readouterr().err
    assert main(["report", "ttrace-out"]) == 1
    assert "proven: with this hunk" in capsys.readouterr().out


def test_what_ran_in_the_culprit_is_tried_first(fork, checked, capsys):
    """The number of other hunks hardly matters then."""
    checked.culprits = ("f7", "f8")
    edit(fork, *harmless(7), ("x + 7", "x + 9"))
    answer = run(capsys)["blame"]
    assert answer["changes"][0]["hunks"][0]["ran"] == "in_culprit"
    assert answer["checks"] <= 6


NEED_EACH_OTHER = [(f"x + {number}\n", f"x + {number} * y\n") for number in range(COUNT)]
FOUND = {
    # before, edits, result, functions of each change, reason, most checks
    "together, neither alone": (
        [],
        [
            *harmless(3, 7),
            ("y = x + 3", "f0.k = 1\n    y = x + 3"),
            ("    y = x + 7", "    y = x + 7 + vars(f0).get('k', 0)"),
        ],
        (Blaming.PROVEN, [["f3", "f7"]], "", 30),
    ),
    "each alone": (
        [],
        [*harmless(3, 7), ("x + 3", "x + 30"), ("x + 7", "x + 70")],
        (Blaming.PROVEN, [["f3"], ["f7"]], "", 30),
    ),
    "each alone, but tried together at first, as they share a name": (
        [],
        [
            ("def f7", "def g(x):\n    return x\n\n\ndef f7"),
            ("y = x + 3\n", "y = x + 30  # g\n"),
            ("y = x + 7\n", "y = x + 70  # g\n"),
        ],
        (Blaming.PROVEN, [["f3"], ["f7"]], "", 30),
    ),
    "without it the job diverges elsewhere": (
        [],
        [*harmless(3, 7), ("x + 3", "x + 3 + 1j"), ("x + 7", "x + 9")],
        (Blaming.OTHERS, [["f7"]], "embedding", 30),
    ),
    "elsewhere the good tree diverges too": (
        [("x + 3", "x + 3 + 1j")],
        [*harmless(3, 7), ("x + 7", "x + 9")],
        (Blaming.PROVEN, [["f7"]], "embedding", 30),
    ),
    "two do not work without each other, and nothing in the text says so": (
        [],
        [
            *harmless(2, 3, 7),
            ("x + 7", "x + 9"),
            ("a = 1\n    y = x + 2", "exec('f0.k = 1')\n    y = x + 2"),
            ("    y = x + 3\n", "    y = x + 3 * eval('f0.k')\n"),
        ],
        (Blaming.PROVEN, [["f7"]], "", 30),
    ),
    "the good tree diverges": (
        [("x + 7", "x + 9")],
        [*harmless(7)],
        (Blaming.GOOD_DIVERGES, [], "", 2),
    ),
    "the good tree cannot be checked": (
        [("x + 7", "x / 0")],
        [("x / 0", "x + 9"), *harmless(7)],
        (Blaming.ALONE, [["f7"]], "ZeroDivisionError", 30),
    ),
    "the job needs another change": (
        [("x + 2", "x + 2 * y")],
        [("x + 2 * y", "x + 2"), *harmless(2, 7), ("x + 7", "x + 9")],
        (Blaming.REMOVED, [["f7"]], "UnboundLocalError", 28),
    ),
    "too many need each other": (
        NEED_EACH_OTHER,
        [(new, old) for old, new in NEED_EACH_OTHER if "+ 7" not in old] + [("x + 7 * y", "x + 9")],
        (Blaming.GOOD_UNCHECKED, [], "UnboundLocalError", 31),
    ),
}


@pytest.mark.parametrize(("before", "edits", "found"), FOUND.values(), ids=FOUND)
def test_what_is_found(fork, checked, capsys, before, edits, found):
    """Of changes since the good tree, which has those ``before`` them."""
    edit(fork, *before)
    git(fork, "commit", "-q", "-a", "--allow-empty", "-m", "before")
    edit(fork, *edits)
    answer = run(capsys, *(["--good", "HEAD"] if before else []))["blame"]
    result, functions, reason, most = found
    names = [[hunk["function"] for hunk in change["hunks"]] for change in answer["changes"]]
    assert (answer["result"], sorted(names)) == (result, functions)
    assert reason in answer["reason"]
    assert len(checked.asked) <= most
    assert all(change["culprits"] == ["decoder.layers.*.mlp"] for change in answer["changes"])


def test_dependent_hunks(fork, checked, capsys):
    """A new function and its use stay together; of a group, only what is needed is blamed."""
    edit(fork, *harmless(7), ("def f7", "def g(x):\n    return x + 9\n\n\ndef f7"))
    edit(fork, ("    y = x + 7\n", "    y = g(x)\n"))
    answer = run(capsys)["blame"]
    [change] = answer["changes"]
    assert {line.strip() for hunk in change["hunks"] for line in hunk["added"]} >= {"y = g(x)"}
    assert answer["result"] == Blaming.PROVEN
    assert answer["checks"] <= 2 * (COUNT - 1).bit_length() + 6


def test_an_equivalent_job(fork, checked, capsys):
    """There is nothing to blame: one check."""
    edit(fork, *harmless())
    summary = run(capsys, code=0)
    assert (summary["verdict"], summary["blame"]) == ("equivalent", None)
    assert len(checked.asked) == 1


def test_how_combinations_are_checked(fork, checked, monkeypatch, capsys):
    """Without the user's W&B and cache of references, and compiled once, among our files."""
    monkeypatch.setenv("TTRACE_CACHE", "/somewhere")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    edit(fork, ("x + 7", "x + 9"), *harmless(7))
    run(capsys, "--ttrace-wandb")
    for words in checked.asked:
        settings, _ = split(words[: words.index("--")])
        assert (settings.wandb, settings.wandb_online) == (False, False)
    assert checked.environment["TTRACE_CACHE"] == ""
    assert not list((fork / "ttrace-out-blame").glob("checks/*/reference"))
    assert "PYTHONDONTWRITEBYTECODE" not in checked.environment
    folder = Path(checked.environment["PYTHONPYCACHEPREFIX"])
    assert folder.parent == fork / "ttrace-out-blame" / "trees"


def test_secrets_are_not_kept(fork, checked, monkeypatch, capsys):
    """Neither of the environment nor of the command: checks get them, files and reports do not."""
    monkeypatch.setenv("MY_API_TOKEN", "hunter2hunter2")
    edit(fork, ("x + 7", "x + 9"), *harmless(7))
    command = ["env", "HF_TOKEN=hunter2hunter2", "python", "pretrain.py"]
    words = ["--wandb-entity", "https://u:hunter2hunter2@host", "--hf-token", "hunter2hunter2"]
    assert main(["blame", "--json", "--", *command, *words]) == 1
    captured = capsys.readouterr()
    assert "hunter2" not in captured.out + captured.err
    assert checked.environment["HF_TOKEN"] == "hunter2hunter2"
    assert "hunter2" not in checked.environment[provenance.COMMAND]
    files = [path for path in fork.glob("ttrace-out*/**/*") if path.is_file()]
    assert {"edits.json", "summary.json", "report.html"} <= {path.name for path in files}
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--", "pretrain.py"], "has the same Python files as core_v0.19.7"),
        (["--good", "absent", "--", "pretrain.py"], "'absent' is not a commit of "),
        (["--", "absent.py"], "absent.py: no such script"),
        ([], "no script given"),
        (["nowhere/python", "pretrain.py"], "nowhere/python: no such interpreter"),
        (["--", "nowhere/python pretrain.py"], "nowhere/python: no such interpreter"),
        (["--", "srun", "-N", "2", "pretrain.py"], "the command is for 2 machines"),
    ],
)
def test_bad_input(fork, checked, capsys, words, message):
    """One line that says what to do."""
    assert main(["blame", "--quiet", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error


def test_a_job_that_cannot_be_checked(fork, checked, capsys):
    """One line, and exit code 2."""
    edit(fork, ("x + 7", "x / 0"))
    assert main(["blame", "--quiet", "--", "pretrain.py"]) == 2
    assert "ZeroDivisionError" in capsys.readouterr().err


@pytest.fixture
def trial(fork, checked, reports, tmp_path):
    """A job that was checked, and its report."""
    shutil.copytree(reports[Result.DIVERGED], tmp_path / "out")
    return blame.Trial(
        interpreter=sys.executable,
        arguments=("--num-layers", "2"),
        ranks=3,
        settings=dataclasses.replace(api.Settings(), directory=tmp_path / "out"),
        environment={},
    )


@pytest.fixture
def command(fork, checked, capsys, monkeypatch):
    """``ttrace blame`` as a process of its own, played by this one."""
    check = apart.ttrace

    def play(interpreter, words, environment, *, quiet):
        command.words = words
        with monkeypatch.context() as patches:
            patches.setattr(apart, "ttrace", check)
            code = main([words[0], "--quiet", *words[1:]])
        return code, capsys.readouterr().err

    monkeypatch.setattr(apart, "ttrace", play)
    return command


def test_in_a_process_of_its_own(fork, trial, command):
    """For other commands: the words it is run with; the report of their check gains the answer."""
    edit(fork, *harmless(7), ("x + 7", "x + 9"))
    before = api.load_report(trial.settings.directory)
    answer = blame.run_apart(trial, fork / "pretrain.py", "HEAD", print, quiet=True)
    words = command.words
    assert words[:3] == ["blame", "--nproc-per-node", "3"]
    assert words[words.index("--good") + 1] == "HEAD"
    assert words[words.index("--") + 1 :] == [str(fork / "pretrain.py"), "--num-layers", "2"]
    assert answer.changes[0].hunks[0].function == "f7"
    kept = api.load_report(trial.settings.directory)
    assert kept.summary.blame == answer
    assert dataclasses.replace(kept.summary, blame=None) == before.summary


def test_a_job_that_diverges_with_modules_isolated(fork, trial, command):
    """It may have been too blind without."""
    report = api.load_report(trial.settings.directory)
    config = {**report.summary.config, "isolate": True}
    api.rewritten(report, dataclasses.replace(report.summary, config=config))
    edit(fork, ("x + 7", "x + 9"))
    assert blame.run_apart(trial, fork / "pretrain.py", "HEAD", print, quiet=True)
    assert "--ttrace-isolate" in command.words


@pytest.mark.parametrize(
    ("edits", "says"),
    [
        ([*harmless()], "a copy of the same files is equivalent"),
        ([], "has the same Python files as HEAD"),
    ],
)
def test_a_search_that_fails(fork, trial, command, edits, says):
    """The report of the check stays as it was: there is no answer."""
    edit(fork, *edits)
    before = api.load_report(trial.settings.directory)
    said = []
    assert blame.run_apart(trial, fork / "pretrain.py", "HEAD", said.append, quiet=True) is None
    assert says in said[0]
    assert api.load_report(trial.settings.directory).summary == before.summary
