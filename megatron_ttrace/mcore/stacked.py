# SPDX-License-Identifier: Apache-2.0
"""Linear layers and convolutions that stack blocks of different sizes, each divided over tp.

A Mamba layer's ``in_proj`` makes gate, input, B, C and dt side by side, and its convolution takes
three of them. Megatron marks the weights with the sizes on one rank (``partition_sizes``,
megatron/core/ssm/mamba_mixer.py). A gated delta net stacks likewise and has no such mark
(``GatedDeltaNet`` in megatron/core/ssm/gated_delta_net). The output of an adapter is added to that
of the layer that it wraps, so it is stacked likewise (megatron/bridge/peft).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from megatron_ttrace.mcore.names import Names, raw

Shares = tuple[int, ...]
"""Sizes of the blocks relative to each other."""

_WRAPPED, _ADDED = ".to_wrap.", ".adapter.linear_out."


def stacked_parameters(names: Names) -> dict[str, Shares]:
    """Parameters of one model chunk that stack unequal blocks in dim 0."""
    by_id = {id(p): sizes for module in names.modules.values() for p, sizes in _in(module)}
    stacked = {
        name: _shares(by_id[id(raw(parameter))])
        for name, parameter in names.parameters.items()
        if id(raw(parameter)) in by_id
    }
    for name, shares in [*stacked.items()]:
        layer, wrapped, leaf = name.rpartition(_WRAPPED)
        if wrapped and (added := f"{layer}{_ADDED}{leaf}") in names.parameters:
            stacked[added] = shares
    return stacked


def stacked_outputs(chunks: Iterable[Names]) -> dict[str, Shares]:
    """Linear layers whose output stacks unequal blocks in its last dim."""
    return {
        output: shares
        for names in chunks
        for name, shares in stacked_parameters(names).items()
        for output in _outputs(name)
    }


def _outputs(parameter: str) -> Iterator[str]:
    """The modules whose output a stacked weight makes, or is added to."""
    layer = parameter.removesuffix(".weight")
    if layer.endswith(".in_proj"):
        yield layer
    elif layer.endswith(".in_proj.to_wrap"):
        yield from (layer, layer.removesuffix(".to_wrap"))
    elif layer.endswith(".in_proj.adapter.linear_out"):
        yield from (layer, layer.removesuffix(".linear_out"))


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
    if not _is_delta_net(module):
        return
    keys, values, heads = module.qk_dim, module.v_dim, module.num_value_heads
    sections = getattr(module, "in_proj_split_sections", None)
    yield raw(module.in_proj.weight), sections or (keys, keys, values, values, heads, heads)
    for parameter in module.conv1d.parameters():
        yield raw(parameter), (keys, keys, values)


def _shares(sizes: Sequence[int]) -> Shares:
    common = math.gcd(*sizes)
    return tuple(size // common for size in sizes)
