# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tests.bench import jobs
from tests.bench.jobs import Job
from tests.bench.memory import Turn
from tests.integration.jobs import TINY, torchrun

pytestmark = pytest.mark.slow

STATE = Job("26 million parameters, few tokens", hidden=512, sequence=128, microbatches=1)


def test_turns(tmp_path):
    """Every second step is traced, the last pair's memory is sampled, the last verdict is real."""
    plan = json.dumps({"out": str(tmp_path), "pairs": 1, "tool": "ttrace"})
    ours = ["--ttrace", "--ttrace-no-wandb", "--ttrace-seeds", "1", "--lr-decay-style", "constant"]
    torchrun(1, jobs.TRAIN, *TINY, *ours, "--train-iters", 9, cwd=tmp_path, BENCH=plan, code=0)
    summary = json.loads((tmp_path / "ttrace-out" / "summary.json").read_text())
    assert summary["verdict"] == "equivalent"
    turns = [Turn(**one) for one in json.loads((tmp_path / "rank-0.json").read_text())]
    assert [(turn.number, turn.is_dear, len(turn.steps)) for turn in turns] == [
        (-2, False, 1),
        (-1, True, 2),
        (0, False, 1),
        (1, True, 2),
        (2, False, 1),
        (3, True, 2),
    ]
    assert [turn.resident > 0 for turn in turns] == [True, *[False] * 3, True, True]
    assert turns[-1].report > 0
    assert all(turn.seconds > sum(turn.steps) for turn in turns)


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
