# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from tests.bench import jobs
from tests.bench.jobs import BASE
from tests.bench.memory import Turn
from tests.integration.jobs import TINY, torchrun

pytestmark = pytest.mark.slow


def test_turns(tmp_path):
    """The script of the benchmarks traces every second step, and the last one's verdict is real."""
    plan = json.dumps({"out": str(tmp_path), "pairs": 1, "tool": "ttrace"})
    ours = ["--ttrace", "--ttrace-no-wandb", "--ttrace-seeds", "1", "--lr-decay-style", "constant"]
    done = torchrun(1, jobs.TRAIN, *TINY, *ours, "--train-iters", 9, cwd=tmp_path, BENCH=plan)
    assert done.returncode == 0, done.stderr[-3000:]
    summary = json.loads((tmp_path / "ttrace-out" / "summary.json").read_text())
    assert summary["verdict"] == "equivalent"
    turns = [Turn(**one) for one in json.loads((tmp_path / "rank-0.json").read_text())]
    assert [(turn.number, turn.is_dear, len(turn.steps)) for turn in turns] == [
        (-2, False, 1),
        (-1, True, 2),
        (0, False, 1),
        (1, True, 2),
    ]
    assert turns[-1].report > 0
    assert all(turn.seconds > sum(turn.steps) for turn in turns)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_budget_is_kept(tmp_path):
    """Of a reference of 780 MB no more pages stay mapped than the budget allows.

    The copies that are restored after the step are not part of it.
    """
    turns = jobs.in_turns(BASE, "ttrace", 1, tmp_path, "--ttrace-memory-mb", "64")
    assert turns.peak_mapped - turns.peak <= 64 << 20
