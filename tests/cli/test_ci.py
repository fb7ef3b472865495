# SPDX-License-Identifier: Apache-2.0
"""``ttrace ci``: what of a pull request is checked and said, with a checker that reads a mark."""

import json
import os
from pathlib import Path

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.evaluation.recipes import collect
from megatron_ttrace.evaluation.recipes import pull as pull_request
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.shrink import documents
from megatron_ttrace.saved import api
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.blamed import Blame, BlamedChange, BlamedHunk, Blaming
from megatron_ttrace.trace.executed import Execution
from tests.evaluation.recipes.test_recipes import MODEL
from tests.jobs.processes.test_worktrees import git
from tests.run import kept

LAYERS = "megatron/layers.py"
PIPELINE = "megatron/pipeline.py"
CODE = "def run(x):\n    # {0}\n    return x + 0\n\n\ndef other():\n    return 1\n"


def recipe(axis: str) -> str:
    """A recipe of eight ranks with one axis."""
    values = {**MODEL, f"--{axis}-model-parallel-size": 8}
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
def checked(tmp_path, monkeypatch, blaming):
    """Checks, by a stand-in that runs ``run`` of one file, and diverges where that adds 1."""
    monkeypatch.setattr(documents, "write", lambda prefix, words: prefix)
    monkeypatch.setattr(documents, "arguments", lambda script, prefix, words: [])
    right = kept.run(tmp_path / "right", kept.tensors())
    wrong = kept.run(tmp_path / "wrong", kept.tensors(1))

    def stand_in(interpreter, words, environment, *, quiet, module):
        log, root = map(Path, words[:2])
        os.close(owned.create(log))
        axis = "tensor" if "--tensor-model-parallel-size" in words else "pipeline"
        file = LAYERS if axis == "tensor" else PIPELINE
        stand_in.asked.append((root.name, axis))
        stand_in.environment = dict(environment)
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


@pytest.fixture
def pull(capsys):
    """Checks the pull request in the current directory; returns what is printed."""

    def check(*words, code=0):
        capsys.readouterr()
        assert main(["ci", ".", "--base", "main", "--recipes", "ci", "--quiet", *words]) == code
        return capsys.readouterr().out

    return check


def test_only_what_changes_reach(fork, checked, pull):
    """First all recipes run, then those that run a function that was changed."""
    pull()
    assert checked.asked == [("head", "pipeline"), ("head", "tensor")]
    edit(fork, LAYERS, "return 1", "return 2")
    edit(fork, LAYERS, "# {0}", "# nothing")
    out = pull()
    assert len(checked.asked) == 2
    assert out.count("skipped: ci/") == 2
    assert "nothing was checked" in out
    edit(fork, LAYERS, "x + 0", "0 + x")
    assert "skipped: ci/pp.yaml" in pull()
    assert checked.asked[2:] == [("head", "tensor")]
    assert not (fork / "ttrace-ci" / "trees").exists()
    assert git(fork, "worktree", "list").count("\n") == 0


def test_a_faulty_change(fork, checked, pull):
    """Diverges, each time again, and is annotated where it changed what ran."""
    edit(fork, PIPELINE, "return 1", "return 2")
    edit(fork, LAYERS, "x + 0", "x + 1")
    for _ in range(2):
        out = pull("--format", "github", code=1)
        (line,) = (line for line in out.splitlines() if line.startswith("::error"))
        assert line.startswith(f"::error file={LAYERS},line=3,title=ttrace%3A diverged in decoder")
        assert f"changed code that it ran: {LAYERS} (run)" in line
        assert "%0Areport: " in line
    assert checked.asked[-2:] == [("head", "tensor"), ("base", "tensor")]
    issues = json.loads(pull("--format", "gitlab", code=1))
    assert [(issue["severity"], issue["location"]) for issue in issues] == [
        ("critical", {"path": LAYERS, "lines": {"begin": 3}}),
        ("minor", {"path": PIPELINE, "lines": {"begin": 7}}),
    ]
    assert f"{LAYERS}:3: error: ttrace: diverged in" in pull(code=1)


def test_small_jobs_with_the_same_fault(fork, checked, pull):
    """Of a recipe whose axes differ: it is annotated once."""
    file = fork / "ci" / "tp.yaml"
    file.write_text(file.read_text().replace("parallel-size: 8", "parallel-size: 2"))
    edit(fork, LAYERS, "x + 0", "x + 1")
    out = pull("--format", "github", code=1)
    assert checked.asked.count(("head", "tensor")) == 2
    assert out.count("::error") == 1


