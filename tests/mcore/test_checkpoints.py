# SPDX-License-Identifier: Apache-2.0
"""Weights of checkpoints: of safetensors, and of what Megatron saves and loads."""

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from megatron_ttrace.mcore.checkpoints import stored
from megatron_ttrace.trace.errors import TTraceError
from tests.integration import jobs


def test_distributed(tmp_path: Path) -> None:
    """All weights with their bits, and nothing else; a damaged checkpoint is one line."""
    words = "-m", "tests.mcore.loaded", tmp_path / "all"
    done = jobs.python(*words, cwd=tmp_path, timeout=200, cold=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_the_latest_iteration(tmp_path: Path) -> None:
    """As Megatron marks it."""
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12\n")
    with pytest.raises(TTraceError, match="iter_0000012, which does not exist"):
        stored.weights(tmp_path)
    (tmp_path / "iter_0000012").mkdir()
    save_file({"a": torch.ones(2)}, tmp_path / "iter_0000012" / "m.safetensors")
    assert set(stored.weights(tmp_path)) == {"a"}


def test_prefixes_of_wrappers(tmp_path: Path) -> None:
    """Formats that keep the wrappers' names hold the same weights."""
    save_file(
        {"model.module.decoder.a": torch.ones(2), "b": torch.zeros(1)}, tmp_path / "m.safetensors"
    )
    assert set(stored.weights(tmp_path)) == {"decoder.a", "b"}


def test_a_layer_of_a_stack(tmp_path: Path) -> None:
    """One index of the first dimension is read on its own."""
    data = torch.randn(3, 4)
    save_file({"a": data}, tmp_path / "m.safetensors")
    found = stored.weights(tmp_path)["a"]
    assert torch.equal(found.read(1), data[1])
    assert torch.equal(found.read(None), data)
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(TTraceError, match="damaged or missing"):
        found.read(None)


class Harmful:
    """Unpickled, it makes a directory."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.mkdir, (self.made,)


def test_refused(tmp_path: Path) -> None:
    """Each with what to do; no pickle is opened."""
    with pytest.raises(TTraceError, match="no such directory"):
        stored.weights(tmp_path / "absent")
    with pytest.raises(TTraceError, match="holds no checkpoint"):
        stored.weights(tmp_path)
    pickled = pickle.dumps(Harmful(tmp_path / "made"))
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "model_optim_rng.pt").write_bytes(pickled)
    with pytest.raises(TTraceError, match="which is pickles: convert it"):
        stored.weights(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickled)
    with pytest.raises(TTraceError, match="not in the format torch_dist"):
        stored.weights(tmp_path)
    assert not (tmp_path / "made").exists()
