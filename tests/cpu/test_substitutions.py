# SPDX-License-Identifier: Apache-2.0
"""Each substitution, seen from a process that has activated the CPU backend."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace import cpu
from megatron_ttrace.trace.errors import TTraceError
from tests.cpu.probe import CHECKS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def failures():
    ran = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("probe.py"))],
        cwd=ROOT,
        env={"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


@pytest.mark.parametrize("name", CHECKS)
def test_substitution(failures, name):
    assert name not in failures, failures[name]


def test_too_late_is_an_error_that_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", sys)
    with pytest.raises(TTraceError, match=r"call megatron_ttrace.enable\(\) before importing"):
        cpu.activate()


@pytest.mark.parametrize(
    ("device", "has_cuda", "expected"),
    [
        ("auto", False, True),
        ("auto", True, False),
        ("cpu", True, True),
        ("cuda", False, False),
    ],
)
def test_needed(monkeypatch, device, has_cuda, expected):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_cuda)
    assert cpu.needed(device) is expected
