# SPDX-License-Identifier: Apache-2.0
"""Findings of many ranks reach the last one, through a tree of real processes."""

import json
from typing import Any

import pytest

from tests import programs


def gathered(ranks: int, *flags: str) -> dict[str, Any]:
    """What the program printed."""
    command = ("-W", "ignore", "-m", "tests.run.gathering", "--ranks", ranks, *flags)
    done = programs.python(*command, timeout=900, code=0)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.nightly
def test_256_ranks() -> None:
    """Eight times as many replicas and microbatches are fewer than three times the records.

    What ranks count, and which collectives they run, is fewer than four times the bytes: it has
    names of twice as many experts, and the numbers of tokens that each rank sends to others.
    """
    small, large = gathered(32), gathered(256)
    assert large["failing tensors"] == 0
    assert large["records merged"] < 3 * small["records merged"]
    assert large["records merged"] < large["records of all ranks"] / 5
    size = "bytes recorded by all ranks"
    assert large[size] < 4 * small[size]
    assert large[size] < 256 * large["bytes recorded by a rank"] / 15
    failing = gathered(32, "--failing")
    assert failing["failing tensors"] > 0
    assert failing["records merged"] > small["records merged"]
