# SPDX-License-Identifier: Apache-2.0
"""Families of transformers' models: which of their weights and modules are which of Megatron's.

A family is an entry of :data:`FAMILIES`; what most of them have in common of modules is in
:mod:`.modules`. Sources: the modules of both, and what Megatron's ``sharded_state_dict`` calls
their weights in a checkpoint.
"""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from megatron_ttrace.saved.huggingface.modules import HYBRID, LATENT, SANDWICH, Rows
from megatron_ttrace.trace import small_files
from megatron_ttrace.trace.errors import TTraceError, reported

type Config = Mapping[str, Any]
"""What a ``config.json`` holds."""


class Order(StrEnum):
    """How Megatron orders the rows of tensors of transformers that are put below each other."""

    STACKED = "stacked"
    """As they are, for instance gate above up projection."""
    GROUPS = "groups"
    """By groups of heads: the queries of a group, its key, its value
    (``get_query_key_value_tensors`` in megatron/core/transformer/attention.py)."""
    ALTERNATING = "alternating"
    """Even rows above odd rows: GPT-OSS alternates the rows of gate and up projection."""


class Where(StrEnum):
    """The part of a model to which a rule applies."""

    MODEL = "model"
    LAYER = "layer"
    ATTENTION = "layer with attention"
    MAMBA = "layer with a Mamba mixer"
    DENSE = "dense layer"
    SPARSE = "layer with experts"


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """A tensor of transformers, or an expert's part of it.

    Attributes:
        name: of the tensor; in a rule without the prefix of its layer.
        expert: index in the first dimension of a tensor of all experts, in a rule any number.
        transposed: whether its last dimension is Megatron's first.
    """

    name: str
    expert: int | None = None
    transposed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """A tensor of Megatron's, and what it is made of.

    Attributes:
        where: it applies.
        megatron: names, of which a model has one: TransformerEngine puts a norm into the linear
            layer after it; experts are grouped, sequential, or in a checkpoint.
        hf: alternative lists of parts. First those that transformers 5 has in memory.
        needs, unless: a field of the config that must be true, or must not.
        padded: whether Megatron may append rows to the vocabulary.
        option: of Megatron, without which its model has no such tensor.
    """

    where: Where
    megatron: tuple[str, ...]
    hf: tuple[tuple[Part, ...], ...]
    order: Order = Order.STACKED
    needs: str = ""
    unless: str = ""
    padded: bool = False
    option: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Family:
    """The models of one ``model_type``.

    Attributes:
        architecture: transformers' class.
        defaults: values of fields that a ``config.json`` may lack.
        rows: how its modules differ from those of most.
        only: fields that must have these values for its computation to be compared.
        without_kernels: fields that make what runs on a CPU the same as what runs on a GPU.
        stored: what the names of files have in place of ``model.``.
        weights_only: whether nothing is known of the modules that compute with them.
    """

    architecture: str
    rules: tuple[Rule, ...]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: Rows = dataclasses.field(default_factory=Rows)
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    without_kernels: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    stored: str = "model."
    weights_only: bool = False


type _Parts = str | Part | tuple[str | Part, ...]


def _rule(
    where: Where, megatron: str | tuple[str, ...], *alternatives: _Parts, **options: Any
) -> Rule:
    names = (megatron,) if isinstance(megatron, str) else megatron
    hf = (parts if isinstance(parts, tuple) else (parts,) for parts in alternatives)
    return Rule(
        where,
        names,
        tuple(tuple(Part(p) if isinstance(p, str) else p for p in parts) for parts in hf),
        **options,
    )


def _same(where: Where, names: Mapping[str, str], **options: Any) -> tuple[Rule, ...]:
    return tuple(_rule(where, ours, theirs, **options) for ours, theirs in names.items())