def test_the_change_to_blame(fork, blaming, checked, pull):
    """Its line has the error, wherever the culprit's code is, with what was proven."""
    edit(fork, PIPELINE, "return 1", "return 2")
    edit(fork, LAYERS, "x + 0", "x + 1")
    hunk = BlamedHunk(PIPELINE, 7, "other", ("a\n",), ("b\n",), Execution.NOT_KNOWN)
    change = BlamedChange((hunk,), ("decoder.layers.*.mlp",))
    blaming.answer = Blame(Blaming.PROVEN, "main", (change,))
    out = pull("--format", "github", code=1)
    (line,) = (line for line in out.splitlines() if line.startswith("::error"))
    assert line.startswith(f"::error file={PIPELINE},line=7,title=ttrace%3A diverged in decoder")
    assert "%0Aproven: with this hunk on main the job diverges" in line
    trial, script, good = blaming.asked
    assert script == fork / "ttrace-ci" / "trees" / "head" / "pretrain_gpt.py"
    assert good == git(fork, "rev-parse", "main")
    assert trial.ranks == 2
    assert str(fork / "ttrace-ci" / "trees" / "head") in trial.environment["PYTHONPATH"]


def test_a_culprit_in_code_that_did_not_change(fork, checked, pull, monkeypatch):
    """Its line is an error, and the changed code that ran is a warning."""
    edit(fork, LAYERS, "x + 0", "x + 1")
    monkeypatch.setattr(pull_request, "place", lambda *given: ("pretrain_gpt.py", 1))
    out = pull("--format", "github", code=1)
    error, warning = (line for line in out.splitlines() if line.startswith("::"))
    assert error.startswith("::error file=pretrain_gpt.py,line=1,")
    assert warning.startswith(f"::warning file={LAYERS},line=3,")
    assert "this code ran%2C and has changed::ci/tp.yaml" in warning


def test_a_fault_that_the_base_has(fork, checked, pull):
    """It is told, and is not the pull request's."""
    git(fork, "checkout", "-q", "main")
    edit(fork, LAYERS, "x + 0", "x + 1")
    git(fork, "checkout", "-q", "-B", "change")
    edit(fork, LAYERS, "return x + 1", "return (x) + 0 + x + 1")
    out = pull("--format", "github")
    assert "::notice title=ttrace%3A not from this pull request::ci/tp.yaml" in out
    assert "::error" not in out


def test_what_cannot_be_checked(fork, checked, pull):
    """Because of the pull request: an error. Before it, too: a warning, if anything was checked."""
    edit(fork, LAYERS, "    return x", "    raise x\n    return x")
    out = pull("--format", "github", code=2)
    assert "::error title=ttrace could not check this pull request::ci/tp.yaml" in out
    assert "the rank died" in out
    git(fork, "branch", "-f", "main", "change")
    edit(fork, LAYERS, "raise x", "raise x + 0")
    assert "::warning title=ttrace could not check::" in pull("--format", "github", code=2)
    edit(fork, PIPELINE, "x + 0", "0 + x")
    assert "::warning title=ttrace could not check::" in pull("--format", "github")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent", "--base", "main"], "absent: no such directory"),
        (["..", "--base", "main"], "is not in a git checkout"),
        ([".", "--base", "absent"], "'absent' is not a commit of "),
        ([".", "--base", "other"], "fetch-depth: 0"),
        ([".", "--base", "main"], "give a checkout of Megatron-LM"),
        ([".", "--base", "main", "--recipe", "absent.yaml"], "absent.yaml is not in HEAD"),
        ([".", "--base", "main", "--recipe", "../right"], "../right is not in HEAD"),
        ([".", "--base", "main", "--recipes", "megatron"], "no recipe can be checked"),
    ],
)
def test_bad_input(fork, checked, capsys, words, message):
    """One line that says what to do."""
    git(fork, "checkout", "-q", "--orphan", "other")
    commit(fork, "unrelated")
    git(fork, "checkout", "-q", "change")
    assert main(["ci", *words]) == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert message in error
    assert "--checkout" not in error  # which this command does not have


def test_a_recipe_that_is_removed_with_a_fault(fork, checked, pull):
    """Its job is checked once more; alone, removing it fails the review by name."""
    git(fork, "rm", "-q", "ci/tp.yaml")
    commit(fork, "no tensor parallelism")
    out = pull("--format", "github", code=2)
    assert "::error title=ttrace%3A recipe removed%3A ci/tp.yaml::" in out
    assert ("head", "tensor") in checked.asked
    edit(fork, LAYERS, "x + 0", "x + 1")
    assert f"::error file={LAYERS},line=3" in pull("--format", "github", code=1)


def test_a_recipe_that_is_broken(fork, checked, pull):
    (fork / "ci" / "tp.yaml").write_text("MODEL_ARGS: [\n")
    edit(fork, LAYERS, "x + 0", "x + 1")
    out = pull("--format", "github", code=1)
    assert "::error file=ci/tp.yaml,line=1,title=ttrace%3A recipe broken%3A ci/tp.yaml::" in out
    assert f"::error file={LAYERS},line=3" in out


