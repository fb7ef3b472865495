# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute summands: in Megatron's own layers, and in a fork that reduces late."""

from pathlib import Path

import pytest

from megatron_ttrace.trace.records import Kind
from tests.integration.jobs import TP, Checked, check

SUMMANDS = {(Kind.OUTPUT, f"decoder.layers.{layer}.mlp.linear_fc2") for layer in (0, 1)}


def noted(checked: Checked) -> set[tuple[Kind, str]]:
    """Tensors that are excused."""
    excused = [one for one in checked.verdicts if one.note.startswith("partial by design")]
    return {(one.kind, one.name) for one in excused}


@pytest.mark.parametrize(
    ("mistake", "code"),
    [
        ("late_sum", 0),
        ("late_sum_never", 1),
        pytest.param("late_sum_of_wrong_summands", 1, marks=pytest.mark.nightly),
    ],
)
def test_a_fork_that_reduces_late(mistake: str, code: int, tmp_path: Path) -> None:
    """It is equivalent if it reduces at all, and if the sum is right."""
    checked = check(tmp_path, *TP, code=code, mistake=mistake)
    assert noted(checked) == (SUMMANDS if code == 0 else set())
    assert ({(one.kind, one.name) for one in checked.failed} >= SUMMANDS) == (code == 1)


@pytest.mark.parametrize(
    ("ranks", "groups"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.nightly)]
)
def test_shared_groups(ranks: int, groups: int, tmp_path: Path) -> None:
    """Fewer groups of keys and values than ranks: equivalent, and known without a conclusion."""
    words = ("--group-query-attention", "--num-query-groups", groups)
    checked = check(tmp_path, TP[0], ranks, *words, nproc=ranks)
    assert (checked.failed, noted(checked)) == ([], set())
