# SPDX-License-Identifier: Apache-2.0
"""Small jobs of Megatron-LM, each with the ``config.json`` of the same model, and wrong ones."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_CONFIG = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "num_hidden_layers": 2,
    "tie_word_embeddings": False,
}
FLAGS = (
    *("--num-layers", "2", "--hidden-size", "64", "--ffn-hidden-size", "96"),
    *("--num-attention-heads", "4", "--group-query-attention", "--num-query-groups", "2"),
    *("--kv-channels", "16", "--max-position-embeddings", "8192", "--micro-batch-size", "2"),
    *("--global-batch-size", "4", "--train-iters", "1", "--lr", "1e-3", "--mock-data"),
    *("--tokenizer-type", "NullTokenizer", "--vocab-size", "128", "--swiglu"),
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm"),
    *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
)
_EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "96"),
    *("--moe-token-dispatcher-type", "alltoall"),
)
_LOCAL = ("--transformer-impl", "local")
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
TP, PP, CP = (
    ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ("--pipeline-model-parallel-size", "2"),
    ("--context-parallel-size", "2", "--cp-comm-type", "a2a"),
)
EP = ("--expert-model-parallel-size", "2")


@dataclasses.dataclass(frozen=True)
class Twin:
    """A model: fields of its ``config.json``, and the flags that make Megatron's the same."""

    config: Mapping[str, Any]
    flags: tuple[str, ...]

    def write(self, folder: Path, **others: Any) -> Path:
        """Its ``config.json``, with other values of some fields."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.json"
        path.write_text(json.dumps({**_CONFIG, **self.config, **others}))
        return path


TWINS: Mapping[str, Twin] = {
    "llama": Twin({"model_type": "llama"}, _LOCAL),
    "llama3": Twin(
        {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
        ("--rotary-base", "500000", "--use-rope-scaling"),
    ),
    "mistral": Twin({"model_type": "mistral", "sliding_window": 16}, ("--window-size", "(15,0)")),
    "qwen2": Twin(
        {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
        ("--rotary-base", "1000000", "--add-qkv-bias"),
    ),
    "qwen3": Twin(
        {"model_type": "qwen3", "rms_norm_eps": 1e-6}, ("--qk-layernorm", "--norm-epsilon", "1e-6")
    ),
    "qwen3_moe": Twin(
        {
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 96,
        },
        (*_EXPERTS, "--moe-grouped-gemm", "--qk-layernorm"),
    ),
    "mixtral": Twin(
        {
            "model_type": "mixtral",
            "sliding_window": None,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        (*_EXPERTS, *_LOCAL),
    ),
}


def arguments(twin: Twin, more: Sequence[str] = (), *, length: int = 32) -> tuple[str, ...]:
    """The flags of a job that trains a model."""
    flags = [flag for flag in FLAGS if not (_is_tied(twin) and flag.startswith("--untie"))]
    return (*flags, "--seq-length", str(length), *twin.flags, *more)


def _is_tied(twin: Twin) -> bool:
    return bool(twin.config.get("tie_word_embeddings"))


@dataclasses.dataclass(frozen=True)
class Fault:
    """Flags that make Megatron's model a different one.

    ``culprit`` is the module that must be named (a regular expression); empty if the comparison
    must be refused.
    """

    twin: str
    flags: tuple[str, ...]
    culprit: str


FAULTS: Mapping[str, Fault] = {
    "rotary-base": Fault("llama", ("--rotary-base", "20000"), "rotary_pos_emb"),
    "interleaved": Fault("llama", ("--rotary-interleaved",), "rotary_pos_emb"),
    "scaling": Fault("llama", ("--use-rope-scaling",), "rotary_pos_emb"),
    "interpolated": Fault(
        "qwen3", ("--rotary-seq-len-interpolation-factor", "2"), "rotary_pos_emb"
    ),
    "part": Fault("llama", ("--rotary-percent", "0.5"), "rotary_pos_emb"),
    "epsilon": Fault("llama", ("--norm-epsilon", "1e-6"), r".*layers\.0\.input_layernorm"),
    "epsilon-fused": Fault("llama3", ("--norm-epsilon", "1e-6"), r".*layers\.0\..*linear_qkv"),
    "weight-of-norm": Fault(
        "qwen3", ("--apply-layernorm-1p",), r".*layers\.0\.self_attention\.linear_qkv"
    ),
    "window": Fault("qwen2", ("--window-size", "(7,0)"), r".*layers\.0\..*core_attention"),
    "window-by-1": Fault("mistral", ("--window-size", "(16,0)"), r".*layers\.0\..*core_attention"),
    "order": Fault("mixtral", ("--moe-router-pre-softmax",), r".*layers\.0\.mlp\.router"),
    "more-experts": Fault("mixtral", ("--moe-router-topk", "3"), r".*layers\.0\.mlp\.router"),
    "groups": Fault(
        "qwen3_moe",
        ("--moe-router-num-groups", "2", "--moe-router-group-topk", "1"),
        r".*layers\.0\.mlp\.router",
    ),
    "sigmoid": Fault(
        "qwen3_moe", ("--moe-router-score-function", "sigmoid"), r".*layers\.0\.mlp\.router"
    ),
    "fused-loss": Fault("llama3", ("--cross-entropy-loss-fusion",), "output_layer"),
    "bias": Fault("llama3", ("--add-qkv-bias",), ""),
    "capacity": Fault("qwen3_moe", ("--moe-expert-capacity-factor", "1.0"), ""),
    "auxiliary": Fault("qwen3_moe", ("--moe-aux-loss-coeff", "0.01"), ""),
}
