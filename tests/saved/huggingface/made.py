# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers' families, and a plain converter that shares no code with ours."""

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

_BASE = {
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 30,
    "max_position_embeddings": 64,
    "head_dim": 4,
    "tie_word_embeddings": False,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    name: {**_BASE, "model_type": name, **fields}
    for name, fields in {
        "llama": {},
        "mistral": {"head_dim": 8},
        "qwen2": {"tie_word_embeddings": True},
        "qwen3": {"num_key_value_heads": 1},
        "qwen3_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "mlp_only_layers": [0],
        },
        "mixtral": {"num_local_experts": 2},
        "qwen2_moe": {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "shared_expert_intermediate_size": 10,
            "mlp_only_layers": [],
        },
        "deepseek_v3": {
            "num_key_value_heads": 4,
            "q_lora_rank": 6,
            "kv_lora_rank": 8,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "v_head_dim": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 6,
            "first_k_dense_replace": 1,
            "mlp_only_layers": [0],
        },
        "nemotron_h": {
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "M*-E",
            "mamba_num_heads": 4,
            "mamba_head_dim": 3,
            "ssm_state_size": 5,
            "n_groups": 2,
            "conv_kernel": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 6,
            "moe_shared_expert_intermediate_size": 10,
            "moe_latent_size": 8,
            "mlp_only_layers": [0],
        },
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "attention_bias": True},
        "gemma3_text": {"tie_word_embeddings": True},
    }.items()
}
BIASED = {**CONFIGS["llama"], "attention_bias": True, "mlp_bias": True}
"""A Llama with all biases it can have."""

WHOLE_QUERIES = {**CONFIGS["deepseek_v3"], "q_lora_rank": None}
"""Multi-latent attention whose queries are not compressed."""


type Rows = Iterator[tuple[str, str, tuple[int, ...]]]
"""Names of transformers' tensors, of Megatron's that they are or are parts of, and shapes."""


def _mlp(
    theirs: str,
    ours: str,
    width: int,
    hidden: int,
    names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
    leaves: tuple[str, ...] = ("weight",),
) -> Rows:
    *first, down = names
    linear = [(name, "linear_fc1", (width, hidden)) for name in first]
    for name, megatrons, shape in (*linear, (down, "linear_fc2", (hidden, width))):
        for leaf in leaves:
            sizes = shape if leaf == "weight" else shape[:1]
            yield f"{theirs}.{name}.{leaf}", f"{ours}.{megatrons}.{leaf}", sizes


def _attention(config: Mapping[str, Any], theirs: str = "self_attn") -> Rows:
    family, hidden = config["model_type"], config["hidden_size"]
    heads, groups, head = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    ours, is_biased = "self_attention", config.get("attention_bias")
    for x, count in (("q", heads), ("k", groups), ("v", groups)):
        yield f"{theirs}.{x}_proj.weight", f"{ours}.linear_qkv.weight", (count * head, hidden)
        if is_biased or family.startswith("qwen2"):
            yield f"{theirs}.{x}_proj.bias", f"{ours}.linear_qkv.bias", (count * head,)
    yield f"{theirs}.o_proj.weight", f"{ours}.linear_proj.weight", (hidden, heads * head)
    if is_biased:
        yield f"{theirs}.o_proj.bias", f"{ours}.linear_proj.bias", (hidden,)
    for x in "qk" if family.startswith(("qwen3", "gemma3")) else "":
        yield f"{theirs}.{x}_norm.weight", f"{ours}.{x}_layernorm.weight", (head,)
    if family == "gpt_oss":
        yield f"{theirs}.sinks", f"{ours}.core_attention.softmax_offset", (heads,)


