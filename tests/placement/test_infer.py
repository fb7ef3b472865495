# SPDX-License-Identifier: Apache-2.0
"""Activations' placements, read off shapes: tables for every layout."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.placement.infer import NoPlacementError, infer_activation, infer_head_rows
from megatron_ttrace.placement.placements import ZigZag
from megatron_ttrace.placement.plan import Step, describe, plan
from tests.placement.by_hand import (
    Assembled,
    chunk,
    gated_chunk,
    local_shape,
    meshes,
    numbered,
    zigzag,
)
from tests.placement.meshes import mesh_of

S, B, H = 16, 2, 12
"""Sequence, batch, hidden."""


def infer(local, logical, gated=False, seq_length=S, **sizes):
    """The placement in words, for rank 0 of a world that just holds the layout."""
    world = int(np.prod(list(sizes.values()), dtype=int))
    return describe(
        infer_activation(
            local,
            logical,
            mesh_of(0, world, **sizes),
            seq_length=seq_length,
            blocks=2 if gated else 1,
        )
    )


@pytest.mark.parametrize(
    ("local", "logical", "sizes", "expected"),
    [
        # one device, or tensors that no axis divides
        ((S, B, H), (S, B, H), {}, "Replicate"),
        ((S, B, H), (S, B, H), {"tp": 2}, "Replicate"),
        ((S, B, H), (S, B, H), {"tp": 2, "cp": 2}, "Replicate"),
        ((), (), {"tp": 2, "cp": 2}, "Replicate"),
        ((0, H), (0, H), {"tp": 2}, "Replicate"),
        # tensor parallel: hidden, heads, vocabulary
        ((S, B, H // 2), (S, B, H), {"tp": 2}, "tp:Shard(2)"),
        ((B, 2, S, S), (B, 4, S, S), {"tp": 2}, "tp:Shard(1)"),
        # keys and values of fewer groups than ranks
        ((S, B, 1, H), (S, B, 2, H), {"tp": 4}, "tp:GroupShard(2, 2)"),
        ((S, B, 1, H), (S, B, 1, H), {"tp": 4}, "Replicate"),
        ((S, B, 1, H), (S, B, 4, H), {"tp": 4}, "tp:Shard(2)"),
        ((S // 2, B, 1, H), (S, B, 2, H), {"tp": 4, "cp": 2}, "cp:ZigZag(0) tp:GroupShard(2, 2)"),
        ((S * B, 1, H), (S * B, 2, H), {"tp": 4}, "tp:GroupShard(1, 2)"),
        # sequence parallel
        ((S // 4, B, H), (S, B, H), {"tp": 4}, "tp:Shard(0)"),
        ((S * B // 2, H), (S * B, H), {"tp": 2}, "tp:Shard(0)"),
        # context parallel
        ((S // 2, B, H), (S, B, H), {"cp": 2}, "cp:ZigZag(0)"),
        ((B, S // 2), (B, S), {"cp": 2}, "cp:ZigZag(1)"),
        # context and tensor parallel, of different sizes and of one size
        ((S // 2, B, H // 4), (S, B, H), {"cp": 2, "tp": 4}, "cp:ZigZag(0) tp:Shard(2)"),
        ((S // 2, B, H // 2), (S, B, H), {"cp": 2, "tp": 2}, "cp:ZigZag(0) tp:Shard(2)"),
        ((S // 2, B, H), (S, B, H), {"cp": 2, "tp": 2}, "cp:ZigZag(0)"),
        # context and sequence parallel: the same dim twice
        ((S // 4, B, H), (S, B, H), {"cp": 2, "tp": 2}, "cp:ZigZag(0) tp:Shard(0)"),
        ((S // 8, B, H), (S, B, H), {"cp": 2, "tp": 4}, "cp:ZigZag(0) tp:Shard(0)"),
        ((S // 8, B, H), (S, B, H), {"cp": 4, "tp": 2}, "cp:ZigZag(0) tp:Shard(0)"),
        # all tokens in one dim, as a router sees them
        ((S * B // 2, H), (S * B, H), {"cp": 2}, "cp:ZigZag(0)"),
        ((S * B // 4, H), (S * B, H), {"cp": 2, "tp": 2}, "cp:ZigZag(0) tp:Shard(0)"),
        # context parallelism divides heads, of the whole sequence
        ((S, B, 2, H), (S, B, 4, H), {"cp": 2}, "cp:Shard(2)"),
        ((B, 1, S, S), (B, 8, S, S), {"tp": 4, "cp": 2}, "tp:Shard(1) cp:Shard(1)"),
        ((S, B, H // 2), (S, B, H), {"cp": 2, "tp": 3}, "cp:Shard(2)"),
        # hidden as long as the sequence
        ((S // 2, B, S // 2), (S, B, S), {"cp": 2, "tp": 2}, "cp:ZigZag(0) tp:Shard(2)"),
        ((S, B, S // 2), (S, B, S), {"tp": 2}, "tp:Shard(2)"),
    ],
)
def test_table(local, logical, sizes, expected):
    """Shapes of real layouts, and the one reading that each has."""
    assert infer(local, logical, **sizes) == expected


@pytest.mark.parametrize(
    ("local", "logical", "sizes", "expected"),
    [
        ((S, B, H), (S, B, 2 * H), {"tp": 2}, "tp:BlockShard(2, 2)"),
        ((S // 2, B, H), (S, B, 2 * H), {"tp": 2, "cp": 2}, "cp:ZigZag(0) tp:BlockShard(2, 2)"),
        ((S // 2, B, H), (S, B, H), {"tp": 2}, "tp:Shard(0)"),
        ((S, B, H), (S, B, H), {"tp": 2}, "Replicate"),
    ],
)
def test_gated_table(local, logical, sizes, expected):
    """Only the last dim stacks gate and up; a sequence dim never does."""
    assert infer(local, logical, gated=True, **sizes) == expected


@pytest.mark.parametrize(
    ("local", "logical", "sizes", "says"),
    [
        ((S, H), (S, B, H), {"tp": 2}, "does not have as many dims"),
        ((S, B, 2, H), (S, B, 4, H), {"tp": 4}, "does not match any division"),
        ((S, B, 1, H), (S, B, 3, H), {"tp": 4}, "does not match any division"),
        ((1, H), (2, H), {"tp": 4}, "does not match any division"),
        ((S, B, 5), (S, B, H), {"tp": 2}, "is not an even part"),
        ((S, B, 2 * H), (S, B, H), {"tp": 2}, "is not an even part"),
        ((0, B, H), (S, B, H), {"tp": 2}, "is not an even part"),
        ((S, B, H), (0, B, H), {"tp": 2}, "is not an even part"),
        ((S, B, H // 4), (S, B, H), {"tp": 2}, "does not match any division"),
        ((S, B, H // 2), (S, B, H), {}, "does not match any division"),
        ((S // 2, B, H // 2), (S, B, H), {"tp": 2}, "does not match any division"),
        ((S, 1, H), (S, B, H), {"cp": 2}, "does not match any division"),
        ((S // 4, B, H), (S, B, H), {"cp": 2}, "does not match any division"),
        ((S // 8, B, H), (S, B, H), {"cp": 2, "tp": 2}, "does not match any division"),
        ((S // 4, B, H // 2), (S, B, H), {"cp": 2, "tp": 2}, "does not match any division"),
    ],
)
def test_what_fits_no_reading_is_an_error(local, logical, sizes, says):
    """A verdict with a sentence, never a guess."""
    with pytest.raises(NoPlacementError, match=says):
        infer(local, logical, **sizes)


def test_packed_sequences():
    """Context parallelism divides each; lengths that it cannot divide are an error."""
    mesh = mesh_of(1, 2, cp=2)
    placement = infer_activation((6, 1, H), (12, 1, H), mesh, seq_length=12, ends=(4, 12))
    assert describe(placement) == "cp:ZigZag(0, 2 sequences)"
    assert [box.logical[0] for box in plan((12, 1, H), placement, mesh)] == [1, 6]
    for ends, says in (((3, 12), "a sequence of 3"), ((4, 8), "end at 8, the dim at 12")):
        with pytest.raises(ValueError, match=says):
            plan((12, 1, H), (Step("cp", ZigZag(0, ends)),), mesh)


@given(st.data())
def test_the_inferred_placement_merges_to_the_logical_tensor(data):
    """Cut by hand in every way that Megatron cuts activations; the inferred boxes undo it."""
    cp = data.draw(st.sampled_from([1, 2, 3]), "cp")
    tp = data.draw(st.sampled_from([1, 2, 3, 4]), "tp")
    inner = data.draw(st.sampled_from(["hidden", "gated", "sequence", "none"]), "inner")
    seq = 2 * cp * tp * data.draw(st.integers(1, 2))
    hidden = 2 * tp * data.draw(st.integers(1, 3))
    batch = data.draw(st.integers(1, 2))
    logical = numbered(seq, batch, hidden)
    merged = Assembled(logical.shape)
    for mesh in meshes(tp=tp, cp=cp):
        local = zigzag(logical, 0, mesh.at("cp"), cp)
        if inner == "gated":
            local = gated_chunk(local, 2, mesh.at("tp"), tp)
        elif inner != "none":
            local = chunk(local, 2 if inner == "hidden" else 0, mesh.at("tp"), tp)
        placement = infer_activation(
            local.shape, logical.shape, mesh, seq_length=seq, blocks=2 if inner == "gated" else 1
        )
        assert local_shape(logical.shape, placement, mesh) == local.shape
        merged.write(local, plan(logical.shape, placement, mesh))
    np.testing.assert_array_equal(merged.values, logical)
    assert (merged.holders == (tp if inner == "none" else 1)).all()


@given(
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    tp=st.sampled_from([1, 2]),
    cp=st.sampled_from([1, 2]),
)
def test_rows_of_heads(tokens, heads, tp, cp):
    """All tokens on every rank, its heads one after the other, as ``reshape`` puts them."""
    whole = numbered(tokens * heads * tp * cp, 2)
    assembled = Assembled(whole.shape)
    for mesh in meshes(tp=tp, cp=cp):
        cut = whole.reshape(tokens, heads * tp * cp, 2)
        cut = chunk(chunk(cut, 1, mesh.at("tp"), tp), 1, mesh.at("cp"), cp)
        local = cut.reshape(-1, 2)
        placement = infer_head_rows(local.shape, whole.shape, heads * tp * cp, mesh)
        assembled.write(local, plan(whole.shape, placement, mesh))
    assert (assembled.values == whole).all()
    assert (assembled.holders == 1).all()


def test_rows_of_heads_that_do_not_fit():
    """A wrong number of rows is a sentence."""
    with pytest.raises(NoPlacementError, match="does not match a division of 4 heads"):
        infer_head_rows((8, 2), (8, 2), 4, mesh_of(0, 2, tp=2))
    with pytest.raises(NoPlacementError, match="not a multiple of 3 heads"):
        infer_head_rows((4, 2), (8, 2), 3, mesh_of(0, 2, tp=2))