_QKV = "self_attention.linear_qkv"
_GATED, _PLAIN = ("gate", "up"), ("up",)
EMBEDDING, HEAD = (
    _rule(Where.MODEL, f"{ours}.weight", f"{theirs}.weight", padded=True, option=option)
    for ours, theirs, option in (
        ("embedding.word_embeddings", "model.embed_tokens", ""),
        ("output_layer", "lm_head", "--untie-embeddings-and-output-weights"),
    )
)
_ENDS = (
    EMBEDDING,
    HEAD,
    _rule(
        Where.MODEL,
        ("decoder.final_layernorm.weight", "decoder.final_norm.weight"),
        "model.norm.weight",
    ),
)
_INPUT_NORM = ("input_layernorm.weight", f"{_QKV}.layer_norm_weight")
_MLP_NORM = ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")
_NORMS = (
    _rule(Where.LAYER, _INPUT_NORM, "input_layernorm.weight"),
    _rule(Where.LAYER, _MLP_NORM, "post_attention_layernorm.weight"),
)


def _qkv(leaf: str, needs: str = "") -> Rule:
    parts = tuple(f"self_attn.{part}_proj.{leaf}" for part in "qkv")
    how = {"needs": needs, "option": "--add-qkv-bias" if leaf == "bias" else ""}
    return _rule(Where.ATTENTION, f"{_QKV}.{leaf}", parts, order=Order.GROUPS, **how)


def _out(leaf: str, needs: str = "") -> Rule:
    ours, theirs = f"self_attention.linear_proj.{leaf}", f"self_attn.o_proj.{leaf}"
    return _rule(Where.ATTENTION, ours, theirs, needs=needs)


def _mlp(
    where: Where,
    ours: str,
    theirs: str,
    leaf: str = "weight",
    needs: str = "",
    first: tuple[str, ...] = _GATED,
) -> tuple[Rule, ...]:
    parts = tuple(f"{theirs}.{name}_proj.{leaf}" for name in first)
    return (
        _rule(where, f"{ours}.linear_fc1.{leaf}", parts, needs=needs),
        _rule(where, f"{ours}.linear_fc2.{leaf}", f"{theirs}.down_proj.{leaf}", needs=needs),
    )


def _of_experts(module: str, leaf: str = "weight") -> tuple[str, ...]:
    return (
        f"mlp.experts.{module}.{leaf}{{expert}}",
        f"mlp.experts.local_experts.{{expert}}.{module}.{leaf}",
        f"mlp.experts.experts.{{expert}}.{module}.{leaf}",
    )


def _experts(
    theirs: str = "mlp", first: tuple[str, ...] = _GATED, second: str = "down"
) -> tuple[Rule, ...]:
    """Experts, each on its own in files and all in a tensor in memory."""
    suffix = "_proj" if theirs == "mlp" else ""
    *parts, down = (
        f"{theirs}.experts.{{expert}}.{name}{suffix}.weight" for name in (*first, second)
    )
    fused = ("gate_up" if len(first) > 1 else "up"), "down"
    up_all, down_all = (Part(f"mlp.experts.{name}_proj", expert=0) for name in fused)
    return (
        _rule(Where.SPARSE, _of_experts("linear_fc1"), up_all, tuple(parts)),
        _rule(Where.SPARSE, _of_experts("linear_fc2"), down_all, down),
        _rule(Where.SPARSE, "mlp.router.weight", "mlp.gate.weight", f"{theirs}.gate.weight"),
    )


def _shared_expert(theirs: str, needs: str = "") -> tuple[Rule, ...]:
    return _mlp(Where.SPARSE, "mlp.shared_experts", f"mlp.{theirs}", needs=needs)


def _latent(of: str, **options: Any) -> tuple[Rule, ...]:
    """The two linear layers of queries, or of keys and values, and the norm between them."""
    shared = "_with_mqa" if of == "kv" else ""
    ours, up = f"self_attention.linear_{of}_down_proj", f"self_attention.linear_{of}_up_proj"
    norms = f"{up}.layer_norm_weight", f"self_attention.{of}_layernorm.weight"
    names = {f"{of}_a_proj{shared}": f"{ours}.weight", f"{of}_b_proj": f"{up}.weight"}
    return (
        *(_rule(Where.LAYER, names[x], f"self_attn.{x}.weight", **options) for x in names),
        _rule(Where.LAYER, norms, f"self_attn.{of}_a_layernorm.weight", **options),
    )


