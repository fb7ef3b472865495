# SPDX-License-Identifier: Apache-2.0
"""The tensors of a safetensors file are the ones that safetensors itself reads."""

import os

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from megatron_ttrace.trace.mapped import MappedFile

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.uint16, torch.complex64),
)
"""The last two are left to safetensors."""


def bits(tensor):
    """For comparison."""
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=5),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=4)),
        min_size=1,
        max_size=6,
    )
)
def test_every_tensor(tmp_path_factory, shapes):
    """Of any names, dtypes and shapes, in any order."""
    path = tmp_path_factory.mktemp("mapped") / "file.safetensors"
    made = {name: (torch.rand(shape) * 50).to(dtype) for name, (dtype, shape) in shapes.items()}
    save_file(made, path)
    mapped, theirs = MappedFile(path), load_file(path)
    assert sorted(mapped.names) == sorted(theirs)
    for name, expected in theirs.items():
        for found in (mapped.get(name), mapped.get(name)):
            assert found is not None
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            assert bits(found) == bits(expected) == bits(made[name])
    assert sorted(mapped.names) == sorted(theirs)
    assert mapped.get("no such name") is None


@pytest.mark.parametrize("left", [5, 20, -1])
def test_a_shortened_file(tmp_path, left):
    """Is refused when it is opened, not when it is read."""
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.ones(5)}, path)
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(SafetensorError):
        MappedFile(path)


def test_a_tensor_outlives_its_file(tmp_path):
    """The mapping stays as long as one of its tensors."""
    path = tmp_path / "file.safetensors"
    save_file({"a": torch.arange(9)}, path)
    tensor = MappedFile(path).get("a")
    path.unlink()
    assert tensor.tolist() == list(range(9))


def test_a_file_that_becomes_shorter(tmp_path):
    """Another process truncates it: an error, where reading the mapping would end the process."""
    path = tmp_path / "there.safetensors"
    save_file({"a": torch.ones(1 << 16), "b": torch.ones(1 << 16)}, path)
    mapped = MappedFile(path)
    assert mapped.get("a").sum() == 1 << 16
    os.truncate(path, 4096)
    for name in ("a", "b"):
        with pytest.raises(ValueError, match="truncated"):
            mapped.get(name)
