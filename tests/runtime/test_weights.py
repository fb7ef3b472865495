# SPDX-License-Identifier: Apache-2.0
"""Weights in chunks, in whatever way they are cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.checkpoints.stored import Chunk, Stored
from megatron_ttrace.runtime.weights import Same, compare


def cut(folder, name, data, *cuts):
    """A weight in chunks: at each of these places along each dim."""
    pieces = [((0,) * data.ndim, data)]
    for dim, places in enumerate(cuts):
        edges = sorted({0, *places, data.shape[dim]})
        pieces = [
            ((*at[:dim], start, *at[dim + 1 :]), piece.narrow(dim, start, end - start))
            for at, piece in pieces
            for start, end in itertools.pairwise(edges)
        ]
    file = folder / f"{name}.safetensors"
    save_file({str(n): piece.contiguous() for n, (_, piece) in enumerate(pieces)}, file)
    chunks = [
        Chunk(at, tuple(piece.shape), file, name=str(number))
        for number, (at, piece) in enumerate(pieces)
    ]
    return Stored(tuple(data.shape), tuple(chunks))


CUTS = st.tuples(st.sets(st.integers(1, 4)), st.sets(st.integers(1, 3)))


@settings(max_examples=30)
@given(CUTS, CUTS, st.integers(0, 19))
def test_any_chunks(tmp_path_factory, ours, theirs, wrong):
    """However both are cut: the same, or not if any element differs."""
    folder = tmp_path_factory.mktemp("weights")
    data = torch.randn(5, 4)
    a = {"w": cut(folder, "a", data, *ours)}
    assert [one.same for one in compare(a, {"w": cut(folder, "b", data, *theirs)})] == [Same.SAME]
    other = data.clone()
    other.view(-1)[wrong] += 1
    (found,) = compare(a, {"w": cut(folder, "c", other, *theirs)})
    assert found.same is Same.DIFFERENT
    assert found.rel_err == pytest.approx(float(1 / data.norm()), rel=1e-4)


def test_other_dtypes(tmp_path):
    """Rounded to the narrower dtype, they must be bitwise equal."""
    data = torch.randn(4, 4)
    a, b = {"w": cut(tmp_path, "a", data)}, {"w": cut(tmp_path, "b", data.bfloat16())}
    for first, second in ((a, b), (b, a)):
        (found,) = compare(first, second)
        assert (found.same, found.note) == (Same.ROUNDED, "bfloat16 and float32")
    (found,) = compare(a, {"w": cut(tmp_path, "c", (data * 1.1).bfloat16())})
    assert found.same is Same.DIFFERENT


def test_layers_in_a_stack(tmp_path):
    """Layers on their own are parts of the other checkpoint's stack, both ways."""
    data = torch.randn(3, 4, 2)
    stack = {"decoder.layers.mlp.w": cut(tmp_path, "s", data, [1], [2])}
    alone = {f"decoder.layers.{n}.mlp.w": cut(tmp_path, str(n), data[n], [3]) for n in range(3)}
    for first, second in ((stack, alone), (alone, stack)):
        found = list(compare(first, second))
        assert [one.name for one in found] == list(alone)
        assert {one.same for one in found} == {Same.SAME}
    alone["decoder.layers.1.mlp.w"] = cut(tmp_path, "x", data[0])
    found = [one.same for one in compare(stack, alone)]
    assert found == [Same.SAME, Same.DIFFERENT, Same.SAME]


def test_a_padded_vocabulary(tmp_path):
    """Rows that only one has are padding, and named."""
    name = "embedding.word_embeddings.weight"
    data = torch.randn(8, 3)
    a, b = {name: cut(tmp_path, "a", data, [4])}, {name: cut(tmp_path, "b", data[:6], [3])}
    for first, second in ((a, b), (b, a)):
        (found,) = compare(first, second)
        assert found.same is Same.SAME
        assert "padded rows" in found.note


def test_what_is_not_there(tmp_path):
    """Other names and other shapes are differences."""
    one = cut(tmp_path, "a", torch.ones(2, 2))
    other = cut(tmp_path, "b", torch.ones(2, 3))
    found = {w.name: w.same for w in compare({"a": one, "c": one}, {"b": one, "c": other})}
    assert found == {"a": Same.ONLY_A, "c": Same.SHAPE, "b": Same.ONLY_B}


def test_nan(tmp_path):
    """NaN in both is the same, in one of them it is not."""
    data = torch.tensor([1.0, float("nan")])
    a = {"w": cut(tmp_path, "a", data)}
    assert [w.same for w in compare(a, {"w": cut(tmp_path, "b", data)})] == [Same.SAME]
    (found,) = compare(a, {"w": cut(tmp_path, "c", torch.ones(2))})
    assert (found.same, found.rel_err) == (Same.DIFFERENT, float("inf"))


def test_a_missing_chunk(tmp_path):
    """Not all of a weight is no comparison."""
    whole = cut(tmp_path, "a", torch.ones(4, 2), [2])
    part = Stored(whole.shape, whole.chunks[:1])
    with pytest.raises(TTraceError, match="hold 4 of"):
        list(compare({"w": whole}, {"w": part}))


def test_a_scalar(tmp_path):
    """It has no dims to cut."""
    a = {"w": cut(tmp_path, "a", torch.tensor(1.5))}
    assert [w.same for w in compare(a, a)] == [Same.SAME]
