# SPDX-License-Identifier: Apache-2.0
"""The sums of a box against numpy's float64, for every dtype and every awkward tensor."""

import ctypes
import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.compare import native
from megatron_ttrace.compare.measure import Sums, measure
from megatron_ttrace.compare.native import BLOCK
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.boxes import whole as undivided
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.placements import FlatShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Step, plan
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.views import local_view, logical_view
from tests.placement.meshes import mesh_of

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
inf, nan = math.inf, math.nan


def whole(tensor):
    return plan(tuple(tensor.shape), (), SINGLE)


def random(shape, dtype=torch.float32, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def by_numpy(local, logical, factor=1.0):
    """The sums, in float64, of two equally shaped tensors."""
    c = local.double().numpy().reshape(-1) * (1.0 / factor)
    r = logical.double().numpy().reshape(-1)
    finite, undefined = np.isfinite(c) & np.isfinite(r), np.isnan(c) & np.isnan(r)
    agree = finite | undefined | (c == r)
    c, r = c[finite], r[finite]
    same = local.dtype == logical.dtype and factor == 1.0 and bits(local) == bits(logical)
    return Sums(
        n=finite.size,
        diff=math.fsum((c - r) ** 2),
        reference=math.fsum(r**2),
        candidate=math.fsum(c**2),
        dot=math.fsum(c * r),
        worst=float(np.abs(c - r).max()) if c.size else 0.0,
        nonfinite=int((~agree).sum()),
        checksum=0 if same else checksum(local),
        undefined=int(undefined.sum()),
    )


def bits(tensor):
    return bytes(
        tensor.new_empty(tensor.shape).copy_(tensor).reshape(-1).view(torch.uint8).tolist()
    )


def close(found, expected, rel=1e-12, without=()):
    """As good as float64 is; what is counted, and the checksum, exactly."""
    scale = max(expected.reference, expected.candidate)
    for name, theirs in dataclasses.asdict(expected).items():
        if isinstance(theirs, float):
            atol = rel * scale if name == "dot" else 0.0
            assert getattr(found, name) == pytest.approx(theirs, rel=rel, abs=atol), name
        elif name not in without:
            assert getattr(found, name) == theirs, name


@pytest.fixture(params=[512, 256, 128, "plain"], scope="module", autouse=True)
def way(request):
    """All ways to the same numbers: of processors with vectors of so many bits, and PyTorch's."""
    library = native.library()
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "plain":
            patch.setattr(native, "library", lambda: None)
        elif library is None:
            pytest.skip("no C compiler when this was installed")
        else:
            widest = ctypes.c_int.in_dll(library, "ttrace_widest")
            patch.setattr(widest, "value", request.param)
        yield


def in_blocks_of(size, patch):
    patch.setattr(native, "BLOCK", size)
    patch.setattr(native, "_PIECE", size)


FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *FP8)
SHAPES = st.one_of(
    st.just(()),
    st.tuples(st.integers(0, 70)),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)),
)
ODD = st.sampled_from([nan, inf, -inf, 0.0, -0.0, 1e-45, -3e-39, 6e-8, 1.5])


@given(
    shape=SHAPES,
    seed=st.integers(0, 99),
    candidate=st.sampled_from(FLOATS),
    reference=st.sampled_from(FLOATS),
    factor=st.sampled_from([1.0, 2.0, 3.0, 0.125]),
    scale=st.sampled_from([1e-30, 1e-22, 1e-6, 1.0, 1e15, 1e30]),
    error=st.sampled_from([0.0, 1e-12, 1e-9, 1e-2, 10.0, -1.0]),
    holes=st.lists(st.tuples(ODD, ODD), max_size=4),
    flip=st.tuples(st.booleans(), st.booleans()),
    block=st.sampled_from([1, 3, 16, 1 << 15]),
)
def test_the_numbers_of_float64(
    shape, seed, candidate, reference, factor, scale, error, holes, flip, block
):
    """Of any pair of dtypes, shapes, strides and values; blocks are an inner matter.

    Squares of 1e-30 underflow float32 and of 1e30 overflow it; the sums do neither.
    """
    r = random(shape, torch.float64, seed, scale)
    c = r * factor * (1 + error * random(shape, torch.float64, seed + 1))
    for at, (left, right) in enumerate(holes[: r.numel()]):
        c.view(-1)[at], r.view(-1)[at] = left, right
    c, r = c.to(candidate), r.to(reference)
    c, r = (strided(x) if turned else x for x, turned in zip((c, r), flip, strict=True))
    with pytest.MonkeyPatch.context() as patch:
        in_blocks_of(block, patch)
        found = measure(c, r, whole(r), factor)
    close(found, by_numpy(c, r, factor))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("where", [0, 3, 6, 13])
def test_the_first_difference_may_be_late(monkeypatch, where, turned):
    """Blocks are skipped while the bits are equal; the checksum is of all bits all the same."""
    in_blocks_of(3, monkeypatch)
    r = random((7, 2))
    c = r.clone()
    c.view(-1)[where] += 0.5
    c, r = (strided(c), strided(r)) if turned else (c, r)
    close(measure(c, r, whole(r)), by_numpy(c, r))


def strided(tensor):
    if not tensor.ndim:
        return tensor
    return torch.stack((tensor, tensor), dim=tensor.ndim).select(tensor.ndim, 1)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_more_than_one_block(dtype):
    """A tensor of three blocks and a bit; a shard of it, whose reference is not contiguous."""
    r = random((5, BLOCK * 3 // 5 + 17), dtype)
    c = (r.float() * 1.01).to(dtype)
    close(measure(c, r, whole(r)), by_numpy(c, r))
    assert measure(r.clone(), r, whole(r)) == measure(r, r, whole(r))
    half = Box((0, 8), (5, r.shape[1] - 8), (0, 0))
    for part in (c[:, 8:].contiguous(), c[:, 8:], r[:, 8:].contiguous()):
        close(measure(part, r, (half,)), by_numpy(part, r[:, 8:]))


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
    assert measure(c, r, whole(r)) == Sums(
        n=5,
        diff=2.0,
        reference=5.0,
        candidate=5.0,
        dot=3.0,
        worst=1.0,
        nonfinite=0,
        checksum=checksum(c),
    )
    assert measure(r, r, whole(r)).checksum == 0


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
    close(total, by_numpy(other, logical), without=("checksum",))  # depends on the boxes


def test_flat_boxes_are_offsets_into_a_vector():
    """A ZeRO range of a matrix against the matrix."""
    logical = random((5, 7))
    boxes = FlatShard(4, 30).boxes([undivided(5), undivided(7)])
    local = logical.reshape(-1)[4:30] + 1.0
    expected = by_numpy(local, logical.reshape(-1)[4:30])
    close(measure(local, logical, boxes), expected, without=("checksum",))
    local_view(local, boxes[-1]).fill_(0.0)
    assert float(local[-boxes[-1].numel :].abs().max()) == 0.0
