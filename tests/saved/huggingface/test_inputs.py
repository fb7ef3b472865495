# SPDX-License-Identifier: Apache-2.0
"""The inputs of a comparison with transformers, and what it refuses."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ttrace.saved.huggingface.differences import notices, require_comparable
from megatron_ttrace.saved.huggingface.families import read_config
from megatron_ttrace.saved.huggingface.inputs import POSITIONS, Inputs
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, RoutingIndex, TraceKey
from megatron_ttrace.trace.store import TraceReader
from tests.saved.huggingface.jobs import TWINS
from tests.trace import traces

EMBEDDING = TraceKey(1, STEP_LEVEL, Kind.PARAM, "embedding.word_embeddings.weight")
NORMS = [
    TraceKey(1, STEP_LEVEL, Kind.PARAM, f"decoder.layers.{n}.input_layernorm.weight")
    for n in range(2)
]


def trace(folder: Path, *more: TraceKey, rows: int = 160, **meta: Any) -> TraceReader:
    """A reference with an embedding and two layers."""
    tensors = {key: torch.ones(rows, 4) for key in (EMBEDDING, *NORMS, *more)}
    return TraceReader(traces.sealed(folder, tensors, ReferenceMeta(**meta).to_json()))


def test_only_sizes_are_the_traces(tmp_path: Path) -> None:
    """Layers and padded vocabulary; lists with a value for each layer are cut."""
    config = TWINS["qwen2"].write(
        tmp_path, num_hidden_layers=28, layer_types=["full_attention"] * 28
    )
    inputs = Inputs.read(config, trace(tmp_path / "reference"))
    assert inputs.replaced == {"num_hidden_layers": 28, "vocab_size": 128}
    assert (inputs.config["num_hidden_layers"], inputs.config["vocab_size"]) == (2, 160)
    assert inputs.config["layer_types"] == ["full_attention"] * 2
    written = read_config(config)
    left = written.keys() - inputs.replaced.keys() - {"layer_types"}
    assert all(inputs.config[name] == written[name] for name in left)


def test_hybrid_models(tmp_path: Path) -> None:
    """The pattern of layers is cut; what runs on a CPU has the constants of what runs on a GPU."""
    config = TWINS["nemotron_h"].write(tmp_path)
    inputs = Inputs.read(config, trace(tmp_path / "reference"))
    assert inputs.config["hybrid_override_pattern"] == "M*"
    assert inputs.replaced == {"num_hidden_layers": 4, "vocab_size": 128}
    assert inputs.config["time_step_min"] < 1e-300
    config = TWINS["nemotron_h"].write(tmp_path, time_step_limit=[0.0, 0.1])
    with pytest.raises(TTraceError, match=r"time_step_limit \[0.0, 0.1\] is not compared"):
        Inputs.read(config, trace(tmp_path / "reference"))


@pytest.mark.parametrize(
    ("more", "meta", "reason"),
    [
        ((), {"fp8": True}, "FP8"),
        (
            (),
            {"identity": {"arguments": {"num_experts": 4, "moe_aux_loss_coeff": [0.0, 0.01]}}},
            "--moe-aux-loss-coeff",
        ),
        (
            (),
            {"identity": {"arguments": {"num_experts": 4, "moe_z_loss_coeff": 1e-3}}},
            "--moe-z-loss-coeff",
        ),
        # Without experts a coefficient has no effect.
        ((), {"identity": {"arguments": {"num_experts": None, "moe_aux_loss_coeff": 0.01}}}, ""),
        (
            (TraceKey(1, 0, Kind.ROUTING, "decoder.layers.0.mlp.router", RoutingIndex.KEPT),),
            {},
            "capacity",
        ),
        ((TraceKey(1, STEP_LEVEL, Kind.PARAM, "mtp.layers.0.x"),), {}, "multi-token"),
        ((TraceKey(1, 0, Kind.INPUT, ROOT, POSITIONS),), {}, "packed samples"),
        ((), {"identity": {"arguments": {"reset_attention_mask": True}}}, "--reset-attention"),
        ((), {"identity": {"arguments": {"cross_entropy_loss_fusion": True}}}, "--cross-entropy"),
    ],
)
def test_refused_traces(tmp_path: Path, more: Any, meta: Any, reason: str) -> None:
    """One line names what transformers lacks or defines differently."""
    config = TWINS["llama"].write(tmp_path)
    inputs = Inputs.read(config, trace(tmp_path / "reference", *more, **meta))
    with pytest.raises(TTraceError, match=reason) if reason else contextlib.nullcontext():
        require_comparable(inputs)


def test_epsilon_of_latents(tmp_path: Path) -> None:
    """In multi-latent attention transformers has its own; the report says so."""
    reference = trace(tmp_path / "reference")
    for epsilon, count in ((1e-6, 0), (1e-5, 1)):
        config = TWINS["deepseek_v3"].write(tmp_path, rms_norm_eps=epsilon)
        shown = notices(Inputs.read(config, reference))
        assert len([notice for notice in shown if "rms_norm_eps 1e-05" in notice]) == count


def test_refused_configs(tmp_path: Path) -> None:
    """Files that are none, families that are not known, a vocabulary that does not fit."""
    reference = trace(tmp_path / "reference", rows=64)
    path = tmp_path / "config.json"
    with pytest.raises(TTraceError, match=r"config\.json is not a config\.json"):
        Inputs.read(path, reference)
    for text in ("[1]", "{", '"x"'):
        path.write_text(text)
        with pytest.raises(TTraceError, match=r"is not a config\.json"):
            Inputs.read(path, reference)
    with pytest.raises(TTraceError, match="rope_interleave False is not compared, only True"):
        Inputs.read(TWINS["deepseek_v3"].write(tmp_path, rope_interleave=False), reference)
    with pytest.raises(TTraceError, match="vocab_size 128, but the model"):
        Inputs.read(TWINS["llama"].write(tmp_path), reference)
