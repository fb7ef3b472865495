# SPDX-License-Identifier: Apache-2.0
"""The sums of a box against numpy's float64, for every dtype and every awkward tensor."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare import measure as measuring
from megatron_ttrace.compare.measure import Sums, checksum, local_view, logical_view, measure
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.boxes import whole as undivided
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.placements import FlatShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Step, plan
from tests.placement.meshes import mesh_of

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
inf, nan = math.inf, math.nan


def whole(tensor):
    """The boxes of an undivided tensor."""
    return plan(tuple(tensor.shape), (), SINGLE)


def random(shape, dtype=torch.float32, seed=0, scale=1.0):
    """Normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def by_numpy(local, logical, factor=1.0):
    """The sums, in float64, of two equally shaped tensors."""
    c = local.double().numpy().reshape(-1) / factor
    r = logical.double().numpy().reshape(-1)
    return Sums(
        n=c.size,
        diff=float(((c - r) ** 2).sum()),
        reference=float((r**2).sum()),
        candidate=float((c**2).sum()),
        dot=float((c * r).sum()),
        worst=float(np.abs(c - r).max()) if c.size else 0.0,
        checksum=checksum(local),
    )


def close(found, expected, rel=2e-5):
    """Sums are as good as float32 within a chunk is."""
    assert (found.n, found.nonfinite) == (expected.n, expected.nonfinite)
    scale = max(expected.reference, expected.candidate)
    for name in ("diff", "reference", "candidate", "worst"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=rel, abs=0), name
    assert found.dot == pytest.approx(expected.dot, rel=rel, abs=rel * scale)


