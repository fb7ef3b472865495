# SPDX-License-Identifier: Apache-2.0
"""One mutant from the scan to its row, and when a mutant has no effect."""

import json
from types import SimpleNamespace

import pytest

from tests.assay import __main__, harness
from tests.assay.harness import Row
from tests.assay.mutants import campaign, scan
from tests.integration.jobs import ROOT, python

DOUBLED = "tensor_parallel.mappings:_ReduceFromModelParallelRegion.forward:double-collective:*"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The directory of a run of one mutant."""
    home = tmp_path_factory.mktemp("one")
    words = ("run", "--only", DOUBLED, "--layout", "tp2", "--directory", home, "--all")
    python("-m", "tests.assay", "mutants", *words, cwd=ROOT, code=0)
    return home


@pytest.mark.nightly
def test_one_mutant(folder):
    """It is found in a job that runs its line, at the module whose collective it doubles."""
    _, (row,) = harness.load(folder / "rows.jsonl")
    assert all(row.marks[column] for column in ("found", "right module", "cause true"))
    assert row.note.startswith("tp2: embedding.word_embeddings output (diverged)")


@pytest.mark.nightly
def test_the_checker_knows_nothing(folder):
    """No file of the check names the mutant, or the command that put it in."""
    job = folder / "tp2"
    files = [job / "summary.json", job / "verdicts.jsonl", *job.glob("logs/*.log")]
    assert len(files) == 4
    named = ("double-collective", "_ReduceFromModelParallelRegion", "--only", "tests.assay mutants")
    assert not [word for word in named for path in files if word in path.read_text()]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", "--only", "nothing:*"), "nothing matches nothing:*"),
        (("run", "--only", DOUBLED, "--layout", "tp3"), "nothing matches tp3"),
    ],
)
def test_wrong_use(words, message, capsys):
    """A clear message, exit code 2."""
    assert __main__.main(["mutants", *words]) == 2
    assert message in capsys.readouterr().err


def test_help():
    """Every command of ``tests.assay`` explains itself."""
    parser = __main__.build_parser()
    (commands,) = (action.choices for action in parser._actions if action.choices)
    assert len(commands) == 11
    for command in commands.values():
        assert "exit" in command.format_help() or "example" in command.format_help(), command.prog


@pytest.mark.parametrize(
    ("trained", "marks"),
    [
        ([["a"], ["a"]], {"inert": True}),
        ([["a"], ["b"]], {"found": False}),
        ([["a"], [], ["a"]], {"inert": True}),
        ([["a"], [], ["b"]], {"found": False}),
        ([["a"], [], []], {"found": False}),
        ([[], ["a"], ["a"], ["a"]], {"inert": True}),
    ],
    ids=["same", "other", "failed-same", "failed-other", "failed-twice", "healthy-failed"],
)
def test_a_run_that_the_machine_ended(monkeypatch, trained, marks):
    """What survives its check trains to its end: a run that did not is repeated, once."""
    one = object.__new__(campaign.Campaign)
    one._healthy = {}
    results = iter(trained)
    monkeypatch.setattr(campaign.codec, "encode", lambda mutant: "")
    monkeypatch.setattr(one, "_trained", lambda layout, order: next(results))
    monkeypatch.setattr(one, "layouts_of", lambda mutant: [SimpleNamespace(name="tp2")])
    monkeypatch.setattr(one, "_judged", lambda mutant, job: Row("m", "o", {"found": False}))
    assert one._tried(SimpleNamespace(id="m")).marks == marks
    assert not list(results)


def test_the_table_of_jobs():
    """Its words are known, and jobs to try first exist."""
    jobs = {job.name: job for job in campaign.layouts([])}
    words = [word for job in jobs.values() for word in job.arguments]
    assert not {"tp2", "zero", "buckets", "aux", "accumulate"} & {*words}
    for package in scan.PACKAGES:
        order = campaign.in_order(package.removeprefix("megatron.core."), jobs.values())
        assert len(order) == len(jobs) > 30
    assert json.dumps([job.arguments for job in jobs.values()]).count("mtp-num-layers") == 2
