# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints' weights, tensor by tensor."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.mcore.checkpoints.stored import Stored
from megatron_ttrace.saved.weights import Same, compare


def held(data):
    """A weight."""
    return Stored(tuple(data.shape), lambda index: data[index])


@given(st.integers(0, 19))
def test_any_element(wrong):
    """The same, or not if any element differs."""
    data = torch.randn(5, 4)
    a = {"w": held(data)}
    assert [one.same for one in compare(a, {"w": held(data.clone())})] == [Same.SAME]
    other = data.clone()
    other.view(-1)[wrong] += 1
    (found,) = compare(a, {"w": held(other)})
    assert found.same is Same.DIFFERENT
    assert found.rel_err == pytest.approx(float(1 / data.norm()), rel=1e-4)


def test_other_dtypes():
    """Rounded to the narrower dtype, they must be bitwise equal."""
    data = torch.randn(4, 4)
    a, b = {"w": held(data)}, {"w": held(data.bfloat16())}
    for first, second in ((a, b), (b, a)):
        (found,) = compare(first, second)
        assert (found.same, found.note) == (Same.ROUNDED, "bfloat16 and float32")
    (found,) = compare(a, {"w": held((data * 1.1).bfloat16())})
    assert found.same is Same.DIFFERENT


def test_layers_in_a_stack():
    """Layers on their own are parts of the other checkpoint's stack, both ways."""
    data = torch.randn(3, 4, 2)
    stack = {"decoder.layers.mlp.w": held(data)}
    alone = {f"decoder.layers.{n}.mlp.w": held(data[n]) for n in range(3)}
    for first, second in ((stack, alone), (alone, stack)):
        found = list(compare(first, second))
        assert [one.name for one in found] == list(alone)
        assert {one.same for one in found} == {Same.SAME}
    alone["decoder.layers.1.mlp.w"] = held(data[0])
    found = [one.same for one in compare(stack, alone)]
    assert found == [Same.SAME, Same.DIFFERENT, Same.SAME]


def test_a_padded_vocabulary():
    """Rows that only one has are padding, and named."""
    name = "embedding.word_embeddings.weight"
    data = torch.randn(8, 3)
    a, b = {name: held(data)}, {name: held(data[:6])}
    for first, second in ((a, b), (b, a)):
        (found,) = compare(first, second)
        assert found.same is Same.SAME
        assert "padded rows" in found.note


def test_what_is_not_there():
    """Other names and other shapes are differences."""
    one = held(torch.ones(2, 2))
    other = held(torch.ones(2, 3))
    found = {w.name: w.same for w in compare({"a": one, "c": one}, {"b": one, "c": other})}
    assert found == {"a": Same.ONLY_A, "c": Same.SHAPE, "b": Same.ONLY_B}


def test_nan():
    """NaN in both is the same, in one of them it is not."""
    data = torch.tensor([1.0, float("nan")])
    a = {"w": held(data)}
    assert [w.same for w in compare(a, {"w": held(data)})] == [Same.SAME]
    (found,) = compare(a, {"w": held(torch.ones(2))})
    assert (found.same, found.rel_err) == (Same.DIFFERENT, float("inf"))


def test_a_scalar():
    """It has no dims to cut."""
    a = {"w": held(torch.tensor(1.5))}
    assert [w.same for w in compare(a, a)] == [Same.SAME]
