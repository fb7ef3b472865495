# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay mutants``, in separate processes: it activates the CPU backend."""

import datetime
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.integration.jobs import environment

ROOT = Path(__file__).parents[2]
DOUBLED = "tensor_parallel.mappings:_ReduceFromModelParallelRegion.forward:double-collective:*"
OVERLAPPED = "distributed.param_and_grad_buffer:*.register_grad_ready:drop-collective:*"
UNREACHED = "tensor_parallel.inference_layers:*"


def ttrace(*words, timeout=840):
    command = ["-m", "tests.assay", "mutants", *words]
    done = warm.run(command, cwd=ROOT, env=environment(), timeout=timeout)
    return done.returncode, done.stdout, done.stderr


def test_list():
    """As JSON and as text."""
    code, output, _ = ttrace("list", "--only", DOUBLED, "--json")
    assert code == 0
    (mutant,) = json.loads(output)
    assert mutant["fragment"] in mutant["replacement"]
    code, output, _ = ttrace("list", "--only", DOUBLED)
    assert code == 0
    assert "1 mutants" in output


def test_list_of_a_checkout(tmp_path):
    """Its source is scanned, not that of the installed Megatron."""
    core = tmp_path / "megatron" / "core"
    (core / "optimizer").mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "optimizer" / "own.py").write_text("def f(x, world_size):\n    return x / world_size\n")
    # A process of its own: a warm one has imported the installed Megatron.
    command = [sys.executable, "-m", "tests.assay", "mutants", "list", "--checkout", tmp_path]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    assert {one["module"] for one in json.loads(done.stdout)} == {"megatron.core.optimizer.own"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--only", "nothing:*"], "no mutant matches nothing:*"),
        (["run", "--only", DOUBLED, "--layout", "tp3"], "--layout tp3: unknown, known are tp2"),
        (["run", "--count", "0"], "--count 0: at least 1"),
        (["list", "--checkout", "no/such"], "--checkout no/such: has no megatron/core"),
        (["score", "no/such.jsonl"], "no/such.jsonl: cannot be read"),
        (["run", "--json", "no/such/folder.json"], "not writable"),
    ],
)
def test_wrong_use(words, message):
    """A clear message, exit code 2, no traceback."""
    code, _, errors = ttrace(*words)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """The directory of a run of one mutant, its output and its report."""
    folder = tmp_path_factory.mktemp("one")
    out = folder / "mutants.json"
    words = ["--layout", "tp2", "--directory", str(folder), "--all", "--json", str(out)]
    code, output, errors = ttrace("run", "--only", DOUBLED, *words)
    assert code == 0, errors
    return folder, " ".join(output.split()), json.loads(out.read_text())


@pytest.mark.slow
def test_one_mutant(one):
    """It is found in a job that runs its line, at the module whose collective it doubles."""
    folder, told, report = one
    assert "killed 100.0%, of the silent ones 100.0%" in told
    assert "right module 100.0%, cause told 100.0%, of these true 100.0%" in told
    assert [report[name] for name in ("run", "killed", "diverged", "right", "true")] == [1] * 5
    assert report["passed"]
    (trial,) = report["mutants"][0]["trials"]
    assert (trial["layout"], trial["fate"]) == ("tp2", "diverged")
    assert "embedding.word_embeddings output (diverged)" in trial["told"]
    # No file of the check names the mutant, or the command that put it in.
    folder = folder / "tp2"
    files = [folder / "summary.json", folder / "verdicts.jsonl", *folder.glob("logs/*.log")]
    assert len(files) == 4
    named = ("double-collective", "_ReduceFromModelParallelRegion", "--only")
    assert not [word for word in named for path in files if word in path.read_text()]


@pytest.mark.slow
def test_all_is_continued(one):
    """What rows.jsonl has does not run again, and can be scored."""
    folder, _, _ = one
    rows = folder / "rows.jsonl"
    before = rows.read_text()
    words = ["--layout", "tp2", "--directory", str(folder), "--all"]
    code, output, errors = ttrace("run", "--only", DOUBLED, *words)
    assert code == 0, errors
    assert f"1 are in {rows}" in errors
    assert rows.read_text() == before
    code, output, errors = ttrace("score", str(rows), "--seed", "2", "--seed", "3", "--json")
    assert code == 0, errors
    seeds = json.loads(output)["seeds"]
    assert {seed: score["true"] for seed, score in seeds.items()} == {"2": 1, "3": 1}


@pytest.mark.nightly
def test_overlap_is_seen(tmp_path):
    """Overlap starts with the second step, and the traced step has it."""
    out = tmp_path / "mutants.json"
    words = ["--layout", "dp2", "--directory", str(tmp_path), "--json", str(out)]
    code, _, errors = ttrace("run", "--only", OVERLAPPED, *words)
    assert code == 0, errors
    report = json.loads(out.read_text())
    assert (report["run"], report["survived"]) == (1, 0)
    today = datetime.datetime.now(datetime.UTC).date()
    days = {f"{today - datetime.timedelta(days):%Y%m%d}" for days in (0, 1)}
    assert set(report["seeds"]) < days


@pytest.mark.nightly
def test_not_reached(one):
    """A fault in a line that no job runs is not a mutant."""
    words = ["--layout", "tp2", "--directory", str(one[0])]
    code, _, errors = ttrace("run", "--only", UNREACHED, *words)
    assert code == 2
    assert "no layout runs the line" in errors
