# SPDX-License-Identifier: Apache-2.0
"""Panels on lines: as few lines as fit, in their order."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.report.lines import arrangements


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([], []),
        ([300], [(410, "1")]),
        ([300, 300, 100], [(410, "111"), (520, "110"), (830, "100")]),
        ([100, 900, 100], [(1010, "111"), (1120, "110"), (1230, "100")]),
        # A third line would not make the page narrower.
        ([900, 8, 8], [(1010, "110"), (1046, "100")]),
    ],
)
def test_by_hand(widths: list[int], expected: list[tuple[int, str]]) -> None:
    """Labels of 90 pixels, gaps of 10."""
    found = [
        (one.width, "".join("01"[start] for start in one.starts))
        for one in arrangements(widths, 90, 10)
    ]
    assert found == expected


@given(st.lists(st.integers(8, 900), min_size=1, max_size=5))
def test_every_width_has_its_lines(widths: list[int]) -> None:
    """Narrowest first, fewer lines the wider, one line last, and every line within the width."""
    found = arrangements(widths, 160, 14)
    assert found[-1].starts == (True,) + (False,) * (len(widths) - 1)
    assert found[0].width == 160 + 14 + max(widths) + 14
    for one in found:
        line = 0
        for width, starts in zip(widths, one.starts, strict=True):
            line = 160 + 14 if starts else line
            line += width + 14
            assert line <= one.width
    for narrow, wide in pairwise(found):
        assert narrow.width < wide.width
        assert sum(narrow.starts) > sum(wide.starts)
