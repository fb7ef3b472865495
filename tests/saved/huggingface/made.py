# SPDX-License-Identifier: Apache-2.0
"""Small models of transformers' families, and a plain converter that shares no code with ours."""

import itertools
import re
from collections.abc import Callable, Mapping
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


def files(config: Mapping[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Random weights by the names and in the shapes of transformers' files."""
    family, hidden = config["model_type"], config["hidden_size"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head = config["head_dim"]
    if family == "nemotron_h":
        return {name: torch.randn(shape).to(dtype) for name, shape in _mixed(config).items()}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden)
    }
    shapes["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}{name}.weight"] = (hidden,)
        out = hidden, heads * head
        if family == "gemma3_text":
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                shapes[f"{at}{name}.weight"] = (hidden,)
        if family == "gpt_oss":
            shapes[f"{at}self_attn.sinks"] = (heads,)
        if family == "deepseek_v3":
            shapes |= _latent(config, f"{at}self_attn.")
        for name, rows in (
            {} if family == "deepseek_v3" else {"q": heads, "k": groups, "v": groups}.items()
        ):
            shapes[f"{at}self_attn.{name}_proj.weight"] = (rows * head, hidden)
            if family.startswith("qwen2") or config.get("attention_bias"):
                shapes[f"{at}self_attn.{name}_proj.bias"] = (rows * head,)
        shapes[f"{at}self_attn.o_proj.weight"] = out
        if config.get("attention_bias"):
            shapes[f"{at}self_attn.o_proj.bias"] = (hidden,)
        if family.startswith(("qwen3", "gemma3")):
            shapes |= {f"{at}self_attn.{x}_norm.weight": (head,) for x in "qk"}
        number = "num_local_experts", "num_experts", "n_routed_experts"
        experts = next((config[name] for name in number if name in config), 0)
        width = config.get("moe_intermediate_size", config["intermediate_size"])
        if family == "mixtral":
            shapes[f"{at}block_sparse_moe.gate.weight"] = (experts, hidden)
            mlps = {f"block_sparse_moe.experts.{n}": ("w1", "w3", "w2") for n in range(experts)}
        elif family == "gpt_oss":
            mlps = {}
            shapes[f"{at}mlp.router.weight"] = (experts, hidden)
            shapes[f"{at}mlp.router.bias"] = (experts,)
            for name, shape in {
                "gate_up_proj": (experts, hidden, 2 * width),
                "down_proj": (experts, width, hidden),
            }.items():
                shapes[f"{at}mlp.experts.{name}"] = shape
                shapes[f"{at}mlp.experts.{name}_bias"] = (experts, shape[2])
        elif experts and layer not in config["mlp_only_layers"]:
            shapes[f"{at}mlp.gate.weight"] = (experts, hidden)
            names = "gate_proj", "up_proj", "down_proj"
            mlps = {f"mlp.experts.{n}": names for n in range(experts)}
            if family == "qwen2_moe":
                shapes[f"{at}mlp.shared_expert_gate.weight"] = (1, hidden)
                mlps["mlp.shared_expert"] = names
            if family == "deepseek_v3":
                shapes[f"{at}mlp.gate.e_score_correction_bias"] = (experts,)
                mlps["mlp.shared_experts"] = names
        else:
            width = config["intermediate_size"]
            mlps = {"mlp": ("gate_proj", "up_proj", "down_proj")}
        for module, (gate, up, down) in mlps.items():
            rows = config.get("shared_expert_intermediate_size", width)
            rows = rows if "shared_expert" in module else width
            sizes = ((gate, (rows, hidden)), (up, (rows, hidden)), (down, (hidden, rows)))
            for name, shape in sizes:
                shapes[f"{at}{module}.{name}.weight"] = shape
                if config.get("mlp_bias"):
                    shapes[f"{at}{module}.{name}.bias"] = shape[:1]
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def _latent(config: Mapping[str, Any], at: str) -> dict[str, tuple[int, ...]]:
    """Shapes of multi-latent attention."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    query, key = config["q_lora_rank"], config["kv_lora_rank"]
    plain, turned = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value = config["v_head_dim"]
    queries: dict[str, tuple[int, ...]] = {f"{at}q_proj.weight": (heads * (plain + turned), hidden)}
    if query:
        queries = {
            f"{at}q_a_proj.weight": (query, hidden),
            f"{at}q_a_layernorm.weight": (query,),
            f"{at}q_b_proj.weight": (heads * (plain + turned), query),
        }
    return queries | {
        f"{at}kv_a_proj_with_mqa.weight": (key + turned, hidden),
        f"{at}kv_a_layernorm.weight": (key,),
        f"{at}kv_b_proj.weight": (heads * (plain + value), key),
        f"{at}o_proj.weight": (hidden, heads * value),
    }


def _mixed(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of a model with one of four mixers in each layer."""
    hidden, latent = config["hidden_size"], config["moe_latent_size"]
    heads, groups, head = (
        config[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    scans, inner = config["mamba_num_heads"], config["mamba_num_heads"] * config["mamba_head_dim"]
    mixed = inner + 2 * config["n_groups"] * config["ssm_state_size"]
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    shared = config["moe_shared_expert_intermediate_size"]
    mixers: dict[str, dict[str, tuple[int, ...]]] = {
        "M": {
            "A_log": (scans,),
            "D": (scans,),
            "dt_bias": (scans,),
            "conv1d.weight": (mixed, 1, config["conv_kernel"]),
            "conv1d.bias": (mixed,),
            "in_proj.weight": (inner + mixed + scans, hidden),
            "norm.weight": (inner,),
            "out_proj.weight": (hidden, inner),
        },
        "*": {
            "q_proj.weight": (heads * head, hidden),
            "k_proj.weight": (groups * head, hidden),
            "v_proj.weight": (groups * head, hidden),
            "o_proj.weight": (hidden, heads * head),
        },
        "-": {
            "up_proj.weight": (config["intermediate_size"], hidden),
            "down_proj.weight": (hidden, config["intermediate_size"]),
        },
        "E": {
            "gate.weight": (experts, hidden),
            "gate.e_score_correction_bias": (experts,),
            **{f"experts.{n}.up_proj.weight": (width, latent) for n in range(experts)},
            **{f"experts.{n}.down_proj.weight": (latent, width) for n in range(experts)},
            "shared_experts.up_proj.weight": (shared, hidden),
            "shared_experts.down_proj.weight": (hidden, shared),
            "fc1_latent_proj.weight": (latent, hidden),
            "fc2_latent_proj.weight": (hidden, latent),
        },
    }
    ends = {"embeddings": (config["vocab_size"], hidden), "norm_f": (hidden,)}
    shapes = {f"backbone.{name}.weight": shape for name, shape in ends.items()}
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        at = f"backbone.layers.{layer}."
        shapes[f"{at}norm.weight"] = (hidden,)
        shapes |= {f"{at}mixer.{name}": shape for name, shape in mixers[kind].items()}
    return shapes | {"lm_head.weight": ends["embeddings"]}


OTHERS = {
    "self_attn.q_a_proj.weight": "self_attention.linear_q_down_proj.weight",
    "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
    "self_attn.q_b_proj.weight": "self_attention.linear_q_up_proj.weight",
    "self_attn.kv_a_proj_with_mqa.weight": "self_attention.linear_kv_down_proj.weight",
    "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
    "self_attn.kv_b_proj.weight": "self_attention.linear_kv_up_proj.weight",
    "self_attn.sinks": "self_attention.core_attention.softmax_offset",
    "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
    "mlp.shared_expert_gate.weight": "mlp.shared_experts.gate_weight",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "post_feedforward_layernorm.weight": "mlp.linear_fc2.post_layernorm.weight",
}
"""Tensors of rarer layers that are the same in both."""


def converted(
    config: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The same weights as a checkpoint of Megatron's has them, layers and experts apart."""
    if config["model_type"] == "nemotron_h":
        return _converted(config, state)
    ours = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
    }
    if "lm_head.weight" in state:
        ours["output_layer.weight"] = state["lm_head.weight"]
    groups, head = config["num_key_value_heads"], config["head_dim"]
    shared = config["num_attention_heads"] // groups * head
    for layer in range(config["num_hidden_layers"]):
        at, to = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        ours[f"{to}self_attention.linear_qkv.layer_norm_weight"] = state[
            f"{at}input_layernorm.weight"
        ]
        for leaf in ("weight", "bias"):
            if f"{at}self_attn.k_proj.{leaf}" in state:
                q, k, v = (state[f"{at}self_attn.{x}_proj.{leaf}"] for x in "qkv")
                rows = []
                for group in range(groups):
                    rows.append(q[group * shared : (group + 1) * shared])
                    rows += [x[group * head : (group + 1) * head] for x in (k, v)]
                ours[f"{to}self_attention.linear_qkv.{leaf}"] = torch.cat(rows)
            if f"{at}self_attn.o_proj.{leaf}" in state:
                ours[f"{to}self_attention.linear_proj.{leaf}"] = state[
                    f"{at}self_attn.o_proj.{leaf}"
                ]
        for x in "qk":
            if f"{at}self_attn.{x}_norm.weight" in state:
                norm = state[f"{at}self_attn.{x}_norm.weight"]
                ours[f"{to}self_attention.{x}_layernorm.weight"] = norm
        gate, up, down = "gate_proj", "up_proj", "down_proj"
        moe = f"{at}mlp."
        if config["model_type"] == "mixtral":
            gate, up, down = "w1", "w3", "w2"
            moe = f"{at}block_sparse_moe."
        ours |= {to + OTHERS[x]: state[at + x] for x in OTHERS if at + x in state}
        if config is WHOLE_QUERIES:
            name = f"{to}self_attention.linear_q_proj.weight"
            ours[name] = state[f"{at}self_attn.q_proj.weight"]
        norm = state[f"{at}post_attention_layernorm.weight"]
        if f"{at}pre_feedforward_layernorm.weight" in state:
            ours[f"{to}self_attention.linear_proj.post_layernorm.weight"] = norm
            norm = state[f"{at}pre_feedforward_layernorm.weight"]
        for leaf in ("", "_bias"):
            if f"{at}mlp.experts.gate_up_proj{leaf}" in state:
                both = (state[f"{at}mlp.experts.{x}_proj{leaf}"] for x in ("gate_up", "down"))
                for n, (first, second) in enumerate(zip(*both, strict=True)):
                    name = f"{to}mlp.experts.experts.{n}.{{}}.{'bias' if leaf else 'weight'}".format
                    halves = [
                        first[..., start::2].mT if first.ndim > 1 else first[start::2]
                        for start in (0, 1)
                    ]
                    ours[name("linear_fc1")], ours[name("linear_fc2")] = (
                        torch.cat(halves),
                        second.mT if second.ndim > 1 else second,
                    )
                ours[f"{to}pre_mlp_layernorm.weight"] = norm
        mlps = {moe: f"{to}mlp."}
        if (router := state.get(f"{moe}gate.weight")) is not None:
            ours[f"{to}pre_mlp_layernorm.weight"] = norm
            ours[f"{to}mlp.router.weight"] = router
            mlps = {
                f"{moe}experts.{n}.": f"{to}mlp.experts.experts.{n}." for n in range(len(router))
            }
            mlps |= {f"{moe}shared_expert{s}.": f"{to}mlp.shared_experts." for s in ("", "s")}
        elif f"{at}mlp.router.weight" not in state:
            ours[f"{to}mlp.linear_fc1.layer_norm_weight"] = norm
        for theirs, name in mlps.items():
            for leaf in ("weight", "bias"):
                if f"{theirs}{gate}.{leaf}" in state:
                    halves = [state[f"{theirs}{half}.{leaf}"] for half in (gate, up)]
                    ours[f"{name}linear_fc1.{leaf}"] = torch.cat(halves)
                    ours[f"{name}linear_fc2.{leaf}"] = state[f"{theirs}{down}.{leaf}"]
    return ours


def _converted(
    config: Mapping[str, Any], state: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    ours = {
        "embedding.word_embeddings.weight": state["backbone.embeddings.weight"],
        "decoder.final_norm.weight": state["backbone.norm_f.weight"],
        "output_layer.weight": state["lm_head.weight"],
    }
    norms = {
        "M": "mixer.in_proj.layer_norm_weight",
        "*": "self_attention.linear_qkv.layer_norm_weight",
        "-": "mlp.linear_fc1.layer_norm_weight",
        "E": "pre_mlp_layernorm.weight",
    }
    words = {
        "gate.e_score_correction_bias": "router.expert_bias",
        "gate.weight": "router.weight",
        "up_proj": "linear_fc1",
        "down_proj": "linear_fc2",
    }
    groups, head = config["num_key_value_heads"], config["head_dim"]
    for layer, kind in enumerate(config["hybrid_override_pattern"]):
        at, to = f"backbone.layers.{layer}.", f"decoder.layers.{layer}."
        ours[to + norms[kind]] = state[f"{at}norm.weight"]
        mixer = {
            name.removeprefix(f"{at}mixer."): data
            for name, data in state.items()
            if name.startswith(f"{at}mixer.")
        }
        if kind == "M":
            ours |= {f"{to}mixer.{name}": data for name, data in mixer.items()}
        elif kind == "*":
            q, k, v = (mixer[f"{x}_proj.weight"].split(head) for x in "qkv")
            shared = len(q) // groups
            rows = [(*q[g * shared : (g + 1) * shared], k[g], v[g]) for g in range(groups)]
            ours[f"{to}self_attention.linear_qkv.weight"] = torch.cat([*itertools.chain(*rows)])
            ours[f"{to}self_attention.linear_proj.weight"] = mixer["o_proj.weight"]
        else:
            for name, data in mixer.items():
                for theirs, megatrons in words.items():
                    name = name.replace(theirs, megatrons)
                name = re.sub(r"^experts\.", "experts.experts.", name)
                ours[f"{to}mlp.{name}"] = data
    return ours


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
