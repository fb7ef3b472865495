# SPDX-License-Identifier: Apache-2.0
"""The synthetic checks as fixtures."""

import pytest

from megatron_ttrace.trace.records import Summary, Verdict
from tests.report.synthetic_report import embedding_bug, healthy_verdicts, make_summary, norm_bug


@pytest.fixture
def healthy() -> tuple[Summary, list[Verdict]]:
    """A check that passes."""
    verdicts = healthy_verdicts()
    return make_summary(verdicts), verdicts


@pytest.fixture
def diverged() -> tuple[Summary, list[Verdict]]:
    """A check that fails from the embedding on."""
    return embedding_bug()


@pytest.fixture
def conflict() -> tuple[Summary, list[Verdict]]:
    """A check that fails in one main gradient."""
    return norm_bug()
