# SPDX-License-Identifier: Apache-2.0
"""What many ranks say is read back as it was, however it was merged on its way."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.trace import folded
from megatron_ttrace.trace.codec import CodecError

PLAIN = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text("ab")
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("xy"), inner)
)
SAID = st.dictionaries(
    st.integers(0, 99), st.lists(VALUES, max_size=4) | st.dictionaries(st.text("xy"), VALUES)
)


def exactly(value):
    """Text in which 1, 1.0 and True are different."""
    return json.dumps(value)


def sent(message):
    """A message on the other side."""
    return json.loads(json.dumps(message))


@settings(max_examples=40)
@given(SAID, st.randoms(use_true_random=False))
def test_nothing_is_lost(values_by_rank, random):
    """Each rank's value, folded alone or with others and merged in any order and grouping."""
    groups = {}
    for rank, value in values_by_rank.items():
        groups.setdefault(random.randrange(4), {})[rank] = value
    messages = [sent(folded.fold(group)) for group in groups.values()]
    while len(messages) > 1:
        random.shuffle(messages)
        some = random.randint(2, len(messages))
        messages = [sent(folded.merge(messages[:some])), *messages[some:]]
    by_rank = folded.unfold(messages[0]) if messages else {}
    assert list(by_rank) == sorted(values_by_rank)
    assert {rank: exactly(value) for rank, value in by_rank.items()} == {
        rank: exactly(value) for rank, value in values_by_rank.items()
    }


def test_what_is_equal_is_there_once():
    """In the message, and as an object when it is read; ranks are runs."""
    long = [[number, "name"] for number in range(50)]
    messages = [folded.fold({rank: {"own": rank % 2, "all": long}}) for rank in range(64)]
    merged = sent(folded.merge(messages))
    assert len(json.dumps(merged)) < 1.1 * len(json.dumps(sent(folded.merge(messages[:2]))))
    assert [runs for _, runs in merged["ranks"]] == [[[0, 62, 2]], [[1, 63, 2]]]
    by_rank = folded.unfold(merged)
    assert len({id(value["all"]) for value in by_rank.values()}) == 1


def test_what_is_one_object_is_read_once():
    """Equal values of other objects are read on their own, and by another function again."""
    once, value, read = folded.Once(), [1, 2], []

    def noted(some):
        read.append(some)
        return tuple(some)

    assert once(noted, value) is once(noted, value)
    assert once(noted, [1, 2]) == (1, 2)
    assert once(sum, value) == 3
    assert len(read) == 2


@pytest.mark.parametrize(
    "message",
    [
        None,
        [],
        {"ranks": []},
        {"nodes": [1], "ranks": []},
        {"nodes": [[[0]]], "ranks": []},
        {"nodes": [[], [[1]]], "ranks": []},
        {"nodes": [[], [[-1]]], "ranks": []},
        {"nodes": [[], [[True]]], "ranks": []},
        {"nodes": [[], [{"a": 0}]], "ranks": []},
        {"nodes": [[], [[0, 0]]], "ranks": []},
        {"nodes": [[]]},
        {"nodes": [[]], "ranks": [[1, [[0, 0, 1]]]]},
        {"nodes": [[]], "ranks": [[-1, [[0, 0, 1]]]]},
        {"nodes": [[]], "ranks": [[0, [["0", 0, 1]]]]},
    ],
)
def test_a_foreign_message(message):
    """It is refused, whoever reads it."""
    for read in (folded.unfold, lambda message: folded.merge([message])):
        with pytest.raises(CodecError):
            read(message)
