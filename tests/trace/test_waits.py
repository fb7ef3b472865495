# SPDX-License-Identifier: Apache-2.0
"""Ranks that wait: which of them can never go on, and what is reported."""

import dataclasses
from pathlib import Path

import pytest

from megatron_ttrace.trace import waits
from megatron_ttrace.trace.waits import Doing, Mismatch, Wait

TP = Wait(
    doing=Doing.COLLECTIVE,
    operation="all_reduce",
    group="tp",
    members=(0, 1),
    communicator="7",
    dtype="float32",
    elements=1024,
    module="decoder.layers.0.mlp",
    where="megatron/core/a.py:3 (f)",
)
DP = dataclasses.replace(TP, group="dp", communicator="8", members=(0, 1))
SEND = dataclasses.replace(TP, operation="send", communicator="9")
RECV = dataclasses.replace(SEND, operation="recv")
MEETING = Wait(doing=Doing.MEETING)
BUSY = Wait(doing=Doing.OTHER, where="megatron/core/b.py:4 (g)")


@pytest.mark.parametrize(
    ("waiting", "mismatch"),
    [
        ((TP, TP), None),
        ((TP, dataclasses.replace(TP, elements=512)), Mismatch.SIZES),
        ((TP, dataclasses.replace(TP, dtype="bfloat16")), Mismatch.SIZES),
        ((TP, dataclasses.replace(TP, operation="broadcast")), Mismatch.ORDER),
        ((TP, DP), Mismatch.ABSENT),
        ((TP, MEETING), Mismatch.ABSENT),
        ((TP, BUSY), None),
        ((TP,), None),
        ((MEETING, MEETING), None),
        ((SEND, RECV), None),
        ((RECV, RECV), Mismatch.ORDER),
        ((Wait(doing=Doing.HANDLE), Wait(doing=Doing.HANDLE)), None),
    ],
)
def test_two_ranks(waiting: tuple[Wait, ...], mismatch: Mismatch | None) -> None:
    """A rank that computes may still come; a collective that all have joined is only slow."""
    assert waits.judge(dict(enumerate(waiting)), 2).mismatch is mismatch


def test_a_slow_collective_releases_others() -> None:
    """Ranks 2 and 3 have all joined: ranks that wait for one of them may go on."""
    slow = dataclasses.replace(TP, members=(2, 3), communicator="5")
    wide = dataclasses.replace(DP, members=(0, 2))
    waiting = {0: wide, 1: MEETING, 2: slow, 3: slow}
    assert waits.judge(waiting, 4).mismatch is None
    waiting = {0: wide, 1: MEETING, 2: slow, 3: MEETING}
    assert waits.judge(waiting, 4).mismatch is Mismatch.ABSENT


def test_one_line() -> None:
    """Operation, size, group, module and line; ranks at the same place together."""
    waiting = {0: TP, 1: TP, 2: BUSY}
    assert waits.judge(waiting, 3).text == (
        "ranks 0, 1: each waits in all_reduce of 1,024 float32 elements (tp group, ranks 0, 1), "
        "module decoder.layers.0.mlp, at megatron/core/a.py:3 (f); "
        "rank 2 is busy, at megatron/core/b.py:4 (g)"
    )


def test_many_groups_in_one_line() -> None:
    """The same call in many groups is reported once, so both sizes of a mismatch are there."""
    pairs = {rank: dataclasses.replace(TP, members=(rank % 8, rank % 8 + 8)) for rank in range(16)}
    sides = {r: w if r < 8 else dataclasses.replace(w, elements=512) for r, w in pairs.items()}
    stall = waits.judge(sides, 16)
    assert stall.mismatch is Mismatch.SIZES
    first, second = stall.text.split("; ")
    assert first.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7: each waits in all_reduce of 1,024 ")
    assert second.startswith("ranks 8, 9, 10, 11, 12, 13, 14, 15: each waits in all_reduce of 512 ")
    assert "(tp group), module" in first


def test_files(tmp_path: Path) -> None:
    """What a rank leaves is read by another; a damaged file is none, and it can be taken back."""
    folder = tmp_path / "logs"
    waits.write(folder, 3, TP)
    assert waits.read(folder, 3) == TP
    waits.write(folder, 3, None)
    assert waits.read(folder, 3) is None
    (folder / "rank-00003.wait.json").write_text("{")
    assert waits.read(folder, 3) is None
