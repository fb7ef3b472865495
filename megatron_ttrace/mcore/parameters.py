# SPDX-License-Identifier: Apache-2.0
"""Where each parameter sits in the whole model, as the marks of Megatron's layers say."""

from __future__ import annotations

import dataclasses
import re

import torch

from megatron_ttrace.mcore.names import raw
from megatron_ttrace.mcore.roles import is_within_first_of_gated
from megatron_ttrace.placement.block_shard import BlockShard
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.flat_shard import FlatShard
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import Placements, Step, plan
from megatron_ttrace.placement.shard import Shard

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
    placement: Placements

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
    stacked = gated and dim == 0 and is_within_first_of_gated(name)
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
