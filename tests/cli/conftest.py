# SPDX-License-Identifier: Apache-2.0
"""What the tests of several commands play instead of running jobs."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.jobs import provenance
from megatron_ttrace.saved import blame


@pytest.fixture(autouse=True)
def _no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting the versions imports Megatron, which takes many seconds."""
    monkeypatch.setattr(provenance, "installed", dict)


@pytest.fixture
def blaming(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A search for the change to blame: the ``answer`` that it gives, and what it was ``asked``."""
    search = SimpleNamespace(answer=None, asked=None)

    def run_apart(trial: blame.Trial, script: Path, good: str, say: object, *, quiet: bool) -> Any:
        search.asked = trial, script, good
        return search.answer

    monkeypatch.setattr(blame, "run_apart", run_apart)
    return search
