# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tests.bench import jobs
from tests.bench.jobs import Job
from tests.bench.memory import Turn

pytestmark = pytest.mark.slow

STATE = Job("26 million parameters, few tokens", hidden=512, sequence=128, microbatches=1)


def most(home, tool, *flags):
    """Bytes that the job's process has at most, with mapped files, after its first step."""
    home.mkdir()
    jobs.in_turns(STATE, tool, 2, home, *flags)
    turns = [Turn(**one) for one in json.loads((home / "rank-0.json").read_text())]
    return max(turn.resident for turn in turns[1:])


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_budget_is_kept(tmp_path):
    """A traced job needs at most 10 % more than an untraced one and the budget together.

    The copies of its weights and moments alone are six times the budget.
    """
    plain = most(tmp_path / "plain", "none")
    traced = most(tmp_path / "traced", "ttrace", "--ttrace-memory-mb", "64")
    assert traced <= 1.1 * (plain + (64 << 20))
