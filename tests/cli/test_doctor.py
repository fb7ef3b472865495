# SPDX-License-Identifier: Apache-2.0
"""What the doctor says of this machine, and of one that lacks something."""

import json
from argparse import Namespace
from pathlib import Path

import pytest

from megatron_ttrace.cli import doctor
from megatron_ttrace.errors import TTraceError
from tests.integration.jobs import ttrace

SUBJECTS = {
    *("Python", "torch", "megatron-core", "device", "disk"),
    *("TransformerEngine", "Apex", "wandb"),
}


def test_this_machine(tmp_path: Path) -> None:
    """Everything is looked at, on one screen, with no warning of anybody's around it."""
    done = ttrace("doctor", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert all(subject in done.stdout for subject in SUBJECTS)
    assert len(done.stdout.splitlines()) <= 24


def test_for_machines(tmp_path: Path) -> None:
    """The same as JSON."""
    done = ttrace("doctor", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    assert {one["subject"] for one in found} == SUBJECTS
    assert {one["state"] for one in found} <= {"ok", "optional", "missing"}


def test_what_is_missing_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Megatron no check can run: exit code 2, and what to install."""

    def absent() -> None:
        raise TTraceError("megatron-core is not installed: pip install 'megatron-core==0.19.0'")

    monkeypatch.setattr(doctor.versions, "check_supported", absent)
    monkeypatch.setattr(doctor, "_OPTIONAL", ())
    assert doctor.run(Namespace(json=True)) == 2
    told = {one["subject"]: one for one in json.loads(capsys.readouterr().out)}
    assert told["megatron-core"]["state"] == "missing"
    assert "pip install" in told["megatron-core"]["found"]
