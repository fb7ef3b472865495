# SPDX-License-Identifier: Apache-2.0
"""``ttrace mutants``, in separate processes: it activates the CPU backend."""

import json
from pathlib import Path

import pytest

from tests import warm
from tests.integration.jobs import environment

ROOT = Path(__file__).parents[2]
DOUBLED = "tensor_parallel.mappings:_ReduceFromModelParallelRegion.forward:double-collective:*"
UNREACHED = "tensor_parallel.inference_layers:*"


def ttrace(*words, timeout=280):
    command = ["-m", "megatron_ttrace", "mutants", *words]
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


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "--only", "nothing*"], "no mutant matches nothing*"),
        (["run", "--only", DOUBLED, "--layout", "tp3"], "--layout tp3: unknown, known are tp2"),
        (["run", "--count", "0"], "--count 0: at least 1"),
        (["run", "--json", "no/such/folder.json"], "not writable"),
    ],
)
def test_wrong_use(words, message):
    """A clear message, exit code 2, no traceback."""
    code, _, errors = ttrace(*words)
    assert code == 2
    assert message in errors
    assert "Traceback" not in errors


@pytest.mark.slow
def test_one_mutant(tmp_path):
    """It is found in a job that runs its line, at the module whose collective it doubles."""
    out = tmp_path / "mutants.json"
    words = ["--layout", "tp2", "--directory", str(tmp_path), "--json", str(out)]
    code, output, errors = ttrace("run", "--only", DOUBLED, *words)
    assert code == 0, errors
    assert "killed 100.0%, of the silent ones 100.0%" in " ".join(output.split())
    report = json.loads(out.read_text())
    assert (report["run"], report["killed"], report["diverged"], report["passed"]) == (
        1,
        1,
        1,
        True,
    )
    (trial,) = report["mutants"][0]["trials"]
    assert (trial["layout"], trial["fate"]) == ("tp2", "diverged")
    assert "embedding.word_embeddings output (diverged)" in trial["told"]
    # No file of the check names the mutant, or the command that put it in.
    folder = tmp_path / "tp2"
    told = [folder / "summary.json", folder / "verdicts.jsonl", *folder.glob("logs/*.log")]
    assert len(told) == 4
    named = ("double-collective", "_ReduceFromModelParallelRegion", "--only")
    assert not [word for word in named for path in told if word in path.read_text()]


@pytest.mark.slow
def test_overlap_is_seen(tmp_path):
    """Overlap starts with the second step, and the traced step has it."""
    out = tmp_path / "mutants.json"
    words = ["--layout", "dp2", "--directory", str(tmp_path), "--json", str(out)]
    code, _, errors = ttrace("run", "--only", "*.register_grad_ready:drop-collective:*", *words)
    assert code == 0, errors
    report = json.loads(out.read_text())
    assert (report["run"], report["survived"]) == (1, 0)


@pytest.mark.slow
def test_not_reached(tmp_path):
    """A fault in a line that no job runs is not a mutant."""
    words = ["--layout", "tp2", "--directory", str(tmp_path)]
    code, _, errors = ttrace("run", "--only", UNREACHED, *words)
    assert code == 2
    assert "no layout runs the line" in errors


@pytest.mark.nightly
def test_campaign(tmp_path):
    """The sample of the nightly run: at least 60 mutants from all packages, 95 % of them killed."""
    out = tmp_path / "mutants.json"
    code, _, errors = ttrace("run", "--directory", str(tmp_path), "--json", str(out), timeout=3000)
    report = json.loads(out.read_text())
    survived = [m["id"] for m in report["mutants"] if m["fate"] == "survived"]
    assert code == 0, (report["score"], survived, errors[-500:])
    assert report["run"] - report["equivalent"] >= 60
    assert len({m["module"].split(".")[2] for m in report["mutants"]}) == 5