def _latent(config: Mapping[str, Any]) -> Rows:
    """Multi-latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    turned, value = config["qk_rope_head_dim"], config["v_head_dim"]
    queries = heads * (config["qk_nope_head_dim"] + turned)
    keys = heads * (config["qk_nope_head_dim"] + value)
    theirs, ours = "self_attn", "self_attention.linear"
    compressed = [("kv", "kv_a_proj_with_mqa", config["kv_lora_rank"], turned, keys)]
    if config["q_lora_rank"]:
        compressed.append(("q", "q_a_proj", config["q_lora_rank"], 0, queries))
    else:
        yield f"{theirs}.q_proj.weight", f"{ours}_q_proj.weight", (queries, hidden)
    for x, down, rank, more, rows in compressed:
        yield f"{theirs}.{down}.weight", f"{ours}_{x}_down_proj.weight", (rank + more, hidden)
        norm = f"{ours}_{x}_up_proj.layer_norm_weight"
        yield f"{theirs}.{x}_a_layernorm.weight", norm, (rank,)
        yield f"{theirs}.{x}_b_proj.weight", f"{ours}_{x}_up_proj.weight", (rows, rank)
    yield f"{theirs}.o_proj.weight", "self_attention.linear_proj.weight", (hidden, heads * value)


def _experts(config: Mapping[str, Any], count: int) -> Rows:
    family, hidden = config["model_type"], config["hidden_size"]
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    each, all_ = "mlp.experts.experts", "mlp.experts.experts.*"
    if family == "gpt_oss":
        for leaf, shape in (("weight", (count, hidden)), ("bias", (count,))):
            yield f"mlp.router.{leaf}", f"mlp.router.{leaf}", shape
        for name, linear, rows, columns in (
            ("gate_up_proj", "linear_fc1", hidden, 2 * width),
            ("down_proj", "linear_fc2", width, hidden),
        ):
            yield f"mlp.experts.{name}", f"{all_}.{linear}.weight", (count, rows, columns)
            yield f"mlp.experts.{name}_bias", f"{all_}.{linear}.bias", (count, columns)
        return
    at, names = "mlp", ("gate_proj", "up_proj", "down_proj")
    if family == "mixtral":
        at, names = "block_sparse_moe", ("w1", "w3", "w2")
    yield f"{at}.gate.weight", "mlp.router.weight", (count, hidden)
    for n in range(count):
        yield from _mlp(f"{at}.experts.{n}", f"{each}.{n}", width, hidden, names)
    if family == "qwen2_moe":
        yield "mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", (1, hidden)
        width = config["shared_expert_intermediate_size"]
        yield from _mlp("mlp.shared_expert", "mlp.shared_experts", width, hidden)
    if family == "deepseek_v3":
        yield "mlp.gate.e_score_correction_bias", "mlp.router.expert_bias", (count,)
        yield from _mlp("mlp.shared_experts", "mlp.shared_experts", width, hidden)


def _layer(config: Mapping[str, Any], layer: int) -> Rows:
    family, hidden = config["model_type"], config["hidden_size"]
    number = "num_local_experts", "num_experts", "n_routed_experts"
    experts = next((config[name] for name in number if name in config), 0)
    is_sparse = experts and layer not in config.get("mlp_only_layers", ())
    norms = {
        "input_layernorm": "self_attention.linear_qkv.layer_norm_weight",
        "post_attention_layernorm": "mlp.linear_fc1.layer_norm_weight",
    }
    if is_sparse:
        norms["post_attention_layernorm"] = "pre_mlp_layernorm.weight"
    if family == "gemma3_text":
        norms["pre_feedforward_layernorm"] = norms["post_attention_layernorm"]
        norms["post_attention_layernorm"] = "self_attention.linear_proj.post_layernorm.weight"
        norms["post_feedforward_layernorm"] = "mlp.linear_fc2.post_layernorm.weight"
    for theirs, ours in norms.items():
        yield f"{theirs}.weight", ours, (hidden,)
    yield from _latent(config) if family == "deepseek_v3" else _attention(config)
    leaves = ("weight", "bias") if config.get("mlp_bias") else ("weight",)
    dense = _mlp("mlp", "mlp", config["intermediate_size"], hidden, leaves=leaves)
    yield from _experts(config, experts) if is_sparse else dense


def _mixed_layer(config: Mapping[str, Any], layer: int) -> Rows:
    """One of four mixers."""
    hidden, latent = config["hidden_size"], config["moe_latent_size"]
    scans, inner = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    mixed = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    experts, plain = config["n_routed_experts"], ("up_proj", "down_proj")
    kind = config["hybrid_override_pattern"][layer]
    norms = {
        "M": "mixer.in_proj.layer_norm_weight",
        "*": "self_attention.linear_qkv.layer_norm_weight",
        "-": "mlp.linear_fc1.layer_norm_weight",
        "E": "pre_mlp_layernorm.weight",
    }
    yield "norm.weight", norms[kind], (hidden,)
    if kind == "M":
        for name, shape in {
            **dict.fromkeys(("A_log", "D", "dt_bias"), (scans,)),
            "conv1d.weight": (mixed, 1, config["conv_kernel"]),
            "conv1d.bias": (mixed,),
            "in_proj.weight": (inner + mixed + scans, hidden),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        }.items():
            yield f"mixer.{name}", f"mixer.{name}", shape
    elif kind == "*":
        yield from _attention(config, "mixer")
    elif kind == "-":
        yield from _mlp("mixer", "mlp", config["intermediate_size"], hidden, plain)
    else:
        yield "mixer.gate.weight", "mlp.router.weight", (experts, hidden)
        yield "mixer.gate.e_score_correction_bias", "mlp.router.expert_bias", (experts,)
        for n in range(experts):
            width, names = config["moe_intermediate_size"], f"experts.experts.{n}"
            yield from _mlp(f"mixer.experts.{n}", f"mlp.{names}", width, latent, plain)
        width = config["moe_shared_expert_intermediate_size"]
        yield from _mlp("mixer.shared_experts", "mlp.shared_experts", width, hidden, plain)
        for name, sizes in (("fc1", (latent, hidden)), ("fc2", (hidden, latent))):
            yield f"mixer.{name}_latent_proj.weight", f"mlp.{name}_latent_proj.weight", sizes


def _rows(config: Mapping[str, Any]) -> Rows:
    """All tensors of a model."""
    is_mixed = config["model_type"] == "nemotron_h"
    names = ("backbone", "embeddings", "norm_f", "final_norm")
    if not is_mixed:
        names = ("model", "embed_tokens", "norm", "final_layernorm")
    at, embedding, norm, megatrons_norm = names
    rows = config["vocab_size"], config["hidden_size"]
    yield f"{at}.{embedding}.weight", "embedding.word_embeddings.weight", rows
    yield f"{at}.{norm}.weight", f"decoder.{megatrons_norm}.weight", rows[1:]
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", "output_layer.weight", rows
    layers = len(config.get("hybrid_override_pattern", ())) or config["num_hidden_layers"]
    for layer in range(layers):
        of_layer = _mixed_layer(config, layer) if is_mixed else _layer(config, layer)
        for theirs, ours, shape in of_layer:
            yield f"{at}.layers.{layer}.{theirs}", f"decoder.layers.{layer}.{ours}", shape


def files(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights by the names and in the shapes of transformers' files."""
    return {theirs: torch.randn(shape).to(dtype) for theirs, _, shape in _rows(config)}


