# SPDX-License-Identifier: Apache-2.0
"""Small jobs of Megatron-LM, each with the ``config.json`` of the same model, and wrong ones."""

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

BESIDE = os.environ.get("TTRACE_TEST_HF", "")
"""The folder that has transformers, where the environment has none (launch/bootstrap.sh hf)."""
needs_transformers = pytest.mark.skipif(
    not BESIDE and importlib.util.find_spec("transformers") is None,
    reason="`make test` installs transformers",
)

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
_OSS_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 256,
}
TP, PP, CP = (
    ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    ("--pipeline-model-parallel-size", "2"),
    ("--context-parallel-size", "2", "--cp-comm-type", "a2a"),
)
EP = ("--expert-model-parallel-size", "2")


@dataclasses.dataclass(frozen=True)
class Twin:
    """A model: fields of its ``config.json``, and the flags that make Megatron's the same.

    ``without`` are flags of :data:`FLAGS` that it lacks; ``script`` is one of ``launch/``.
    """

    config: Mapping[str, Any]
    flags: tuple[str, ...]
    without: tuple[str, ...] = ()
    script: str = "pretrain_gpt.py"

    def write(self, folder: Path, **changes: Any) -> Path:
        """Its ``config.json``, with other values of some fields, and without those of ``...``."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "config.json"
        fields = {**_CONFIG, **self.config, **changes}
        path.write_text(json.dumps({k: v for k, v in fields.items() if v is not ...}))
        return path


_LATENT = {
    "model_type": "deepseek_v3",
    "num_key_value_heads": 4,
    "head_dim": ...,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-6,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
}
_BIASED = (
    *("--num-experts", "16", "--moe-router-topk", "4", "--moe-ffn-hidden-size", "48"),
    *("--moe-token-dispatcher-type", "alltoall", "--moe-grouped-gemm"),
    *("--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"),
    *("--moe-router-num-groups", "4", "--moe-router-group-topk", "2"),
    *("--moe-router-topk-scaling-factor", "2.5"),
)
_LATENT_FLAGS = (
    *("--multi-latent-attention", "--qk-layernorm", "--q-lora-rank", "24", "--kv-lora-rank", "16"),
    *("--qk-head-dim", "10", "--rope-type", "yarn", "--rotary-scaling-factor", "40"),
    *("--mscale", "1.0", "--mscale-all-dim", "0.5"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "12", "--norm-epsilon", "1e-6"),
    *(*_BIASED, "--moe-layer-freq", "[0]+[1]", "--moe-shared-expert-intermediate-size", "96"),
)
_YARN = {
    "rope_type": "yarn",
    "factor": 40.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 4096,
}
_HYBRID = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M*-E",
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 2,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 64,
    "routed_scaling_factor": 2.5,
}
_HYBRID_FLAGS = (
    *("--hybrid-layer-pattern", "M*-E", "--position-embedding-type", "none", "--squared-relu"),
    *("--spec", "megatron.core.models.hybrid.hybrid_layer_specs", "hybrid_stack_spec"),
    *("--mamba-num-heads", "8", "--mamba-head-dim", "16", "--mamba-state-dim", "8"),
    *("--mamba-num-groups", "2", *_BIASED, "--moe-shared-expert-intermediate-size", "64"),
)


TWINS: Mapping[str, Twin] = {
    "llama": Twin({"model_type": "llama"}, _LOCAL),
    "llama-biased": Twin(
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
        (),
        without=("--disable-bias-linear",),
    ),
    "llama3": Twin(
        {"model_type": "llama", "rope_theta": 500000.0, "rope_scaling": _LLAMA3},
        ("--rotary-base", "500000", "--use-rope-scaling"),
    ),
    "mistral": Twin({"model_type": "mistral", "sliding_window": 16}, ("--window-size", "(15,0)")),
    "qwen2": Twin(
        {"model_type": "qwen2", "rope_theta": 1e6, "tie_word_embeddings": True},
        ("--rotary-base", "1000000", "--add-qkv-bias"),
        without=("--untie-embeddings-and-output-weights",),
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
    "deepseek_v3": Twin(
        {**_LATENT, "rope_scaling": _YARN}, _LATENT_FLAGS, ("--group-query-attention",)
    ),
    "nemotron_h": Twin(_HYBRID, _HYBRID_FLAGS, ("--swiglu",), "pretrain_hybrid.py"),
    "nemotron_h-latent": Twin(
        {**_HYBRID, "moe_latent_size": 32},
        (*_HYBRID_FLAGS, "--moe-latent-size", "32"),
        ("--swiglu",),
        "pretrain_hybrid.py",
    ),
    "gpt_oss": Twin(
        {
            "model_type": "gpt_oss",
            "attention_bias": True,
            "rope_theta": 150000.0,
            "rope_scaling": _OSS_YARN,
            "sliding_window": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        (
            *(*_EXPERTS, "--moe-grouped-gemm", "--expert-tensor-parallel-size", "1"),
            *("--no-bias-gelu-fusion", "--no-bias-dropout-fusion"),
            *("--softmax-type", "learnable", "--window-size", "(15,0)"),
            *("--window-attn-skip-freq", "2", "--quick-geglu", "--glu-linear-offset", "1.0"),
            *("--activation-func-clamp-value", "7.0", "--position-embedding-type", "yarn"),
            *("--rotary-base", "150000", "--rotary-scaling-factor", "32"),
            *("--yarn-original-max-position-embeddings", "256"),
            "--no-yarn-correction-range-round-to-int",
        ),
        without=("--swiglu", "--disable-bias-linear"),
    ),
}


def arguments(twin: Twin, more: Sequence[str] = (), *, length: int = 32) -> tuple[str, ...]:
    """The flags of a job that trains a model."""
    flags = [flag for flag in FLAGS if flag not in twin.without]
    return (*flags, "--seq-length", str(length), *twin.flags, *more)


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
    "window-of-all": Fault(
        "gpt_oss", ("--window-attn-skip-freq", "3"), r".*layers\.1\..*core_attention"
    ),
    "offset": Fault("gpt_oss", ("--glu-linear-offset", "0.0"), r".*layers\.0\.mlp"),
    "clamp": Fault("gpt_oss", ("--activation-func-clamp-value", "0.1"), r".*layers\.0\.mlp"),
    "yarn-rounded": Fault("gpt_oss", ("--yarn-correction-range-round-to-int",), "rotary_pos_emb"),
    "yarn-factor": Fault("gpt_oss", ("--rotary-scaling-factor", "16"), "rotary_pos_emb"),
    "yarn-scale": Fault("gpt_oss", ("--mscale-all-dim", "1.0"), r".*layers\.0\.self_attention.*"),
    "no-sinks": Fault("gpt_oss", ("--softmax-type", "off-by-one"), ""),
    "yarn": Fault(
        "deepseek_v3", ("--rotary-scaling-factor", "30"), r".*layers\.0\..*rotary_pos_emb"
    ),
    "mscale": Fault("deepseek_v3", ("--mscale", "0.7"), r".*layers\.0\.self_attention"),
    "epsilon-latent": Fault(
        "deepseek_v3", ("--norm-epsilon", "1e-5"), r".*layers\.0\.input_layernorm"
    ),
    "routed-scale": Fault(
        "deepseek_v3", ("--moe-router-topk-scaling-factor", "1.0"), r".*layers\.1\.mlp\.router"
    ),
    "groups-of-experts": Fault(
        "deepseek_v3", ("--moe-router-group-topk", "4"), r".*layers\.1\.mlp\.router"
    ),
    "states": Fault(
        "nemotron_h",
        ("--mamba-num-groups", "4", "--mamba-state-dim", "4"),
        r".*layers\.0\.mixer",
    ),
    "epsilon-mixed": Fault(
        "nemotron_h", ("--norm-epsilon", "1e-6"), r".*layers\.0\.mixer\.in_proj"
    ),
    "routed-scale-mixed": Fault(
        "nemotron_h", ("--moe-router-topk-scaling-factor", "1.0"), r".*layers\.3\.mlp\.router"
    ),
    "rotary-mixed": Fault("nemotron_h", ("--position-embedding-type", "rope"), ""),
    "pattern": Fault("nemotron_h", ("--hybrid-layer-pattern", "*M-E"), ""),
    "dense-layers": Fault("deepseek_v3", ("--moe-layer-freq", "[1]+[0]"), ""),
    "shared-experts": Fault("deepseek_v3", ("--moe-shared-expert-intermediate-size", "48"), ""),
    "bias": Fault("llama3", ("--add-qkv-bias",), ""),
    "capacity": Fault("qwen3_moe", ("--moe-expert-capacity-factor", "1.0"), ""),
    "auxiliary": Fault("qwen3_moe", ("--moe-aux-loss-coeff", "0.01"), ""),
}
