# SPDX-License-Identifier: Apache-2.0
"""Linear layers and convolutions that stack blocks, each divided over tp.

- A gated MLP's ``linear_fc1`` makes gate and up projection (megatron/core/transformer/mlp.py).
  Where they alternate in short runs, a rank's part has both (``_remove_glu_interleaving`` in
  moe/experts.py).
- A Mamba layer's ``in_proj`` makes gate, input, B, C and dt, and its convolution takes three of
  them. Megatron marks the weights with the sizes on one rank (``partition_sizes``,
  megatron/core/ssm/mamba_mixer.py). A gated delta net has no such mark (``GatedDeltaNet`` in
  megatron/core/ssm/gated_delta_net).
- Latent attention with ``--mla-down-proj-fusion`` projects down for queries, and for keys and
  values (``FusedMLASelfAttention`` in megatron/core/transformer/multi_latent_attention.py).
- The output of an adapter is added to that of the layer that it wraps (megatron/bridge/peft).
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_ttrace.mcore.names import Names, raw
from megatron_ttrace.mcore.roles import is_of_adapter

Shares = int | tuple[int, ...]
"""The number of equal blocks, or sizes of unequal ones relative to each other."""

GATED = "linear_fc1"
"""The layer of a gated MLP that makes gate and up projection."""
_INTERLEAVED = {
    "_remove_glu_interleaving": "moe_mlp_glu_interleave_size",
    "_fused_grouped_swiglu_ops": "moe_shared_expert_glu_interleave_size",
}
"""What gated MLPs have that obey an option, by which gate and up projection alternate."""
_WRAPPED, _ADDED = ".to_wrap.", (".adapter.linear_out.weight", ".adapter.weight_magnitude")
_MAKING = re.compile(r"(.*(?<!\bconv1d))\.weight\d*")
"""Weights that make a layer's output; the layer that holds a convolution uses its weight."""


def stacked_parameters(names: Names) -> dict[str, Shares]:
    """Parameters of one model chunk that stack blocks in dim 0."""
    by_id = {id(p): sizes for module in names.modules.values() for p, sizes in _in(module)}
    stacked = {
        name: _shares(sizes)
        for name, parameter in names.parameters.items()
        if (sizes := by_id.get(id(raw(parameter))) or _by_stride(name, raw(parameter)))
    }
    for name, shares in [*stacked.items()]:
        layer, wrapped, leaf = name.rpartition(_WRAPPED)
        if wrapped and leaf.startswith("weight"):
            of_adapter = (f"{layer}{added}" for added in _ADDED)
            stacked |= {added: shares for added in of_adapter if added in names.parameters}
    return stacked


def _by_stride(name: str, parameter: torch.nn.Parameter) -> Sequence[int]:
    """The blocks of a fork's layer, by Megatron's mark.

    Megatron's own gated layers have it even if gate and up projection alternate.
    """
    blocks = 1 if GATED in name else int(getattr(parameter, "partition_stride", 1))
    return (1,) * blocks if blocks > 1 else ()


def stacked_outputs(chunks: Iterable[Names]) -> dict[str, Shares]:
    """Linear layers whose output stacks blocks in its last dim."""
    return {
        output: shares
        for names in chunks
        for name, shares in stacked_parameters(names).items()
        for output in _outputs(name)
    }


def _outputs(parameter: str) -> Iterator[str]:
    """The modules whose output a stacked weight makes, or is added to."""
    if match := _MAKING.fullmatch(parameter):
        layer = match[1]
        yield layer
        if layer.endswith((".to_wrap", ".linear_out")):
            # The layer that is around it, or the adapter.
            yield layer.rpartition(".")[0]


def head_rows(chunks: Iterable[Names]) -> dict[str, int]:
    """Norms that see one row per token and head, and the number of heads of the whole layer.

    A gated delta net normalises each head's output (``_apply_gated_norm``); context parallelism
    divides its heads, not its sequence.
    """
    return {
        f"{name}.out_norm": heads
        for names in chunks
        for name, module in names.modules.items()
        if _is_delta_net(module) and isinstance(heads := module.num_value_heads, int)
    }


def _is_delta_net(module: Any) -> bool:
    return all(hasattr(module, name) for name in ("conv1d", "in_proj", "out_norm", "qk_dim"))


def _in(module: Any) -> Iterator[tuple[torch.nn.Parameter, Sequence[int]]]:
    """Stacked parameters of a module itself, and of the children that it divides."""
    for parameter in module.parameters(recurse=False):
        if sizes := getattr(raw(parameter), "partition_sizes", None):
            yield raw(parameter), sizes
    if _is_gated(module):
        for name, parameter in getattr(module, GATED).named_parameters():
            if not is_of_adapter(name):
                yield raw(parameter), (1, 1)
    if hasattr(module, "linear_qkv_down_proj"):
        config = module.config
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        yield raw(module.linear_qkv_down_proj.weight), (config.q_lora_rank, latent)
    if _is_delta_net(module):
        keys, values, heads = module.qk_dim, module.v_dim, module.num_value_heads
        sections = getattr(module, "in_proj_split_sections", None)
        yield raw(module.in_proj.weight), sections or (keys, keys, values, values, heads, heads)
        for parameter in module.conv1d.parameters():
            yield raw(parameter), (keys, keys, values)


def _is_gated(module: Any) -> bool:
    """Whether it is an MLP with gate and up projection one after the other."""
    config = getattr(module, "config", None)
    return (
        hasattr(module, GATED)
        and bool(getattr(config, "gated_linear_unit", False))
        and not any(
            hasattr(module, method) and getattr(config, option, None)
            for method, option in _INTERLEAVED.items()
        )
    )


def _shares(sizes: Sequence[int]) -> Shares:
    common = math.gcd(*sizes)
    return len(sizes) if len({*sizes}) == 1 else tuple(size // common for size in sizes)
