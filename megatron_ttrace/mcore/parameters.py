# SPDX-License-Identifier: Apache-2.0
"""Start values for every parameter, and where each parameter sits in the whole model.

``reveal`` (default) differs from Megatron's initialiser on purpose: a bias of zero, a norm weight
of one or a gradient that vanishes hides a bug. Weights get standard deviation GAIN/sqrt(fan-in),
which keeps activations and attention scores of one size at any width (with Megatron's 0.02 a narrow
model's attention is uniform and its gradients are mostly rounding); biases and norm weights vary.
``megatron`` uses Megatron's own distributions (``--init-method-std``; biases 0, norm weights 1).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import torch

from megatron_ttrace.compare.measure import local_view
from megatron_ttrace.mcore.names import raw
from megatron_ttrace.placement.block_shard import BlockShard
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.flat_shard import FlatShard
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import Placement, Step, plan
from megatron_ttrace.placement.shard import Shard
from megatron_ttrace.runtime.start.generator import normal

GAIN = 0.5
"""Gain of a linear layer. At 1 a bf16 model of two layers already loses a digit to its depth, and a
third of its gradients are blind; at 0.5 none is. docs/measurements.md has the table. Norms of
queries and keys stand where the gain of their projections would: their weights are of its size."""

EMBEDDING_GAIN = 2.0
BIAS = 0.05
"""Tokens must differ by more than what they have in common, the biases: gradients of queries and
keys are differences between tokens, and what is common cancels and leaves its rounding behind."""


UNMARKED = {"softmax_offset": 0}
"""Dims of parameters that are divided over tp although nothing on them says so: the attention
sinks of ``--softmax-type learnable``, one a head (``DotProductAttention.sharded_state_dict``)."""


_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)\d+$")
"""Grouped experts' parameters. Before 0.19 their marks name dim 0 for both: ``TEGroupedLinear``
(megatron/core/extensions/transformer_engine.py) gives TransformerEngine no mode.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPlace:
    """Where a rank's parameter sits in the logical one."""

    name: str
    logical_shape: tuple[int, ...]
    placement: Placement

    def boxes(self, mesh: Mesh) -> tuple[Box, ...]:
        """This rank's boxes."""
        return plan(self.logical_shape, self.placement, mesh)

    def flat(self, start: int, end: int) -> ParameterPlace:
        """The place of a flat range of this parameter (ZeRO)."""
        step = Step("dp", FlatShard(start, end))
        return dataclasses.replace(self, placement=(*self.placement, step))


def place_parameter(
    name: str, parameter: torch.nn.Parameter, mesh: Mesh, *, gated: bool
) -> ParameterPlace:
    """Read a parameter's place off the attributes that Megatron's layers set on it.

    ``tensor_model_parallel`` and ``partition_dim`` (``set_tensor_model_parallel_attributes`` in
    megatron/core/tensor_parallel/layers.py) say what is divided; ``allreduce=False`` marks expert
    parameters, which are divided over the expert-tensor axis.
    """
    parameter = raw(parameter)
    of_expert = not getattr(parameter, "allreduce", True) or ".experts." in f".{name}"
    axis = "etp" if of_expert else "tp"
    shape = list(parameter.shape)
    size = mesh.size(axis)
    dim = _divided_dim(name, parameter)
    if size == 1 or dim is None:
        return ParameterPlace(name, tuple(shape), ())
    shape[dim] *= size
    stacked = gated and dim == 0 and ".linear_fc1." in f".{name}"
    rule = BlockShard(dim) if stacked else Shard(dim)
    return ParameterPlace(name, tuple(shape), (Step(axis, rule),))


def _divided_dim(name: str, parameter: torch.nn.Parameter) -> int | None:
    """The dim that tensor parallelism divides, by name or by mark; ``None`` for a whole one."""
    grouped = _GROUPED.search(name)
    if grouped is not None:
        layer, leaf = grouped.groups()
        return 0 if layer == "linear_fc1" else 1 if leaf == "weight" else None
    if getattr(parameter, "tensor_model_parallel", False):
        return int(getattr(parameter, "partition_dim", 0))
    return UNMARKED.get(name.rpartition(".")[2])


def scale_of(name: str, shape: Sequence[int], config: Any, init: str) -> tuple[float, float]:
    """(mean, standard deviation) of a parameter's start values."""
    leaf = name.rpartition(".")[2]
    is_weight = len(shape) >= 2
    is_output = any(part in f".{name}" for part in (".linear_proj.", ".linear_fc2."))
    depth = math.sqrt(2.0 * config.num_layers) if is_output else 1.0
    if init == "megatron":
        if is_weight:
            return 0.0, float(config.init_method_std) / depth
        is_norm_weight = leaf.endswith("weight")
        zero_centred = getattr(config, "layernorm_zero_centered_gamma", False)
        return (1.0 if is_norm_weight and not zero_centred else 0.0), 0.0
    if is_weight:
        gain = EMBEDDING_GAIN if ".embedding." in f".{name}" else GAIN
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
    config: Any,
    init: str,
) -> None:
    """Overwrite a local parameter with its slice of the generated logical one."""
    mean, std = scale_of(place.name, place.logical_shape, config, init)
    with torch.no_grad():
        for box in place.boxes(mesh):
            values = normal(seed, place.name, place.logical_shape, box.logical, box.extent)
            values.mul_(std).add_(mean)
            target = local_view(parameter.data, box)
            target.copy_(values.to(torch.float32).to(target.dtype))