def test_a_recipe_that_is_renamed_or_changed(fork, checked, pull):
    """Under another name it is the same; with another job, the base's job is checked as well."""
    git(fork, "mv", "ci/tp.yaml", "ci/other.yaml")
    commit(fork, "another name")
    out = pull("--format", "github")
    assert "renamed: ci/tp.yaml is now ci/other.yaml" in out
    assert "::" not in out
    edit(fork, "ci/pp.yaml", "pipeline", "context")
    out = pull("--format", "github")
    assert "::warning file=ci/pp.yaml,line=1,title=ttrace%3A recipe changed::" in out
    assert ("head", "pipeline") in checked.asked


@pytest.mark.parametrize("damage", ["empty", "partial", "other"])
def test_damaged_records_skip_nothing(fork, checked, pull, damage):
    """Records of a cache that are empty, cut off, or of other content are made again."""
    pull()
    file = fork / "ttrace-ci" / "reached.json"
    content = json.loads(file.read_text())
    for key, records in content["jobs"].items():
        if damage == "empty":
            content["jobs"][key] = {} if isinstance(records, dict) else [{**records[0], "ran": {}}]
        for record in records if isinstance(records, list) and damage != "empty" else ():
            if damage == "partial":
                for functions in record["ran"].values():
                    functions.pop("run", None)
            else:
                record["tree"] = "0" * 40
    file.write_text(json.dumps(content))
    edit(fork, LAYERS, "x + 0", "x + 1")
    count = len(checked.asked)
    pull(code=1)
    assert {("head", "tensor"), ("head", "pipeline")} <= {*checked.asked[count:]}


def test_changed_code_that_no_recipe_runs(fork, checked, pull):
    """A warning on the changed line; not for what runs, or what no training can import."""
    edit(fork, LAYERS, "return 1", "return 2")
    (fork / "megatron" / "unused.py").write_text("def idle():\n    return 0\n\n\ndef too(): ...\n")
    (fork / "tool.py").write_text("def idle():\n    return 0\n")
    edit(fork, PIPELINE, "x + 0", "0 + x")
    rows = json.loads(pull("--format", "json"))
    assert {(row["level"], row["topic"]) for row in rows} == {("warning", "not_executed")}
    places = [(row["file"], row["line"], row["title"].rpartition(" ")[2]) for row in rows]
    unused = "megatron/unused.py"
    assert places == [(LAYERS, 7, "other"), (unused, 1, "idle"), (unused, 5, "too")]
    out = pull("--format", "github")
    warnings = [line for line in out.splitlines() if line.startswith("::")]
    assert len(warnings) == len(rows)
    assert warnings[0].startswith(f"::warning file={LAYERS},line=7,title=ttrace%3A changed%2C but")
    issues = json.loads(pull("--format", "gitlab"))
    assert [row["check_name"] for row in issues] == ["ttrace/not_executed"] * len(rows)
    assert f"{LAYERS}:7: warning: ttrace: changed, but not executed" in pull()


def test_much_changed_code_that_no_recipe_runs(fork, checked, pull):
    """A warning per file: hosts show ten of a kind."""
    code = "".join(f"def idle{number}():\n    return 0\n\n\n" for number in range(12))
    (fork / "megatron" / "unused.py").write_text(code)
    edit(fork, LAYERS, "return 1", "return 2")
    rows = json.loads(pull("--format", "json"))
    assert [(row["file"], row["line"]) for row in rows] == [(LAYERS, 7), ("megatron/unused.py", 1)]
    assert "idle9, ...: changed" in rows[1]["message"]


def test_no_secret_reaches_code_of_the_pull_request(fork, checked, pull, monkeypatch):
    """Neither the scripts that are read for their commands nor the checks see other variables."""
    seen = []
    (fork / "ci" / "more.sh").write_text("torchrun pretrain_gpt.py --num-layers 2\n")
    commit(fork, "a script")
    for name in ("GITHUB_TOKEN", "NCCL_AUTH", "WANDB_API_KEY", "MEGATRON_DB_URL", "ANYTHING"):
        monkeypatch.setenv(name, "hidden")
    monkeypatch.setenv("NCCL_NET", "https://user:hidden@host")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    resolve = collect.shell_script.resolve

    def look(*given):
        seen.append(dict(os.environ))
        return resolve(*given)

    monkeypatch.setattr(collect.shell_script, "resolve", look)
    before = dict(os.environ)
    pull()
    assert len(seen) == 1
    for environment in (*seen, checked.environment):
        assert "hidden" not in " ".join(environment.values())
        assert environment["NCCL_ALGO"] == "Ring"
        assert environment["PATH"]
        assert environment["HOME"] != before.get("HOME")
    assert dict(os.environ) == before


def test_names_that_forge_commands(fork, checked, capsys):
    """A recipe's name is one line, and no command of the host of code."""
    (fork / "ci" / "x\n::error::forged\n##[error]forged.yaml").write_text("MODEL_ARGS: [\n")
    commit(fork, "a name")
    main(["ci", ".", "--base", "main", "--recipes", "ci", "--quiet", "--format", "github"])
    printed = capsys.readouterr()
    lines = (printed.out + printed.err).splitlines()
    assert any("forged" in line for line in lines)
    assert not any(line.strip().startswith("::error") or "##[" in line for line in lines)