_BIASES = (_qkv("bias", "attention_bias"), _out("bias", "attention_bias"))
_ATTENTION = (_qkv("weight"), _out("weight"))
_QK_NORMS = _same(
    Where.LAYER,
    {f"self_attention.{x}_layernorm.weight": f"self_attn.{x}_norm.weight" for x in "qk"},
    option="--qk-layernorm",
)
_MLP = _mlp(Where.DENSE, "mlp", "mlp")
_EXPERT_BIAS = _rule(
    Where.SPARSE,
    "mlp.router.expert_bias",
    "mlp.gate.e_score_correction_bias",
    option="--moe-router-enable-expert-bias",
)
_MIXER = (
    *(
        _rule(Where.MAMBA, f"mixer.{x}", f"mixer.{x}")
        for x in ("in_proj.weight", "out_proj.weight", "norm.weight", "A_log", "D", "dt_bias")
    ),
    *(
        _rule(Where.MAMBA, (f"mixer.conv1d_{x}", f"mixer.conv1d.{x}"), f"mixer.conv1d.{x}")
        for x in ("weight", "bias")
    ),
)
_LATENT_ATTENTION = (
    *_latent("q", needs="q_lora_rank"),
    _rule(
        Where.LAYER,
        "self_attention.linear_q_proj.weight",
        "self_attn.q_proj.weight",
        unless="q_lora_rank",
    ),
    *_latent("kv"),
    _out("weight"),
)
_OSS_EXPERTS = tuple(
    _rule(
        Where.SPARSE,
        _of_experts(ours, leaf),
        Part(f"mlp.experts.{theirs}{suffix}", expert=0, transposed=not suffix),
        order=order,
    )
    for ours, theirs, order in (
        ("linear_fc1", "gate_up_proj", Order.ALTERNATING),
        ("linear_fc2", "down_proj", Order.STACKED),
    )
    for leaf, suffix in (("weight", ""), ("bias", "_bias"))
)
_SANDWICH = (
    _rule(Where.LAYER, _INPUT_NORM, "input_layernorm.weight"),
    _rule(Where.LAYER, _MLP_NORM, "pre_feedforward_layernorm.weight"),
    *(
        _rule(Where.LAYER, f"{ours}.post_layernorm.weight", f"post_{theirs}_layernorm.weight")
        for ours, theirs in (
            ("self_attention.linear_proj", "attention"),
            ("mlp.linear_fc2", "feedforward"),
        )
    ),
)
"""Norms before and after attention and MLP, by the names of Megatron-Bridge's layers."""
_BASE = (*_ENDS, *_NORMS, *_ATTENTION, *_MLP)
_QWEN3 = (*_BASE, *_BIASES, *_QK_NORMS)

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "LlamaForCausalLM",
        (*_BASE, *_BIASES, *_mlp(Where.DENSE, "mlp", "mlp", "bias", "mlp_bias")),
    ),
    "mistral": Family("MistralForCausalLM", _BASE),
    "qwen2": Family("Qwen2ForCausalLM", (*_BASE, _qkv("bias"))),
    "qwen3": Family("Qwen3ForCausalLM", _QWEN3, {"head_dim": 128}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", (*_QWEN3, *_experts()), {"head_dim": 128}),
    "mixtral": Family(
        "MixtralForCausalLM", (*_BASE, *_experts("block_sparse_moe", ("w1", "w3"), "w2"))
    ),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        (
            *_BASE,
            _qkv("bias", "qkv_bias"),
            *_experts(),
            *_shared_expert("shared_expert"),
            _rule(Where.SPARSE, "mlp.shared_experts.gate_weight", "mlp.shared_expert_gate.weight"),
        ),
        {"qkv_bias": True},
        weights_only=True,
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        (
            *_ENDS,
            *_NORMS,
            *_LATENT_ATTENTION,
            *_MLP,
            *_experts(),
            *_shared_expert("shared_experts", "n_shared_experts"),
            _EXPERT_BIAS,
        ),
        {"q_lora_rank": 1536, "n_shared_experts": 1, "first_k_dense_replace": 3},
        rows=LATENT,
        # Megatron always turns pairs; a converter would have to reorder rows.
        only={"rope_interleave": True},
    ),
    "nemotron_h": Family(
        "NemotronHForCausalLM",
        (
            *_ENDS,
            _rule(
                Where.LAYER,
                ("norm.weight", "mixer.in_proj.layer_norm_weight", *_INPUT_NORM, *_MLP_NORM),
                "input_layernorm.weight",
            ),
            *_ATTENTION,
            *_MIXER,
            *_mlp(Where.DENSE, "mlp", "mlp", first=_PLAIN),
            *_experts(first=_PLAIN),
            *_mlp(Where.SPARSE, "mlp.shared_experts", "mlp.shared_experts", first=_PLAIN),
            _EXPERT_BIAS,
            *(
                _rule(Where.SPARSE, f"mlp.{x}.weight", f"mlp.{x}.weight", needs="moe_latent_size")
                for x in ("fc1_latent_proj", "fc2_latent_proj")
            ),
        ),
        {"head_dim": 128},
        rows=HYBRID,
        only={
            "tie_word_embeddings": False,
            "use_conv_bias": True,
            "time_step_limit": [0.0, math.inf],
        },
        # Only without kernels, steps are clamped at the minimum of their initial values.
        without_kernels={"use_mamba_kernels": False, "time_step_min": sys.float_info.min},
        stored="backbone.",
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        (
            *_ENDS,
            *_NORMS,
            *_ATTENTION,
            _qkv("bias"),
            _out("bias"),
            _rule(
                Where.LAYER,
                "self_attention.core_attention.softmax_offset",
                "self_attn.sinks",
                option="--softmax-type learnable",
            ),
            *_same(
                Where.SPARSE, {f"mlp.router.{x}": f"mlp.router.{x}" for x in ("weight", "bias")}
            ),
            *_OSS_EXPERTS,
        ),
        {"head_dim": 64},
        Rows({"mlp.gate": "mlp.router"}),
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM",
        (*_ENDS, *_SANDWICH, *_ATTENTION, *_BIASES, *_QK_NORMS, *_MLP),
        {"head_dim": 256, "tie_word_embeddings": True},
        SANDWICH,
    ),
}
"""By ``model_type``."""


