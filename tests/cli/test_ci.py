# SPDX-License-Identifier: Apache-2.0
"""``ttrace ci``: what of a pull request is checked and said, with a checker that reads a mark."""

import json
from pathlib import Path

import pytest

from megatron_ttrace.__main__ import main
from megatron_ttrace.evaluation.recipes import pull as pull_request
from megatron_ttrace.mcore import versions
from megatron_ttrace.mcore.shrink import documents
from megatron_ttrace.processes import apart
from megatron_ttrace.runtime import api
from tests.evaluation.recipes.test_recipes import MODEL
from tests.processes.test_worktrees import git
from tests.runtime import kept

LAYERS = "megatron/layers.py"
PIPELINE = "megatron/pipeline.py"
CODE = "def run(x):\n    # {0}\n    return x + 0\n\n\ndef other():\n    return 1\n"


def recipe(axis: str) -> str:
    """A recipe of two ranks."""
    values = {**MODEL, f"--{axis}-model-parallel-size": 2}
    return "MODEL_ARGS:\n" + "".join(
        f"  {flag}: {str(value).lower()}\n" for flag, value in values.items()
    )


@pytest.fixture
def fork(tmp_path, monkeypatch):
    """A fork with two recipes on ``main``, checked out on ``change``."""
    root = tmp_path / "fork"
    (root / "megatron").mkdir(parents=True)
    (root / "ci").mkdir()
    (root / "pretrain_gpt.py").write_text("import megatron\n")
    for file in (LAYERS, PIPELINE):
        (root / file).write_text(CODE)
    (root / "ci" / "tp.yaml").write_text(recipe("tensor"))
    (root / "ci" / "pp.yaml").write_text(recipe("pipeline"))
    (root / "ci" / "notes.yaml").write_text("nothing: to train\n")
    git(root, "init", "-q", "-b", "main")
    commit(root, "a fork")
    git(root, "checkout", "-q", "-b", "change")
    monkeypatch.chdir(root)
    return root


def commit(root, message):
    """Commit all files but the command's own."""
    git(root, "add", ".", ":!ttrace-ci")
    git(root, "commit", "-q", "--allow-empty", "-m", message)


def edit(root, file, old, new):
    """Change a file and commit it."""
    text = (root / file).read_text()
    assert old in text
    (root / file).write_text(text.replace(old, new))
    commit(root, f"{old} to {new}")


@pytest.fixture
def checked(tmp_path, monkeypatch):
    """Checks, by a stand-in that runs ``run`` of one file, and diverges where that adds 1."""
    monkeypatch.setattr(versions, "installed", dict)
    monkeypatch.setattr(documents, "write", lambda prefix, words: prefix)
    monkeypatch.setattr(documents, "arguments", lambda script, prefix, words: [])
    right = kept.run(tmp_path / "right", kept.tensors())
    wrong = kept.run(tmp_path / "wrong", kept.tensors(1))

    def stand_in(interpreter, words, environment, *, quiet, module):
        log, root = map(Path, words[:2])
        axis = "tensor" if "--tensor-model-parallel-size" in words else "pipeline"
        file = LAYERS if axis == "tensor" else PIPELINE
        stand_in.asked.append((root.name, axis))
        for process in range(9):
            with log.open("a" if process else "w") as out:
                out.writelines(json.dumps([process, file, name]) + "\n" for name in ("", "run"))
        code = (root / file).read_text()
        if "raise" in code:
            return 2, "the rank died"
        folder = words[words.index("--ttrace-dir") + 1]
        report = api.diff(right, wrong if "x + 1" in code else right, output=folder)
        return int(report.verdict.exit_code), ""

    stand_in.asked = []
    monkeypatch.setattr(apart, "ttrace", stand_in)
    return stand_in


def pull(*words):
    """Check the pull request in the current directory."""
    return main(["ci", ".", "--base", "main", "--recipes", "ci", "--quiet", *words])


def test_only_what_changes_reach(fork, checked, capsys):
    """First all recipes run, then those that run a function that was changed."""
    assert pull() == 0
    assert checked.asked == [("head", "pipeline"), ("head", "tensor")]
    edit(fork, LAYERS, "return 1", "return 2")
    edit(fork, LAYERS, "# {0}", "# nothing")
    capsys.readouterr()
    assert pull() == 0
    assert len(checked.asked) == 2
    said = capsys.readouterr().out
    assert said.count("skipped: ci/") == 2
    assert "nothing was checked" in said
    edit(fork, LAYERS, "x + 0", "0 + x")
    assert pull() == 0
    assert checked.asked[2:] == [("head", "tensor")]
    assert "skipped: ci/pp.yaml" in capsys.readouterr().out
    assert not (fork / "ttrace-ci" / "trees").exists()
    assert git(fork, "worktree", "list").count("\n") == 0


