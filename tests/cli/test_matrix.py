# SPDX-License-Identifier: Apache-2.0
"""``ttrace matrix`` without running Megatron: seeds, lines, totals."""

import json
import math

import pytest

from megatron_ttrace.cli.main import main
from megatron_ttrace.jobs import job as jobs
from megatron_ttrace.trace import files
from megatron_ttrace.trace.records import Exactness, Result, Summary
from tests.report.synthetic_report import make_verdict


@pytest.fixture
def ran(monkeypatch):
    """The jobs that would run; every check finds one tensor with a margin of 0.3."""
    jobs_run = []

    def run(job, *, fork, say=None):
        jobs_run.append(job)
        return Summary(
            Result.EQUIVALENT, {}, (), {}, {}, {}, exactness=Exactness(5, len(jobs_run) - 1)
        )

    monkeypatch.setattr(jobs, "prepare", lambda *words, **more: False)
    monkeypatch.setattr(jobs, "run", run)
    monkeypatch.setattr(
        files, "load_report", lambda where: (None, [make_verdict(rel_err=3e-4, tolerance=1e-3)])
    )
    return jobs_run


def test_every_configuration_with_every_seed(ran, tmp_path, capsys):
    """Names and directories differ by seed; the total has the worst margin and exactness."""
    words = ["matrix", "tp2/gpt/*", "--seeds", "1,7", "--directory", str(tmp_path)]
    assert main(words) == 0
    assert [job.arguments[-2:] for job in ran] == [("--seed", "1")] * 2 + [("--seed", "7")] * 2
    assert len({job.directory for job in ran}) == 4
    text = capsys.readouterr().out
    assert "[4/4] tp2/gpt/bf16/seed7" in text
    assert "decoder.layers.0.mlp output.0, 3 of 5 not bitwise\n" in text
    assert "4 of 4 equivalent" in text
    assert "worst healthy margin 0.3 " in text
    assert "6 of 20 that must be bitwise equal are not" in text


def test_json_has_no_infinity(ran, tmp_path, monkeypatch, capsys):
    """Which JSON lacks; a margin without a limit is a text, as in all files."""
    verdict = make_verdict(rel_err=math.inf, tolerance=1e-3)
    monkeypatch.setattr(files, "load_report", lambda where: (None, [verdict]))
    assert main(["matrix", "tp2/gpt/fp32", "--json", "--directory", str(tmp_path)]) == 0
    row = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert row["worst_margin"] == "inf"


def test_one_seed_keeps_the_plain_names(ran, tmp_path, capsys):
    """With one seed, names are those of the list; flags may have spaces, as in a shell."""
    flags = "--ttrace-reference-args '--attention-backend unfused'"
    words = ["--seed", "3", "--directory", str(tmp_path), "--ttrace-flags", flags]
    assert main(["matrix", "tp2/gpt/fp32", *words]) == 0
    assert "] tp2/gpt/fp32 " in capsys.readouterr().out
    assert ran[0].directory == tmp_path / "tp2-gpt-fp32"
    assert ran[0].settings.reference_args == "--attention-backend unfused"