@pytest.mark.parametrize("scale", [1e-30, 1e-22, 1e-12, 1.0, 1e12, 1e30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_size_of_number(dtype, scale):
    """Squares of 1e-30 underflow float32 and of 1e30 overflow it; the sums do neither."""
    r = random((40, 7), dtype, scale=scale)
    c = (r.double() * (1 + 0.01 * random((40, 7), torch.float64, seed=1))).to(dtype)
    found = measure(c, r, whole(r))
    assert found.diff > 0
    close(found, by_numpy(c, r))


@pytest.mark.parametrize("size", [1e-30, 1e-22, 1e30])
def test_equal_tensors_keep_their_norm(size):
    """A difference of zero says nothing of the squares: the reference's norm must be right too."""
    r = random((40, 7), scale=size)
    found = measure(r, r, whole(r))
    assert found.diff == 0.0
    assert found.reference == pytest.approx(by_numpy(r, r).reference, rel=2e-5, abs=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 2.0, 3.0, 0.125])
def test_factor(dtype, factor):
    """A candidate that must be ``factor`` times the reference is compared after division."""
    r = random((33, 5), dtype)
    c = (r.double() * factor + 0.01 * random((33, 5), torch.float64, seed=1)).to(dtype)
    close(measure(c, r, whole(r), factor), by_numpy(c, r, factor))


def test_more_than_one_chunk():
    """Chunks are an inner matter: a tensor of three and a bit has the same sums."""
    n = 3 * measuring._CHUNK + 17
    r = random((n,))
    c = r + 0.01 * random((n,), seed=1)
    close(measure(c, r, whole(r)), by_numpy(c, r), rel=1e-4)


def test_float64_is_compared_as_float64():
    """Differences below float32's resolution count when both sides are float64."""
    r = random((100,), torch.float64)
    found = measure(r * (1 + 1e-12), r, whole(r))
    assert math.sqrt(found.diff / found.reference) == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("dtype", FP8, ids=str)
def test_fp8(dtype):
    """FP8 tensors have no arithmetic of their own, and are compared all the same."""
    r, c = random((16, 16), dtype), random((16, 16), dtype, seed=1)
    close(measure(c, r, whole(r)), by_numpy(c.float(), r.float()))
    assert measure(r, r, whole(r)).diff == 0.0
    assert checksum(c) != checksum(r)


def test_mixed_dtypes():
    """A bf16 candidate of a float32 reference differs by its rounding."""
    r = random((64, 64))
    found = measure(r.bfloat16(), r, whole(r))
    assert 0.0005 < math.sqrt(found.diff / found.reference) < 0.004


def test_strides_do_not_matter():
    """Transposed and expanded tensors, on either side."""
    r = random((12, 8))
    c = r + 0.1
    expected = by_numpy(c, r)
    close(measure(c.t().contiguous().t(), r, whole(r)), expected)
    close(measure(c, r.t().contiguous().t(), whole(r)), expected)
    row = random((1, 8)).expand(12, 8)
    close(measure(row, r, whole(r)), by_numpy(row, r))
    assert checksum(c.t().contiguous().t()) == checksum(c)


def test_scalars_single_elements_and_empty_tensors():
    """0 dims, one element, no element."""
    assert measure(torch.tensor(3.0), torch.tensor(1.0), whole(torch.tensor(1.0))) == Sums(
        1, 4.0, 1.0, 9.0, 3.0, 2.0, 0, checksum(torch.tensor(3.0))
    )
    one = torch.tensor([[2.0]])
    assert measure(one, one, whole(one)).diff == 0.0
    empty = torch.zeros(0, 4)
    assert measure(empty, empty, whole(empty)) == Sums()
    assert measure(empty, empty, (Box((0, 0), (0, 4), (0, 0)),)) == Sums()
    assert checksum(empty) == 0


def test_zeros():
    """Equal zeros differ by nothing; a candidate of zeros differs by all of the reference."""
    zero, r = torch.zeros(9), random((9,))
    assert measure(zero, zero, whole(zero)).diff == 0.0
    found = measure(zero, r, whole(r))
    assert found.diff == pytest.approx(found.reference, rel=1e-6)
    assert found.candidate == 0.0


@pytest.mark.parametrize(
    ("candidate", "reference", "nonfinite", "diff"),
    [
        ([nan, 1.0], [1.0, 1.0], 1, 0.0),
        ([inf, 1.0], [1.0, 1.0], 1, 0.0),
        ([1.0, 1.0], [nan, 1.0], 1, 0.0),
        ([1.0, 1.0], [-inf, 1.0], 1, 0.0),
        ([nan, 1.0], [nan, 1.0], 0, 0.0),
        ([inf, 1.0], [inf, 1.0], 0, 0.0),
        ([-inf, 3.0], [-inf, 1.0], 0, 4.0),
        ([inf, 1.0], [-inf, 1.0], 1, 0.0),
        ([nan, 1.0], [inf, 1.0], 1, 0.0),
        ([nan, inf, 5.0], [inf, nan, 1.0], 2, 16.0),
        ([nan, nan], [nan, nan], 0, 0.0),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nan_and_infinity(candidate, reference, nonfinite, diff, dtype):
    """Equal ones at equal places are agreement; any other is counted, and hides nothing else."""
    c, r = torch.tensor(candidate, dtype=dtype), torch.tensor(reference, dtype=dtype)
    found = measure(c, r, whole(r))
    assert (found.nonfinite, found.diff) == (nonfinite, diff)
    assert all(map(math.isfinite, (found.reference, found.candidate, found.dot, found.worst)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool], ids=str)
def test_discrete_tensors(dtype):
    """Equal or not: how far apart two token ids are means nothing."""
    r = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
    c = torch.tensor([0, 1, 0, 1, 1]).to(dtype)
    assert measure(r, r, whole(r)).diff == 0.0
    assert measure(c, r, whole(r)) == Sums(5, 2.0, 5.0, 5.0, 3.0, 1.0, 0, checksum(c))
    assert checksum(c) != checksum(r)


@pytest.mark.parametrize("placement", [Step("tp", Shard(1)), Step("cp", ZigZag(0))], ids=str)
def test_ranks_add_up_to_the_whole(placement):
    """The sums of all ranks' boxes are the sums of the whole tensor."""
    logical = random((8, 6))
    other = logical + 0.1 * random((8, 6), seed=1)
    total = Sums()
    for rank in range(2):
        mesh = mesh_of(rank, 2, **{placement.axis: 2})
        boxes = plan((8, 6), (placement,), mesh)
        local = torch.cat([logical_view(other, box) for box in boxes], placement.placement.dim)
        total += measure(local, logical, boxes)
    close(total, by_numpy(other, logical))


def test_flat_boxes_are_offsets_into_a_vector():
    """A ZeRO range of a matrix against the matrix."""
    logical = random((5, 7))
    boxes = FlatShard(4, 30).boxes([undivided(5), undivided(7)])
    local = logical.reshape(-1)[4:30] + 1.0
    found = measure(local, logical, boxes)
    close(found, by_numpy(local, logical.reshape(-1)[4:30]))
    local_view(local, boxes[-1]).fill_(0.0)
    assert float(local[-boxes[-1].numel :].abs().max()) == 0.0


@given(st.data())
def test_a_checksum_tells_replicas_apart(data):
    """One changed, swapped or sign-flipped element of any dtype is another replica."""
    dtype = data.draw(
        st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.float8_e4m3fn])
    )
    n = data.draw(st.integers(2, 70))
    tensor = random((n,), torch.float32, seed=data.draw(st.integers(0, 99)), scale=8).to(dtype)
    where = data.draw(st.integers(0, n - 1))
    other = tensor.clone().float()
    other[where] = -other[where] if other[where] else 1.0
    if dtype is torch.int64 and not tensor[where]:
        other[where] = 1.0
    changed = other.to(dtype)
    assert checksum(changed) != checksum(tensor)
    there = data.draw(st.integers(0, n - 1))
    swapped = tensor.clone()
    swapped[where], swapped[there] = tensor[there].clone(), tensor[where].clone()
    same = torch.equal(swapped.view(torch.uint8), tensor.view(torch.uint8))
    assert (checksum(swapped) == checksum(tensor)) == same


def test_a_checksum_does_not_depend_on_where_the_tensor_lies():
    """Views into a larger buffer, at offsets that are no multiple of eight bytes."""
    data = random((200,), torch.bfloat16)
    for offset in range(9):
        view = data[offset : offset + 100]
        assert checksum(view) == checksum(view.clone())


def test_a_checksum_sees_the_end_and_swapped_rows():
    """Swapped rows have the same elements and are not the same replica."""
    rows = random((1000, 300))
    assert checksum(rows) != checksum(rows.flip(0))
    for n in (1, 2, 3, 5, 9):
        end = torch.zeros(n, dtype=torch.bfloat16)
        other = end.clone()
        other[-1] = 1.0
        assert checksum(end) != checksum(other)
    assert checksum(torch.tensor([1.0, -0.0])) != checksum(torch.tensor([1.0, 0.0]))
