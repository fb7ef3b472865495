# SPDX-License-Identifier: Apache-2.0
"""A place and its text."""

import pytest

from megatron_ttrace.trace.places import Clue, Place


def test_text() -> None:
    """As a terminal shows it; and back."""
    place = Place("megatron/core/a.py", 12, "A.forward", Clue.RAN)
    assert str(place) == "megatron/core/a.py:12 (A.forward)"
    assert Place.of(str(place), Clue.RAN) == place


@pytest.mark.parametrize("text", ["", "a.py", "a.py:x (f)", "a.py:3"])
def test_no_place(text: str) -> None:
    """Any other text."""
    assert Place.of(text, Clue.RAN) is None