def converted(
    config: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same weights as a checkpoint of Megatron's has them, layers and experts apart."""
    parts: dict[str, list[torch.Tensor]] = {}
    for theirs, ours, _ in _rows(config):
        parts.setdefault(ours, []).append(state[theirs])
    weights: dict[str, torch.Tensor] = {}
    for name, tensors in parts.items():
        if ".*." in name:
            # All experts in one tensor, whose rows of gate and up projection alternate.
            for n, data in enumerate(tensors[0]):
                if "linear_fc1" in name:
                    data = torch.cat([data[..., start::2] for start in (0, 1)], -1)
                weights[name.replace("*", str(n))] = data.mT if data.ndim > 1 else data
        elif name.endswith(("linear_qkv.weight", "linear_qkv.bias")):
            chunks = (part.chunk(config["num_key_value_heads"]) for part in tensors)
            weights[name] = torch.cat([*itertools.chain(*zip(*chunks, strict=True))])
        else:
            weights[name] = torch.cat(tensors) if len(tensors) > 1 else tensors[0]
    return weights


def files_of(
    config: Mapping[str, Any], ours: Callable[[str], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The inverse of :func:`converted`: it runs on numbers of elements."""
    state = files(config)
    numbers = torch.arange(sum(data.numel() for data in state.values()))
    split = zip(
        state.items(), numbers.split([data.numel() for data in state.values()]), strict=True
    )
    numbered = {name: part.view(data.shape) for (name, data), part in split}
    values = torch.zeros(len(numbers))
    for name, part in converted(config, numbered).items():
        values[part.flatten()] = ours(name)[: len(part)].flatten().float()
    return {name: values[part] for name, part in numbered.items()}


def stacked(config: Mapping[str, Any], ours: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The experts of a layer in one tensor, and all layers if they have the same tensors."""
    words = ["experts"] if config.get("mlp_only_layers") else ["experts", "layers"]
    for word in words:
        stacks: dict[str, list[torch.Tensor]] = {}
        for name, data in ours.items():
            stacks.setdefault(re.sub(rf"\b{word}\.\d+\.", f"{word}.", name), []).append(data)
        many = {
            re.sub(rf"\b{word}\.\d+\.", f"{word}.", n)
            for n in ours
            if re.search(rf"\b{word}\.\d", n)
        }
        ours = {n: torch.stack(parts) if n in many else parts[0] for n, parts in stacks.items()}
    return dict(ours)


def name(config: Mapping[str, Any]) -> str:
    """An identifier for a test."""
    return str(config["model_type"])
