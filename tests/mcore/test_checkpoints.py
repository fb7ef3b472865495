# SPDX-License-Identifier: Apache-2.0
"""Weights are read from checkpoints as PyTorch writes them, and nothing is unpickled."""

import collections
import contextlib
import io
import os
import pickle
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.checkpoints import inert, stored
from megatron_ttrace.mcore.checkpoints.inert import Made

SIMPLE = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
VALUES = st.recursive(
    SIMPLE | st.floats(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.tuples(st.integers()), inner)
    ),
    max_leaves=20,
)


@settings(max_examples=30)
@given(VALUES, st.integers(0, pickle.HIGHEST_PROTOCOL))
def test_plain_values(value, protocol):
    """What needs no code is itself, in every protocol that PyTorch has used."""
    if protocol < 3 and _has_bytes(value):
        return
    assert inert.read(pickle.dumps(value, protocol), "x") == value


def _has_bytes(value):
    return isinstance(value, bytes) or (
        isinstance(value, (list, tuple, dict))
        and any(map(_has_bytes, value.values() if isinstance(value, dict) else value))
    )


class Harmful:
    """Unpickled, it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_nothing_is_run(tmp_path, protocol):
    """What a pickle would call is described."""
    data = pickle.dumps([Harmful(tmp_path / "made")], protocol)
    (found,) = inert.read(data, "x")
    assert isinstance(found, Made)
    assert (found.name, found.arguments) == ("posix.mkdir", (str(tmp_path / "made"),))
    assert not (tmp_path / "made").exists()


def test_what_is_built():
    """Instances with their state, and items that are added to them."""
    made = inert.read(pickle.dumps(collections.OrderedDict(a=1), 4), "x")
    assert (made.name, made.items) == ("collections.OrderedDict", ["a", 1])
    size = inert.read(pickle.dumps(torch.Size([2, 3]), 4), "x")
    assert (size.name, size.arguments) == ("torch.Size", ((2, 3),))


@given(st.binary(max_size=200))
def test_noise(data):
    """Damaged data is one error."""
    with contextlib.suppress(TTraceError):
        inert.read(data, "x")


TENSORS = {
    "decoder.layers.self_attention.linear_qkv.weight": torch.randn(2, 6, 4),
    "decoder.final_layernorm.weight": torch.randn(4).bfloat16(),
    "embedding.word_embeddings.weight": torch.randn(8, 4).half(),
    "scalar": torch.tensor(2.5),
    "empty": torch.zeros(0, 3),
    "whole": torch.arange(6),
    "transposed": torch.randn(3, 5).t(),
}


@pytest.fixture
def distributed(tmp_path):
    """A distributed checkpoint, with weights, optimizer state and other objects."""
    state = {**TENSORS, "optimizer.state.exp_avg.a": torch.ones(3), "args": {"a": [1]}}
    dcp.save(state, checkpoint_id=tmp_path / "a", no_dist=True)
    return tmp_path / "a"


def test_a_distributed_checkpoint(distributed):
    """All weights with their bits; nothing else."""
    found = stored.weights(distributed)
    assert set(found) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].shape == tuple(tensor.shape)
        (chunk,) = found[name].chunks
        read = chunk.read()
        assert read.dtype == tensor.dtype
        assert torch.equal(read, tensor)


def test_the_latest_iteration(distributed):
    """As Megatron marks it."""
    home = distributed.parent / "all"
    home.mkdir()
    (home / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(TTraceError, match="iter_0000012, which is not there"):
        stored.weights(home)
    distributed.rename(home / "iter_0000012")
    assert set(stored.weights(home)) == set(TENSORS)


def test_prefixes_of_wrappers(tmp_path):
    """Formats that keep the wrappers' names hold the same weights."""
    save_file(
        {"model.module.decoder.a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "m.safetensors"
    )
    assert set(stored.weights(tmp_path)) == {"decoder.a", "b"}


def test_refused(tmp_path):
    """Each with what to do."""
    with pytest.raises(TTraceError, match="no such directory"):
        stored.weights(tmp_path / "absent")
    with pytest.raises(TTraceError, match="holds no checkpoint"):
        stored.weights(tmp_path)
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").touch()
    with pytest.raises(TTraceError, match="which is pickles: convert it"):
        stored.weights(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(TTraceError, match="not that of a checkpoint"):
        stored.weights(tmp_path)


def test_damage(distributed):
    """A file that is missing or was cut is named."""
    found = stored.weights(distributed)
    chunk = found["scalar"].chunks[0]
    data = chunk.file.read_bytes()
    chunk.file.write_bytes(data[: chunk.start + chunk.length // 2])
    with pytest.raises(TTraceError, match="damaged or missing"):
        chunk.read()
    chunk.file.unlink()
    with pytest.raises(TTraceError, match="damaged or missing"):
        chunk.read()


def test_foreign_tensors(tmp_path):
    """Kinds of tensors that are not read are refused, not guessed."""
    buffer = io.BytesIO()
    torch.save({"a": 1}, buffer)
    with pytest.raises(TTraceError, match="of a kind that is not read"):
        stored._tensor(buffer.getvalue(), "x")
    buffer = io.BytesIO()
    torch.save(torch.ones(2).to(torch.complex64), buffer)
    with pytest.raises(TTraceError, match="dtype that is not read"):
        stored._tensor(buffer.getvalue(), "x")
    with pytest.raises(zipfile.BadZipFile):
        stored._tensor(b"noise", str(Path("x")))
