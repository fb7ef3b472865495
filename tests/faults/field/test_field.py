# SPDX-License-Identifier: Apache-2.0
"""The field campaign: its cheap parts always, one numeric fault, and all of it nightly."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.field import commands, pulls, secrets
from tests.faults.field.campaign import faults, table
from tests.faults.field.planting import NUMERIC, has_effect, plant
from tests.faults.field.rows import Row
from tests.integration.jobs import ROOT, python

OPEN = ("secret-number-first", "secret-after-a-switch")
"""Words after the value of a known option are shown: its number of values is not known."""


@pytest.mark.parametrize("quoted", commands.QUOTED, ids=lambda quoted: quoted.id)
def test_a_command(quoted: commands.Quoted) -> None:
    """Understood as a shell would, or refused."""
    assert commands.read(quoted).problems == ()


@pytest.mark.parametrize("name", [name for name in secrets.SHOWN if f"secret-{name}" not in OPEN])
def test_a_secret(name: str) -> None:
    """Not in a report."""
    assert secrets.shown(name, secrets.SHOWN[name]).problems == ()


def test_an_update_that_is_not_copied(tmp_path: Path) -> None:
    """Far less than an epsilon of the weights, and yet it diverges."""
    [fault] = [fault for fault in NUMERIC if fault.id == "zero_stale_parameter"]
    row = plant(fault, tmp_path / "check")
    assert row.injected
    assert row.problems == ()


@pytest.mark.nightly
@pytest.mark.timeout(3500)
def test_all_faults(tmp_path: Path) -> None:
    """Every promise is kept, and what is not found trains as it would without the fault."""
    rows = [run() for name, run in faults(tmp_path).items() if name not in OPEN]
    print(table(rows))
    effects = {fault.id: fault for fault in NUMERIC}
    broken = [
        row
        for row in rows
        if row.problems
        and (row.id not in effects or has_effect(effects[row.id], tmp_path / f"{row.id}-bits"))
    ]
    assert not broken, broken
    assert all(row.injected for row in rows)
    assert len(rows) >= 150


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_processes(tmp_path: Path) -> None:
    """Unexpected signals, small disks, and references that change while they are in use."""
    words = ("-m", "tests.faults.field.meddling", "--out", tmp_path)
    done = python(*words, cwd=ROOT, timeout=1100, cold=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


@pytest.mark.nightly
@pytest.mark.timeout(3500)
def test_pull_requests(tmp_path: Path) -> None:
    """None is green with a bug in it, and none reads a token."""
    pulls.prepare(tmp_path / "fork")
    rows = [pulls.pull(one, tmp_path / "fork", tmp_path / one.id) for one in pulls.PULLS]
    broken = [row for row in rows if row.problems]
    assert not broken, broken


def test_the_table() -> None:
    """Counts what was injected, and in how many rows a promise was broken."""
    rows = [Row("a", "x", True, ()), Row("b", "x", True, ("p", "q")), Row("c", "x", False, ())]
    assert table(rows).splitlines()[-1] == "| all | 2 | 1 | 1 | 1 |"
