# SPDX-License-Identifier: Apache-2.0
"""Which compiled file is used, and blocks that are read in order; test_measure.py has the sums."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare import native
from megatron_ttrace.compare.native import blocks, dims
from megatron_ttrace.trace import compiled


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_it_was_compiled():
    """Where there is a compiler; a build that fails is a warning at installation, and NumPy."""
    assert native.library() is not None


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The module as if it lay in another directory, and asked for the first time."""
    if native.library() is None:
        pytest.skip("no C compiler when this was installed")
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "trace" / "compiled.py"))
    (tmp_path / "compare").mkdir()
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_a_wheel_has_no_source(elsewhere):
    assert native.library() is not None


def test_a_file_of_another_source_is_not_used(elsewhere):
    """After an update of a checkout, until it is installed again: its numbers may be others."""
    (elsewhere / "compare" / "sums.c").write_text("another source")
    assert native.library() is None


SIZES = st.lists(st.integers(1, 5), max_size=4)


@st.composite
def tensors(draw, sizes):
    """Different numbers: a part of a larger tensor, in any order, perhaps repeated."""
    order = draw(st.permutations(range(len(sizes))))
    more = [size + draw(st.integers(0, 2)) for size in sizes]
    data = torch.arange(torch.Size(more).numel(), dtype=torch.float64)
    data = data.reshape([more[dim] for dim in order]).permute(
        [order.index(dim) for dim in range(len(order))]
    )
    for dim, size in enumerate(sizes):
        data = data.narrow(dim, data.shape[dim] - size, size)
    for dim in range(len(sizes)):
        if draw(st.integers(0, 4)) == 0:
            data = data.narrow(dim, 0, 1).expand(sizes)
            break
    return data


PAIRS = SIZES.flatmap(lambda sizes: st.tuples(tensors(sizes), tensors(sizes)))


@given(PAIRS)
def test_merged_dimensions(pair):
    """They have the same elements in the same order."""
    merged = dims(*pair)
    sizes = [size for size, *_ in merged]
    for side, whole in enumerate(pair):
        strides = [one[1 + side] for one in merged]
        read = whole.as_strided(sizes, strides, whole.storage_offset())
        assert torch.equal(read.reshape(-1), whole.reshape(-1))


@given(PAIRS)
def test_blocks_are_contiguous(pair):
    """In row-major order."""
    found = list(blocks(*pair))
    assert all(x.is_contiguous() and y.is_contiguous() for x, y in found)
    for side, whole in enumerate(pair):
        assert torch.equal(torch.cat([one[side].reshape(-1) for one in found]), whole.reshape(-1))


def test_a_shard_has_rows():
    """A column shard of a matrix has two dimensions, a row shard one."""
    whole = torch.zeros(6, 8)
    for part, expected in (
        (whole[:, 2:5], [(6, 3, 8), (3, 1, 1)]),
        (whole[1:3], [(16, 1, 1)]),
        (whole[:, 2:5].unsqueeze(1), [(6, 3, 8), (3, 1, 1)]),
    ):
        assert dims(torch.zeros(part.shape), part) == expected
