# SPDX-License-Identifier: Apache-2.0
"""Start values for every parameter.

``reveal`` (default) differs from Megatron's initialiser on purpose: a bias of zero, a norm weight
of one or a vanishing gradient hides a bug. Weights get the standard deviation GAIN/sqrt(fan-in), so
that activations and attention scores have the same size at any width (with Megatron's 0.02 the
attention of a narrow model is uniform and its gradients are mostly rounding). Biases and norm
weights vary. ``megatron`` uses Megatron's own distributions (``--init-method-std``; biases 0, norm
weights 1). What else a fork begins with one number, as a temperature of 1, stays near it: zero or
less may have no root and no logarithm.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch

from megatron_ttrace.mcore.arguments import ModelConfig
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.roles import STATE_SPACE
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.run.start.generator import generate
from megatron_ttrace.trace.start import StartValues
from megatron_ttrace.trace.views import local_view, logical_view

_NONE: Mapping[str, float] = MappingProxyType({})

GAIN = 0.5
"""Gain of a linear layer. At 1 a bf16 model of two layers already loses a digit to its depth, and a
third of its gradients are blind; at 0.5 none is (docs/tolerance.md). Norms of queries and keys
cancel the gain of their projections, so their weights have its size instead."""

EMBEDDING_GAIN = 2.0
DELTA_NET_GAIN = 0.2
"""Of a delta net's convolution. The SiLU behind it gives larger values a common direction, in which
gradients of queries and keys cancel. Norms behind it undo the size."""
MAMBA_GAIN = 0.7
"""Of a Mamba layer's, whose norm adds an epsilon to the size."""
BIAS = 0.05
"""Tokens must differ by more than their common part, the biases: gradients of queries and keys are
differences between tokens, in which the common part cancels but its rounding does not."""


def constants_of(parts: Iterable[tuple[torch.Tensor, ParameterPlace]]) -> dict[str, float | None]:
    """What vectors and numbers begin with that are neither weights nor biases, by their names.

    ``None`` where it is not one number, far enough from zero. ``parts`` are what this rank has of
    parameters.
    """
    found: dict[str, float | None] = {}
    for part, place in parts:
        leaf, dims = place.name.rpartition(".")[2], len(place.logical_shape)
        if dims < 2 and part.numel() and not leaf.endswith(("weight", "bias")):
            low, high = (float(end) for end in part.detach().aminmax())
            found[place.name] = low if low == high and abs(low) > 4 * BIAS else None
    return found


def agreed(ranks: Iterable[Mapping[str, float | None]]) -> dict[str, float]:
    """Those of a whole model: what all ranks with a part of it begin with."""
    numbers: defaultdict[str, set[float | None]] = defaultdict(set)
    for constants in ranks:
        for name, number in constants.items():
            numbers[name].add(number)
    return {n: v for n, (v, *others) in numbers.items() if v is not None and not others}


def scale_of(
    name: str,
    shape: Sequence[int],
    config: ModelConfig,
    init: str,
    constants: Mapping[str, float] = _NONE,
) -> tuple[float, float]:
    """(mean, standard deviation) of a parameter's start values."""
    leaf = name.rpartition(".")[2]
    if leaf in STATE_SPACE:
        return STATE_SPACE[leaf][init == "megatron"]
    if (constant := constants.get(name)) is not None:
        return constant, 0.0 if init == "megatron" else 0.2 * abs(constant)
    is_weight = len(shape) >= 2
    is_output = any(part in f".{name}" for part in (".linear_proj.", ".linear_fc2.", ".out_proj."))
    depth = math.sqrt(2.0 * config.num_layers) if is_output else 1.0
    if init == "megatron":
        if is_weight:
            return 0.0, float(config.init_method_std) / depth
        is_norm_weight = leaf.endswith("weight")
        zero_centred = getattr(config, "layernorm_zero_centered_gamma", False)
        return (1.0 if is_norm_weight and not zero_centred else 0.0), 0.0
    if is_weight:
        gain = EMBEDDING_GAIN if ".embedding." in f".{name}" else GAIN
        if name.endswith(".self_attention.conv1d.weight"):
            gain = DELTA_NET_GAIN
        elif leaf == "conv1d_weight":
            gain = MAMBA_GAIN
        return 0.0, gain / math.sqrt(shape[-1]) / depth
    if leaf.endswith("weight"):
        zero_centred = getattr(config, "layernorm_zero_centered_gamma", False)
        size = GAIN if ".q_layernorm." in f".{name}" or ".k_layernorm." in f".{name}" else 1.0
        return (size - 1.0 if zero_centred else size), 0.2 * size
    return 0.0, BIAS


def fill(
    place: ParameterPlace,
    parameter: torch.Tensor,
    mesh: Mesh,
    *,
    seed: int,
    config: ModelConfig,
    init: str,
    constants: Mapping[str, float] = _NONE,
    stored: StartValues | None = None,
) -> None:
    """Overwrite a local parameter with its slice of the generated logical one.

    ``constants`` are those of :func:`constants_of`; ``stored`` may have the slice already, with the
    same bits.
    """
    shape, target = place.logical_shape, parameter.data
    logical = stored.parameter(place.name, shape, target.dtype) if stored else None
    mean, std = scale_of(place.name, shape, config, init, constants)
    with torch.no_grad():
        for box in place.boxes(mesh):
            part = local_view(target, box)
            if logical is not None:
                part.copy_(logical_view(logical, box))
                continue

            def scaled(values: torch.Tensor) -> torch.Tensor:
                return values.mul_(std).add_(mean).to(torch.float32)

            generate(part, seed, place.name, shape, box.logical, scaled)