def read_config(path: Path) -> Config:
    """The content of a ``config.json``.

    Raises:
        TTraceError: when it is absent or not an object in JSON.
    """
    wrong = f"{path} is not a config.json of Hugging Face"
    with reported(wrong, OSError, ValueError, RecursionError):
        config = json.loads(small_files.text(path))
    if not isinstance(config, dict):
        raise TTraceError(f"{wrong} (not an object)")
    return config


def family_of(config: Config, *, weights_only: bool = False) -> Family:
    """The family of a model; ``weights_only``: its computation does not matter.

    Raises:
        TTraceError: when it is not supported.
    """
    name = config.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(
            name for name, family in FAMILIES.items() if weights_only or not family.weights_only
        )
        raise TTraceError(f"config.json: model_type {name!r} is not supported ({known} are)")
    if config.get("quantization_config"):
        raise TTraceError("config.json: quantized weights (quantization_config) are not supported")
    if FAMILIES[name].weights_only and not weights_only:
        raise TTraceError(f"config.json: of {name} only weights are compared (ttrace checkpoint)")
    for field, value in FAMILIES[name].only.items() if not weights_only else ():
        if config.get(field, value) != value:
            raise TTraceError(
                f"config.json: of {name} {field} {config[field]!r} is not compared, only {value!r}"
            )
    return FAMILIES[name]
