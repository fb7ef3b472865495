# SPDX-License-Identifier: Apache-2.0
"""Copies come back bit for bit, wherever they were; in memory are only as many as there may be."""

import collections
import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.trace import copies as module
from megatron_ttrace.trace.copies import Copies
from megatron_ttrace.trace.errors import TTraceError
from tests.bench.memory import Peak
from tests.trace.traces import bits

MB = 1 << 20
CPU = torch.device("cpu")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int64,
    torch.bool,
)
Usage = collections.namedtuple("Usage", "total used free")


def noise(dtype, *shape):
    """Any bits, NaN with payloads among them; of a boolean the two that there are."""
    size = dtype.itemsize
    data = torch.randint(0, 2 if dtype is torch.bool else 256, (*shape, size), dtype=torch.uint8)
    return data.view(dtype).reshape(shape)


@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3),
    strided=st.booleans(),
    room=st.integers(0, 200),
    piece=st.integers(1, 64),
)
def test_copies_come_back_bit_for_bit(tmp_path_factory, dtype, shape, strided, room, piece):
    """Any dtype, shape, stride; in memory or in a file, read in pieces of any size; repeatedly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_PIECE", piece)
        tensors = [noise(dtype, *shape) for _ in range(3)]
        if strided and len(shape) > 1:
            tensors = [one.transpose(0, 1) for one in tensors]
        elif strided and len(shape) == 1:
            tensors = [one.unsqueeze(1).expand(-1, 2).contiguous()[:, 0] for one in tensors]
        before = [bits(one) for one in tensors]
        with Copies(room, 0, tmp_path_factory.getbasetemp()) as copies:
            kept = [copies.copy(one) for one in tensors]
            for _ in range(2):
                for one in tensors:
                    one.copy_(noise(dtype, *one.shape))
                assert [bits(one.get()) for one in kept] == before
                for copy, one in zip(kept, tensors, strict=True):
                    copy.put(one)
                assert [bits(one) for one in tensors] == before
        assert copies.room >= 0
        assert (copies._file is None) == (room - copies.room == sum(map(len, before)))


def test_a_file_has_no_name_and_goes_with_its_process(tmp_path):
    """Nothing is left in the directory, neither during nor after; a closed file is not read."""
    with Copies(0, 0, tmp_path) as copies:
        copy = copies.copy(torch.ones(4))
        assert copies._file is not None
        assert not any(tmp_path.iterdir())
    with pytest.raises((OSError, ValueError)):
        copy.get()


def test_others_get_what_is_left(tmp_path):
    """Copies for a shorter time use the rest of the room, and their own file."""
    with Copies(100, 0, tmp_path) as first:
        one = first.copy(torch.ones(20))
        with first.others() as second:
            assert second.copy(torch.ones(5)).file is None
            two = second.copy(torch.full((5,), 2.0))
            assert (one.file, two.get().tolist()) == (None, [2.0] * 5)
        assert first.copy(torch.ones(5)).file is None


def test_another_dtype_or_stride_is_converted(tmp_path):
    """What a step has replaced by a tensor of another form gets the values."""
    with Copies(0, 0, tmp_path) as copies:
        copy = copies.copy(torch.arange(6, dtype=torch.float32).view(2, 3))
        target = torch.zeros(3, 2, dtype=torch.float64).T
        copy.put(target)
        assert target.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_tensor_of_a_class_of_its_own_stays_in_memory(tmp_path):
    """Its bytes are not all that it is."""
    with Copies(0, 0, tmp_path) as copies:
        assert type(copies.copy(_Own(torch.ones(3))).get()) is _Own


class _Own(torch.Tensor):
    """A class of its own, as that of tensors in FP8 is."""

    def __new__(cls, data):
        return torch.Tensor._make_subclass(cls, data)


def test_a_disk_without_room_is_refused_in_one_line(tmp_path, monkeypatch):
    """For all ranks' files together, and only for what is not in memory; enough is enough."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(9, 9, 2_800_000))
    copies = Copies(2 * MB, 0, tmp_path, ranks=4)
    copies.require_space(CPU, 2 * MB + 700_000)
    with pytest.raises(
        TTraceError, match=r"has 2\.8 MB free, .* needs about 4\.0 MB: .*memory-mb"
    ) as no:
        copies.require_space(CPU, 2 * MB + 1_000_000)
    assert "\n" not in str(no.value)
    Copies(0, 9 * MB, tmp_path).require_space(torch.device("cuda"), 9 * MB)


def test_memory_is_bounded(tmp_path):
    """Copies of 96 MB, 16 of them in memory, make the process larger by little more than 16 MB."""
    tensors = [torch.full((MB,), float(number)) for number in range(24)]
    with Peak() as before:
        pass
    with Peak() as peak, Copies(16 * MB, 0, tmp_path) as copies:
        kept = [copies.copy(one) for one in tensors]
        for copy, one in zip(kept, tensors, strict=True):
            one.zero_()
            copy.put(one)
            assert int(copy.get()[0]) == int(one[-1])
    assert 12 * MB < peak.resident - before.resident < 36 * MB
    assert [int(one[0]) for one in tensors] == list(range(24))
