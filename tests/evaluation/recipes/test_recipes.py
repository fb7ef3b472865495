# SPDX-License-Identifier: Apache-2.0
"""A stand-in tree's configurations are found, shrunk, run once, and listed in a table."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ttrace.cli import recipes as cli_recipes
from megatron_ttrace.cli.main import main
from megatron_ttrace.evaluation.recipes import collect
from megatron_ttrace.evaluation.recipes import run as running
from megatron_ttrace.evaluation.recipes.collect import Answer, SmallJob
from megatron_ttrace.evaluation.recipes.run import JobRow
from megatron_ttrace.trace import codec, ends
from megatron_ttrace.trace.errors import ExitCode, TTraceError

ROOT = Path(__file__).resolve().parents[3]
MODEL = {
    "--num-layers": 12,
    "--hidden-size": 512,
    "--num-attention-heads": 8,
    "--seq-length": 1024,
    "--max-position-embeddings": 1024,
    "--micro-batch-size": 4,
    "--global-batch-size": 64,
    "--train-iters": 50,
    "--lr": 0.00015,
    "--transformer-impl": "local",
    "--data-path": "${DATA_PATH}/text",
    "--save": "${CHECKPOINT_SAVE_PATH}",
    "--use-distributed-optimizer": True,
}


@pytest.fixture
def checkout(tmp_path):
    """Four training configurations that make four jobs, and two others."""
    root = tmp_path / "Megatron-LM"
    (root / "megatron").mkdir(parents=True)
    (root / "pretrain_gpt.py").symlink_to(ROOT / "launch" / "pretrain_gpt.py")
    cases = root / "tests" / "functional_tests" / "test_cases"
    for name, mode, more in (
        ("gpt/tp4", "", {"--tensor-model-parallel-size": 4}),
        ("gpt/tp2", "", {"--tensor-model-parallel-size": 2, "--log-interval": 1}),
        ("gpt/pp4", "", {"--pipeline-model-parallel-size": 4}),
        ("gpt/inference", "MODE: inference", {}),
        ("t5/tp1", "", {}),
    ):
        folder = cases / name
        folder.mkdir(parents=True)
        text = "ENV_VARS:\n  NCCL_ALGO: Ring\n  N_REPEATS: 5\nMODEL_ARGS:\n"
        for flag, value in {**MODEL, **more}.items():
            text += f"  {flag}: {str(value).lower() if value is True else value}\n"
        (folder / "model_config.yaml").write_text(f"{text}{mode}\n")
    example = root / "examples" / "gpt3"
    example.mkdir(parents=True)
    (example / "train.sh").write_text(
        "mkdir -p made\n"
        "torchrun --nproc-per-node 8 pretrain_gpt.py --pipeline-model-parallel-size 16 "
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 "
        "--max-position-embeddings 2048 --micro-batch-size 1 --global-batch-size 1536 "
        "--train-iters 500000 --lr 1e-4 --load $1\n"
    )
    return root


def test_configurations_are_found_and_equal_jobs_are_one(checkout):
    """By what they run, not by their sizes or names."""
    recipes = {recipe.name: recipe for recipe in collect.collect(checkout)}
    assert {name: (r.is_trained, r.answer) for name, r in recipes.items()} == {
        "gpt/inference": (False, None),
        "gpt/pp4": (True, None),
        "gpt/tp2": (True, None),
        "gpt/tp4": (True, None),
        "t5/tp1": (False, Answer.COULD_NOT_CHECK),
        "examples/gpt3/train.sh": (True, None),
    }
    assert recipes["gpt/tp2"].jobs == recipes["gpt/tp4"].jobs
    assert len(running.jobs_of(recipes.values())) == 4
    job, _ = recipes["gpt/tp2"].jobs
    assert job.environment == (("NCCL_ALGO", "Ring"),)
    assert not (checkout / "made").exists()
    assert "--load" in recipes["examples/gpt3/train.sh"].lost[0]


def test_examples_with_options_by_name(checkout):
    """Are configurations, too; other YAML files of examples are not."""
    example = checkout / "examples" / "gpt3"
    (example / "other.yaml").write_text("image: x\n")
    options = [f"  {flag[2:].replace('-', '_')}: {value}\n" for flag, value in MODEL.items()]
    (example / "small.yaml").write_text(f"ARGS:\n{''.join(options)}")
    recipes = {recipe.name: recipe for recipe in collect.collect(checkout, ["examples/*"])}
    assert [*recipes] == ["examples/gpt3/small.yaml", "examples/gpt3/train.sh"]
    assert recipes["examples/gpt3/small.yaml"].is_trained


def test_patterns(checkout, tmp_path):
    """Choose by name."""
    assert [recipe.name for recipe in collect.collect(checkout, ["gpt/tp*"])] == [
        "gpt/tp2",
        "gpt/tp4",
    ]
    with pytest.raises(TTraceError, match="give a checkout of Megatron-LM"):
        collect.collect(tmp_path / "megatron_ttrace")


def test_a_folder_of_scripts(checkout):
    """It may be any; what does not train is left out."""
    folder = checkout / "examples"
    (folder / "pretrain_gpt.py").touch()
    (folder / "gpt3" / "download.sh").write_text("curl https://example.org\n")
    (recipe,) = collect.collect(folder, anywhere=True)
    assert (recipe.name, recipe.is_trained) == ("gpt3/train.sh", True)
    assert collect.collect(folder, ["other/*"], anywhere=True) == []
    with pytest.raises(TTraceError, match="give a checkout"):
        collect.collect(folder)


def test_scripts_of_the_same_name(checkout, tmp_path):
    """With the same arguments they are jobs of their own, as in another checkout."""
    train = (checkout / "examples" / "gpt3" / "train.sh").read_text()
    keys = []
    for root in (tmp_path / "one", tmp_path / "two"):
        for name in "ab":
            (root / name).mkdir(parents=True)
            (root / name / "pretrain_gpt.py").write_text(f"import {name}\n")
            script = train.replace("pretrain_gpt.py", f"{name}/pretrain_gpt.py")
            (root / name / "train.sh").write_text(script)
        keys.append([*running.jobs_of(collect.collect(root, anywhere=True))])
    assert keys[0] == keys[1]
    assert len(keys[0]) == 2


def test_results_are_those_of_their_code(checkout, tmp_path, monkeypatch):
    """Half a line is none; of other code, or with other flags, or unanswered, nothing is known."""
    digests = {"code": "a"}
    monkeypatch.setattr(running.fingerprint, "code", lambda script: digests.copy())
    recipes = collect.collect(checkout)
    jobs = running.jobs_of(recipes)
    results = running.Results(tmp_path)
    for job in jobs.values():
        answer = Answer.DIVERGED if "pipeline" in " ".join(job.arguments) else Answer.EQUIVALENT
        results.keep(job, JobRow(key=job.key, answer=answer, ranks=job.ranks, why="because"))
    with (tmp_path / running.RESULTS).open("a") as out:
        out.write('{"key": "cut of')

    def finished(*flags):
        again = running.Results(tmp_path, flags)
        return {key: row for key, job in jobs.items() if (row := again.of(job))}

    answers = {row.name: row.answer for row in running.coverage(recipes, finished())}
    assert answers["gpt/tp2"] is answers["gpt/tp4"] is Answer.EQUIVALENT
    assert answers["gpt/pp4"] is Answer.DIVERGED
    assert answers["gpt/inference"] is None
    assert answers["t5/tp1"] is Answer.COULD_NOT_CHECK
    assert finished("--ttrace-isolate") == {}
    *others, last = jobs.values()
    running.Results(tmp_path).keep(
        last, JobRow(key=last.key, answer=Answer.COULD_NOT_CHECK, ranks=1, why="took too long")
    )
    assert list(finished()) == [job.key for job in others]
    digests["code"] = "b"
    assert finished() == {}


@pytest.mark.parametrize(
    ("answer", "shown", "code"),
    [
        (Answer.DIVERGED, Answer.DIVERGED, ExitCode.DIVERGED),
        (Answer.COULD_NOT_CHECK, Answer.COULD_NOT_CHECK, ExitCode.COULD_NOT_CHECK),
        (Answer.FAILS, Answer.FAILS, ExitCode.COULD_NOT_CHECK),
        (Answer.EQUIVALENT, None, ExitCode.EQUIVALENT),
    ],
)
def test_a_bad_answer_does_not_wait_for_other_jobs(answer, shown, code):
    """With ``--limit``, a configuration of several jobs may have a part of its answers.

    A known finding excuses no divergence: it is the arguments', so another fault may hide behind
    it. Jobs that fail without us were not checked.
    """
    jobs = tuple(SmallJob("x.py", (name,), 2, ()) for name in "ab")
    recipe = collect.Recipe("a", jobs)
    row = JobRow(key=jobs[0].key, answer=answer, ranks=2, why="because", finding="MTP and CP")
    (shown_row,) = rows = running.coverage([recipe], {row.key: row})
    assert shown_row.answer is shown
    assert cli_recipes._exit_code(rows) is code


def test_refusals_are_megatrons_own(tmp_path):
    """By where the error was raised, never by its message."""
    logs = tmp_path / "logs"
    logs.mkdir()
    log = logs / "rank0.log"
    log.write_text("ValueError: x\n")
    for file, name, by_megatron in (
        ("megatron/training/arguments.py", "validate_args", True),
        ("megatron/core/transformer/transformer_config.py", "__post_init__", True),
        ("megatron/core/tensor_parallel/layers.py", "forward", False),
        ("pretrain.py", "__post_init__", False),
    ):
        frames = (ends.Frame("megatron/core/utils.py", 1, "check"), ends.Frame(file, 3, name))
        record = ends.EndRecord(code=1, at=1, message="x", error="ValueError", frames=frames)
        ends.file_of(log).write_text(json.dumps(codec.encode(record)))
        assert running.refused(tmp_path) is by_megatron
    ends.file_of(log).unlink()
    log.write_text("x.py: error: unrecognized arguments: --no-such-flag\n")
    assert running.refused(tmp_path)


def test_the_table_without_running(checkout, tmp_path, capsys):
    """Counts and reasons; the exit code says that one cannot be checked."""
    words = ["recipes", str(checkout), "--dry-run", "--directory", str(tmp_path / "out")]
    assert main(words) == 2
    out = capsys.readouterr().out
    assert re.search(r"4 +not run yet", out)
    assert re.search(r"1 +cannot be checked", out)
    assert "are equivalent" not in out
    assert not (tmp_path / "out").exists()
    assert main([*words, "--json", "--only", "gpt/*"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert {row["name"] for row in table["recipes"]} == {
        "gpt/inference",
        "gpt/pp4",
        "gpt/tp2",
        "gpt/tp4",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["CHECKOUT", "--only", "nothing*"], r"no configuration matches nothing\*"),
        (["CHECKOUT", "--only", "gpt/*", "--only", "no*"], r"no configuration matches no\*"),
        (["CHECKOUT", "--only", "gpt/inference"], "nothing was checked"),
    ],
)
def test_bad_input(checkout, tmp_path, monkeypatch, capsys, words, message):
    """One line."""
    monkeypatch.chdir(tmp_path)
    words = [str(checkout) if word == "CHECKOUT" else word for word in words]
    assert main(["recipes", *words]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """A checker whose checks fail, without Megatron, and the jobs that it runs without a check."""
    runs = SimpleNamespace(started=[], codes=[])

    def fails(self, case):
        raise TTraceError("rank 0 failed")

    def run_ranks(nproc, command, logs, **options):
        runs.started.append((nproc, options["world"], command[1:]))
        return SimpleNamespace(codes=runs.codes)

    def without_megatron(self, directory, *, flags, script):
        self.directory, self._flags, self.script = directory, flags, script
        self._environment, self.forks = {}, False

    monkeypatch.setattr(running.Runner, "run", fails)
    monkeypatch.setattr(running.Runner, "__init__", without_megatron)
    monkeypatch.setattr(running.ranks, "run_ranks", run_ranks)
    monkeypatch.setattr(running, "launch_dir", lambda: tmp_path / "ours")
    script = tmp_path / "x.py"
    runs.checker = running.Checker(tmp_path, script, 60.0, lambda place: lambda job: ())
    return runs


@pytest.mark.parametrize(
    ("codes", "answer"), [([0, 0], Answer.COULD_NOT_CHECK), ([0, 1], Answer.FAILS)]
)
def test_a_job_that_cannot_be_checked(tmp_path, alone, codes, answer):
    """Whether it fails without a check, too, is tried."""
    script, alone.codes = str(tmp_path / "ours" / "x.py"), codes
    assert alone.checker(SmallJob(script, ("--num-layers", "2"), 2, ())).answer is answer
    assert alone.started == [(2, 2, (script, "--num-layers", "2"))]
    # A user's script may go on after the steps that a check ends it after.
    row = alone.checker(SmallJob(str(tmp_path / "x.py"), ("--num-layers", "2"), 2, ()))
    assert row.answer is Answer.COULD_NOT_CHECK
    assert len(alone.started) == 1


def test_a_model_that_cannot_be_built(tmp_path, alone):
    """A job fails before anything is checked, if all of its ranks fail without a check, too."""
    script, alone.codes, alone.checker.runner.forks = str(tmp_path / "ours" / "x.py"), [1], True
    assert alone.checker(SmallJob(script, ("--bf16",), 4, ())).answer is Answer.FAILS
    building = (script, "--bf16", "--fake-process-group", "--split", "0,1,0")
    assert alone.started == [(1, 4, building), (4, 4, (script, "--bf16"))]
