# SPDX-License-Identifier: Apache-2.0
"""No damaged input of any parser gives a traceback, hangs, takes the memory, or is believed."""

import os
import random
from pathlib import Path

import pytest

from tests.assay.faults import campaign
from tests.assay.faults.baseline import Baseline
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Problem, Row
from tests.assay.faults.fuzz import harness
from tests.assay.faults.fuzz.targets import build, targets

PARSERS = (
    *("verdicts", "summary", "tolerances", "wire", "patch", "data", "flags", "plant"),
    *("index", "meta", "header"),
)
FEW = 16
MANY = 1000
"""Inputs of each parser every night: 11,000 in all."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that diverged."""
    return build(tmp_path_factory.mktemp("fuzz"))


def inject(attempts: list[harness.Attempt], parser: str, inputs: int, work: Path) -> list[Row]:
    """Give a parser damaged inputs."""
    rows = []
    for fault in harness.faults(parser, attempts, inputs, seed=1):
        experiment = Experiment(fault, Baseline(work), work, mounts=False)
        fault.action.inject(experiment)
        rows.append(experiment.row())
    return rows


def test_every_parser_is_fuzzed(home: Path) -> None:
    """A parser that is added has to be listed here."""
    assert set(targets(home)) == set(PARSERS)


@pytest.mark.parametrize("parser", PARSERS)
def test_some_damage(home: Path, parser: str, tmp_path: Path) -> None:
    """A representative part."""
    rows = inject(targets(home)[parser], parser, FEW, tmp_path)
    assert not [row for row in rows if row.problems]
    refused = sum(row.codes == (2,) for row in rows)
    assert refused > FEW // 4, "hardly anything was damage: the harness is at fault"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_much_damage(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, with a table."""
    attempts = targets(home)
    rows = [row for name in PARSERS for row in inject(attempts[name], name, MANY, tmp_path)]
    with capsys.disabled():
        print("", campaign.markdown(campaign.table(rows)), sep="\n")
    assert not [row for row in rows if row.problems]


def test_the_harness_sees_what_it_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, a wrong answer, memory, the end of the process, and a hang."""

    def fail(dice: random.Random) -> int:
        raise KeyError("x")

    def believe(dice: random.Random) -> int:
        raise harness.WrongError("believed")

    def wait(dice: random.Random) -> int:
        while True:
            pass

    attempts = [
        *(fail, believe, lambda dice: len(bytearray(3 << 30)), lambda dice: os._exit(1), wait),
        lambda dice: 2,
    ]
    monkeypatch.setattr(harness, "SECONDS", 1)
    rows = inject(attempts, "none", len(attempts), tmp_path)
    assert [[kind for kind, _ in row.problems] for row in rows] == [
        [Problem.TRACEBACK],
        [Problem.WRONG_EQUIVALENT],
        [Problem.MEMORY],
        [Problem.MEMORY],
        [Problem.HANG],
        [],
    ]
