# SPDX-License-Identifier: Apache-2.0
"""Settings of the tests of saved runs."""

import pytest

from megatron_ttrace.jobs import provenance


@pytest.fixture(autouse=True)
def _no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Collecting the versions imports Megatron, which takes many seconds."""
    monkeypatch.setattr(provenance, "installed", dict)
