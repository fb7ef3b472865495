# SPDX-License-Identifier: Apache-2.0
"""No damaged input of any parser gives a traceback, hangs, takes the memory, or is believed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.faults.fuzz import harness
from tests.faults.fuzz.targets import build, targets

PARSERS = (
    *("verdicts", "summary", "tolerances", "wire", "patch", "data", "flags", "plant"),
    *("index", "meta", "header"),
)
FEW = 24
MANY = 1000
"""Inputs of each parser every night: 11,000 in all."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run that diverged."""
    return build(tmp_path_factory.mktemp("fuzz"))


def fuzz(home: Path, parser: str, inputs: int, seed: int) -> harness.Tally:
    """Share the inputs of a parser out among the ways to damage it."""
    attempts = targets(home)[parser]
    total = harness.Tally(parser)
    for number, attempt in enumerate(attempts):
        share = inputs * (number + 1) // len(attempts) - inputs * number // len(attempts)
        total.add(harness.run(f"{parser} {number}", attempt, share, seed=seed))
    return total


def test_every_parser_is_fuzzed(home: Path) -> None:
    """A parser that is added has to be listed here."""
    assert set(targets(home)) == set(PARSERS)


@pytest.mark.parametrize("parser", PARSERS)
def test_some_damage(home: Path, parser: str) -> None:
    """A representative part."""
    found = fuzz(home, parser, FEW, seed=1)
    assert found.inputs == FEW
    assert found.is_clean, found.examples
    assert found.refused > FEW // 4, "hardly anything was damage: the harness is at fault"


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_much_damage(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it, with a table."""
    rows = [fuzz(home, parser, MANY, seed=2) for parser in PARSERS]
    with capsys.disabled():
        print("", harness.HEADING, *rows, sep="\n")
    assert sum(row.inputs for row in rows) >= 10_000
    assert all(row.is_clean for row in rows), {row.parser: row.examples for row in rows}


def test_the_harness_sees_what_it_looks_for() -> None:
    """A traceback, a wrong answer, an input that takes memory, and one that ends the process."""

    def attempt(dice: random.Random) -> int:
        del dice
        calls.append(1)
        match len(calls) % 6:
            case 1:
                raise KeyError("x")
            case 2:
                raise harness.WrongError("believed")
            case 3:
                return len(bytearray(3 << 30))
            case 4:
                os._exit(1)
        return 2

    calls: list[int] = []
    found = harness.run("none", attempt, 6, seed=1)
    assert (found.inputs, found.tracebacks, found.wrong, found.memory) == (6, 2, 2, 2)


def test_the_harness_sees_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """An input that does not end is stopped."""
    monkeypatch.setattr(harness, "SECONDS", 1)

    def attempt(dice: object) -> int:
        del dice
        while True:
            pass

    assert harness.run("none", attempt, 1, seed=1).hangs == 1
