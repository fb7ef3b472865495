# SPDX-License-Identifier: Apache-2.0
"""The values that flags can have."""

import argparse
import contextlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.flags import parse_iterations, path
from megatron_ttrace.trace.errors import TTraceError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", (1,)),
        ("1-3", (1, 2, 3)),
        ("1,1,1-2", (1, 2)),
        (" 1 - 2 , 4 ", (1, 2, 4)),
        ("007", (7,)),
    ],
)
def test_iterations(text, expected):
    """Numbers and ranges, sorted, each once."""
    assert parse_iterations(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "0", "0-2", "-1", "1-", "-", "2-1", "1,,2", "1,", "a", "1.5", "1-2-3", "1;2"),
        *("+1", "1-1000000000"),
    ],
)
def test_what_is_no_list_of_iterations(text):
    """One line with what was given and an example; a slip of the keyboard fills no memory."""
    with pytest.raises(
        TTraceError, match=r"give numbers or ranges from 1, e.g. 1 or 1-2,5"
    ) as error:
        parse_iterations(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(
    ("text", "why"), [("", "'' is empty: is a variable not set?"), ("a\0", "holds a zero byte")]
)
def test_no_path(text, why):
    """An empty one would be the working folder."""
    with pytest.raises(argparse.ArgumentTypeError, match=re.escape(why)):
        path(text)


@given(st.text(max_size=12))
def test_any_text_is_iterations_or_a_clear_error(text):
    """Never another exception; never an empty or descending answer."""
    with contextlib.suppress(TTraceError):
        iterations = parse_iterations(text)
        assert iterations
        assert iterations == tuple(sorted(set(iterations)))
        assert iterations[0] >= 1