def test_a_faulty_change(fork, checked, capsys):
    """Diverges, each time again, and is annotated where it changed what ran."""
    edit(fork, PIPELINE, "return 1", "return 2")
    edit(fork, LAYERS, "x + 0", "x + 1")
    for _ in range(2):
        assert pull("--format", "github") == 1
        said = capsys.readouterr().out
        (line,) = (line for line in said.splitlines() if line.startswith("::"))
        assert line.startswith(f"::error file={LAYERS},line=3,title=ttrace%3A diverged in decoder")
        assert f"changed code that it ran: {LAYERS} (run)" in line
        assert "%0Areport: " in line
    assert checked.asked[-2:] == [("head", "tensor"), ("base", "tensor")]
    assert pull("--format", "gitlab") == 1
    issues = json.loads(capsys.readouterr().out)
    assert [(one["severity"], one["location"]) for one in issues] == [
        ("critical", {"path": LAYERS, "lines": {"begin": 3}})
    ]
    assert pull() == 1
    assert f"{LAYERS}:3: error: ttrace: diverged in" in capsys.readouterr().out


def test_a_culprit_in_code_that_did_not_change(fork, checked, capsys, monkeypatch):
    """Its line is an error, and the changed code that ran is a warning."""
    edit(fork, LAYERS, "x + 0", "x + 1")
    monkeypatch.setattr(pull_request, "place", lambda *given: ("pretrain_gpt.py", 1))
    assert pull("--format", "github") == 1
    said = capsys.readouterr().out
    error, warning = (line for line in said.splitlines() if line.startswith("::"))
    assert error.startswith("::error file=pretrain_gpt.py,line=1,")
    assert warning.startswith(f"::warning file={LAYERS},line=3,")
    assert "this code ran%2C and has changed::ci/tp.yaml" in warning


def test_a_fault_that_the_base_has(fork, checked, capsys):
    """It is told, and is not the pull request's."""
    git(fork, "checkout", "-q", "main")
    edit(fork, LAYERS, "x + 0", "x + 1")
    git(fork, "checkout", "-q", "-B", "change")
    edit(fork, LAYERS, "return x + 1", "return (x) + 0 + x + 1")
    assert pull("--format", "github") == 0
    said = capsys.readouterr().out
    assert "::notice title=ttrace%3A not from this pull request::ci/tp.yaml" in said
    assert "::error" not in said


def test_what_cannot_be_checked(fork, checked, capsys):
    """Because of the pull request: an error. Before it, too: a warning, if anything was checked."""
    edit(fork, LAYERS, "    return x", "    raise x\n    return x")
    assert pull("--format", "github") == 2
    said = capsys.readouterr().out
    assert "::error title=ttrace could not check this pull request::ci/tp.yaml" in said
    assert "the rank died" in said
    git(fork, "branch", "-f", "main", "change")
    edit(fork, LAYERS, "raise x", "raise x + 0")
    assert pull("--format", "github") == 2
    assert "::warning title=ttrace could not check::" in capsys.readouterr().out
    edit(fork, PIPELINE, "x + 0", "0 + x")
    assert pull("--format", "github") == 0
    assert "::warning title=ttrace could not check::" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["absent", "--base", "main"], "absent: no such directory"),
        (["..", "--base", "main"], "is not in a git checkout"),
        ([".", "--base", "absent"], "rev-parse"),
        ([".", "--base", "other"], "fetch-depth: 0"),
        ([".", "--base", "main"], "give a checkout of Megatron-LM"),
        ([".", "--base", "main", "--recipe", "absent.yaml"], "absent.yaml is not in HEAD"),
        ([".", "--base", "main", "--recipe", "../right"], "../right is not in HEAD"),
        ([".", "--base", "main", "--recipes", "megatron"], "no recipe can be checked"),
    ],
)
def test_bad_input(fork, checked, capsys, words, said):
    """One line that says what to do."""
    git(fork, "checkout", "-q", "--orphan", "other")
    commit(fork, "unrelated")
    git(fork, "checkout", "-q", "change")
    assert main(["ci", *words]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert said in error[0]
