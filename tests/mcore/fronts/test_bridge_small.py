# SPDX-License-Identifier: Apache-2.0
"""Configurations that need nothing of their user's machine; without Bridge."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.mcore.fronts import bridge_small
from megatron_ttrace.trace.errors import TTraceError


class Data(SimpleNamespace):
    """Of ``GPTDatasetConfig``."""


class Tuning(SimpleNamespace):
    """Of ``GPTSFTDatasetConfig``."""


class ChatPreprocessing:
    """By its name."""


SETUP = SimpleNamespace(checkpoint_exists=None, _load_checkpoint_from_path=None)
MODULES = {
    "config": SimpleNamespace(GPTDatasetConfig=Data, GPTSFTDatasetConfig=Tuning),
    "mixed_precision": SimpleNamespace(get_mixed_precision_config=str.upper),
    "setup": SETUP,
}


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of those of ``megatron.bridge.training``."""
    instead = SimpleNamespace(import_module=lambda name: MODULES[name.rpartition(".")[2]])
    monkeypatch.setattr(bridge_small, "importlib", instead)


def configuration(dataset: Any, peft: Any = None) -> Any:
    parts = ("tokenizer", "train", "validation", "logger", "checkpoint")
    return SimpleNamespace(
        model=SimpleNamespace(
            vocab_size=32000, table=32000, hidden_size=64, tensor_model_parallel_size=4
        ),
        dataset=dataset,
        scheduler=SimpleNamespace(lr_decay_style="WSD"),
        mixed_precision="bf16",
        peft=peft,
        **{part: SimpleNamespace(save="here", load="there") for part in parts},
    )


def test_pretraining() -> None:
    """Mock data of a small vocabulary, and no files."""
    cfg = configuration(Data(blend=["/data"]))
    bridge_small.resolve(cfg)
    bridge_small.detach(cfg, Path("data"), 3)
    assert cfg.mixed_precision == "BF16"
    assert cfg.dataset.blend is None
    assert cfg.tokenizer.tokenizer_type == "NullTokenizer"
    assert (cfg.model.vocab_size, cfg.model.table, cfg.model.hidden_size) == (128, 128, 64)
    assert cfg.model.make_vocab_size_divisible_by == 128 / 4
    assert (cfg.checkpoint.save, cfg.checkpoint.load) == (None, None)
    assert cfg.train.train_iters == 3


def test_adapters_on_conversations() -> None:
    """Text of our own, and no weights of a checkpoint, though there must be one."""
    rows = SimpleNamespace(packed_sequence_size=8192, max_single_sequence_length=8184)
    dataset = Tuning(preprocessing=ChatPreprocessing(), seq_length=64, offline_packing_specs=rows)
    cfg = configuration(dataset, peft="LoRA")
    bridge_small.detach(cfg, Path("data"), 2)
    assert dataset.dataset_root == Path("data/chat")
    assert (rows.packed_sequence_size, rows.max_single_sequence_length) == (64, 63)
    assert cfg.checkpoint.pretrained_checkpoint == "data/start"
    assert SETUP.checkpoint_exists("data/start") is True


def test_data_of_another_kind() -> None:
    """Text would be something else."""
    with pytest.raises(TTraceError, match="SimpleNamespace: only jobs on GPTDatasetConfig"):
        bridge_small.detach(configuration(SimpleNamespace()), Path("data"), 2)
