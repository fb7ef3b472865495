# SPDX-License-Identifier: Apache-2.0
"""What a pull request adds, and where it is annotated; the rest is in tests/cli/test_ci.py."""

import dataclasses
from pathlib import Path

from megatron_ttrace.evaluation.recipes.pull import Checked, new_culprits, place
from megatron_ttrace.jobs.processes.worktrees import Hunk
from megatron_ttrace.trace.records import Result
from tests.cli.test_bisect import culprit


def test_culprits_that_the_base_has():
    """In another layer they are the same; another module is new."""
    mlp, other = culprit("", "decoder.layers.0.mlp"), culprit("", "decoder.layers.1.mlp")
    attention = dataclasses.replace(mlp, name="decoder.layers.1.self_attention")
    head = Checked(Result.DIVERGED, (mlp, other, attention))
    assert new_culprits(head, Checked(Result.DIVERGED, (other,))) == (attention,)


def test_where_the_culprit_is():
    """The changed line next to it, its own line in other files, none outside of the checkout."""
    root = Path(__file__).parent
    hunks = [Hunk("sub/test_pull.py", 10, 3, ""), Hunk("sub/test_pull.py", 50, 2, "")]

    def found(where, home=root, inside=Path()):
        return place(culprit(where), hunks, home, inside)

    assert found("test_reached.py:7 (f)") == ("test_reached.py", 7)
    assert found("recipes/test_pull.py:40 (f)", root.parents[2], Path("tests/evaluation")) == (
        "tests/evaluation/recipes/test_pull.py",
        40,
    )
    assert found("torch/nn.py:7 (f)") == ("", 0)
    assert found("../recipes/test_pull.py:7 (f)") == ("", 0)
    assert found(f"{root}/test_pull.py:7 (f)") == ("", 0)
    assert found("") == ("", 0)
    hunks = [Hunk("test_pull.py", 10, 3, ""), Hunk("test_pull.py", 50, 2, "")]
    assert [found(f"test_pull.py:{line} (f)")[1] for line in (1, 11, 40, 99)] == [10, 11, 50, 51]
