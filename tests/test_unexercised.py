# SPDX-License-Identifier: Apache-2.0
"""The record of what was not exercised survives JSON, and refuses what it did not write."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.unexercised import NotExercised, Unexercised

numbers = st.none() | st.integers(0, 2**40) | st.floats(-1e30, 1e30)
records = st.builds(
    NotExercised,
    what=st.sampled_from(Unexercised),
    value=numbers,
    limit=numbers,
    names=st.lists(st.text(max_size=9), max_size=3).map(tuple),
)
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=4,
)


@given(records)
def test_it_survives(record) -> None:
    """Through strict JSON."""
    assert NotExercised.from_json(json.loads(json.dumps(record.to_json()))) == record


@given(anything, records, st.sampled_from(["what", "value", "limit", "names"]))
def test_anything_else_is_a_value_error(foreign, record, field) -> None:
    """A foreign object, or one field of it replaced."""
    for data in (foreign, record.to_json() | {field: foreign}):
        try:
            NotExercised.from_json(data)
        except ValueError:
            continue


@pytest.mark.parametrize("damaged", [{}, {"what": "clip", "value": True}, {"what": "nonsense"}])
def test_examples_of_damage(damaged) -> None:
    """A record without its kind, a flag for a number, a kind that does not exist."""
    with pytest.raises(ValueError, match=r"not a (finite number|valid Unexercised)"):
        NotExercised.from_json(damaged)
