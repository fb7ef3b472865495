# SPDX-License-Identifier: Apache-2.0
"""Functions that differ between two versions of a file, by their lines."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.trace import changes
from megatron_ttrace.trace.changes import Change

SOURCE = """\
LIMIT = 3


class Layer:
    size = 1

    def __init__(self, x):
        # A comment.
        self.x = x

    @jit
    def forward(self):
        def inner():
            return self.x
        return inner()


def used():
    return LIMIT
"""
INNER = "Layer.forward.inner"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("self.x = x", "self.x = x + 1", [Change("Layer.__init__", 9)]),
        ("self, x)", "self, x=1)", [Change("Layer.__init__", 7)]),
        ("return self.x", "return 2", [Change("Layer.forward", 14, False, (INNER,))]),
        ("@jit", "@other", [Change("Layer.forward", 11, False, ("Layer.forward",))]),
        ("return LIMIT", "y = 1\n    return LIMIT", [Change("used", 19)]),
        ("size = 1", "size = 2", [Change("", 5)]),
        ("LIMIT = 3", "LIMIT = 4", [Change("", 1)]),
        ("# A comment.", "# Another.\n", []),
        ("def used", "def new():\n    pass\n\n\ndef used", [Change("new", 18)]),
        ("\n\ndef used():\n    return LIMIT\n", "", []),
        ("used", "renamed", [Change("renamed", 18)]),
    ],
)
def test_changes(old, new, expected):
    """New and different functions, and lines outside of them; comments do not count."""
    assert old in SOURCE
    assert changes.changes(SOURCE.encode(), SOURCE.replace(old, new).encode()) == expected


def test_a_new_file_and_one_that_does_not_parse():
    """All functions; a line if nothing else is known."""
    new = changes.changes(b"", SOURCE.encode())
    assert [change.name for change in new] == ["", "Layer.__init__", "Layer.forward", "used"]
    assert new[2].parts == ("Layer.forward", INNER)
    assert changes.changes(SOURCE.encode(), b"def f(:") == [Change("", 1)]


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_content(before, after):
    """Nothing raises, and lines are lines of the second file."""
    last = max(1, len(after.splitlines()))
    assert all(1 <= change.line <= last for change in changes.changes(before, after))
