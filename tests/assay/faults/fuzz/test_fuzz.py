# SPDX-License-Identifier: Apache-2.0
"""No damaged input of any parser gives a traceback, hangs, takes the memory, or is believed."""

import os
import random
from pathlib import Path

import pytest

from tests.assay import __main__, harness
from tests.assay.faults.fault import Problem
from tests.assay.faults.fuzz.harness import WrongError, handle, inputs
from tests.assay.faults.fuzz.targets import build, targets

pytestmark = pytest.mark.slow

PARSERS = (
    *("verdicts", "summary", "tolerances", "wire", "patch", "data", "flags"),
    *("index", "meta", "header"),
)
FEW = 16


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that diverged."""
    return build(tmp_path_factory.mktemp("fuzz"))


def test_every_parser_is_fuzzed(home: Path) -> None:
    """A parser that is added has to be listed here."""
    assert set(targets(home)) == set(PARSERS)


@pytest.mark.parametrize("parser", PARSERS)
def test_some_damage(home: Path, parser: str, tmp_path: Path) -> None:
    """A representative part."""
    rows = [handle(tmp_path, case) for case in inputs({parser: targets(home)[parser]}, FEW, 1)]
    assert not [row for row in rows if not row.marks["as promised"]]
    refused = sum(row.marks["refused"] for row in rows)
    assert refused > FEW // 4, "hardly anything was damage: the harness is at fault"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_much_damage(tmp_path: Path) -> None:
    """A thousand inputs of each parser."""
    assert __main__.main(["fuzz", "--count", "1000", "--directory", str(tmp_path)]) == 0
    _, rows = harness.load(tmp_path / "rows.jsonl")
    assert len(rows) == 1000 * len(PARSERS)


def test_the_harness_sees_what_it_looks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A traceback, a wrong answer, memory, the end of the process, and a hang."""

    def fail(dice: random.Random) -> int:
        raise KeyError("x")

    def believe(dice: random.Random) -> int:
        raise WrongError("believed")

    def wait(dice: random.Random) -> int:
        while True:
            pass

    attempts = [
        *(fail, believe, lambda dice: len(bytearray(3 << 30)), lambda dice: os._exit(1), wait),
        lambda dice: 2,
    ]
    monkeypatch.setattr("tests.assay.faults.fuzz.harness.SECONDS", 1)
    rows = [handle(tmp_path, case) for case in inputs({"none": attempts}, len(attempts), 1)]
    problems = [[name for name in row.marks if name in [*Problem]] for row in rows]
    expected = [Problem.TRACEBACK, Problem.WRONG_EQUIVALENT, Problem.MEMORY, Problem.MEMORY]
    assert problems == [[problem] for problem in [*expected, Problem.HANG]] + [[]]
