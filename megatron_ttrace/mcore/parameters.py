# SPDX-License-Identifier: Apache-2.0
"""The place of each parameter in the whole model, from the attributes that Megatron sets on it."""

import dataclasses
import math
import re
from typing import Self

import torch

from megatron_ttrace.mcore.names import raw
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.mcore.sharded_weights import Rows, gathered_rows
from megatron_ttrace.mcore.stacked import Shares
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import BlockShard, FlatShard, PartShard, Shard
from megatron_ttrace.placement.plan import Placements, Step, plan

UNMARKED = {"softmax_offset": 0}
"""Dims of parameters that are divided over tp without an attribute that says so: the sinks of
``--softmax-type learnable``, one per head (``DotProductAttention.sharded_state_dict``)."""

_MAGNITUDE = re.compile(r"(\w+)\.adapter\.weight_magnitude$")
"""DoRA's length of each row of a layer's weight, which has no attributes either
(``ParallelLinearDoRAAdapter.sharded_state_dict`` in megatron/bridge/peft/dora_layers.py)."""
_ROW_PARALLEL = frozenset(("linear_proj", "linear_fc2", "out_proj"))
"""Layers whose rows are whole on each rank."""

_OF_EXPERTS = re.compile(r"\.experts\.(?:local_experts\.\d+\.)?(linear_fc[12])\.(weight|bias)\d*$")
"""Parameters of experts. Before 0.19 the attributes of both layers name dim 0, because ``TELinear``
and ``TEGroupedLinear`` (megatron/core/extensions/transformer_engine.py) pass no parallel mode."""


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterPlace:
    """The place of a rank's parameter in the logical one.

    ``numel`` is the number of its elements if the rank's tensor ends with padding.
    """

    name: str
    logical_shape: tuple[int, ...]
    placement: Placements
    numel: int | None = None

    def boxes(self, mesh: Mesh) -> tuple[Box, ...]:
        """This rank's boxes."""
        return plan(self.logical_shape, self.placement, mesh)

    def flat(self, start: int, end: int) -> Self:
        """The place of a flat range of this parameter (ZeRO)."""
        if self.numel is not None:
            start, end = min(start, self.numel), min(end, self.numel)
        step = Step("dp", FlatShard(start, end))
        return dataclasses.replace(self, placement=(*self.placement, step))

    @property
    def replicated(self) -> tuple[str, ...]:
        """Axes whose ranks compute gradients from different tokens, and hold equal weights."""
        parts = (step for step in self.placement if not isinstance(step.placement, FlatShard))
        divided = {step.axis for step in parts}
        return tuple(axis for axis in reduced_over(self.name) if axis not in divided)


def reduced_over(name: str) -> tuple[str, ...]:
    """The axes whose ranks compute a parameter's gradient from different tokens.

    Their gradients are added up (``DistributedDataParallel`` in megatron/core/distributed). Taken
    from the name, because the mark ``allreduce`` that Megatron decides by may be lost.
    """
    return ("edp",) if is_within_experts(name) else ("dp", "cp")


def place_parameter(
    name: str,
    parameter: torch.nn.Parameter,
    mesh: Mesh,
    stacked: Shares = 1,
) -> ParameterPlace:
    """Read a parameter's place from its attributes.

    ``tensor_model_parallel`` and ``partition_dim`` (``set_tensor_model_parallel_attributes`` in
    megatron/core/tensor_parallel/layers.py) say which dim is divided. ``allreduce=False`` marks
    parameters of experts, which are divided over the expert-tensor axis. ``stacked`` are the
    blocks that this parameter stacks in dim 0.

    Raises:
        ValueError: when consecutive data-parallel ranks do not have consecutive rows.
    """
    parameter = raw(parameter)
    shape = list(parameter.shape)
    rows = gathered_rows(parameter)
    if rows is not None:
        shape[0] = rows.all
    steps: Placements = ()
    if divided := _divided(name, parameter, mesh, stacked):
        dim, step = divided
        shape[dim] *= mesh.size(step.axis)
        steps = (step,)
    place = ParameterPlace(name, tuple(shape), steps)
    return place if rows is None else _gathered(place, parameter, rows, mesh)


def place_of_part(
    name: str, parameter: torch.nn.Parameter, mesh: Mesh, stacked: Shares = 1
) -> ParameterPlace:
    """The place that a rank of a mesh would have in a parameter that is whole here."""
    divided = _divided(name, raw(parameter), mesh, stacked)
    return ParameterPlace(name, tuple(raw(parameter).shape), () if divided is None else divided[1:])


def _divided(
    name: str, parameter: torch.nn.Parameter, mesh: Mesh, stacked: Shares
) -> tuple[int, Step] | None:
    """The dim that tensor parallelism divides, and how."""
    of_expert = not getattr(parameter, "allreduce", True) or is_within_experts(name)
    axis = "etp" if of_expert else "tp"
    dim = _divided_dim(name, parameter)
    if mesh.size(axis) == 1 or dim is None:
        return None
    stacks = stacked != 1 and dim == 0
    return dim, Step(axis, BlockShard(dim, stacked) if stacks else Shard(dim))


def _gathered(
    place: ParameterPlace, parameter: torch.nn.Parameter, rows: Rows, mesh: Mesh
) -> ParameterPlace:
    """The place of some rows of what tensor parallelism left. Raises ``ValueError``."""
    axis = "edp" if is_within_experts(place.name) else "dp"
    if mesh.at(axis) % rows.parts != rows.number:
        raise ValueError(f"{place.name}: rank {mesh.rank} has part {rows.number} of {rows.parts}")
    step = Step(axis, PartShard(0, rows.parts, rows.length))
    numel = rows.here * math.prod(parameter.shape[1:]) if rows.padding else None
    return dataclasses.replace(place, placement=(*place.placement, step), numel=numel)


def _divided_dim(name: str, parameter: torch.nn.Parameter) -> int | None:
    """The dim that tensor parallelism divides, if any, by name or by attribute."""
    of_experts = _OF_EXPERTS.search(name)
    if of_experts is not None:
        layer, leaf = of_experts.groups()
        return 0 if layer == "linear_fc1" else 1 if leaf == "weight" else None
    if getattr(parameter, "tensor_model_parallel", False):
        return int(getattr(parameter, "partition_dim", 0))
    if of_layer := _MAGNITUDE.search(name):
        return None if of_layer[1] in _ROW_PARALLEL else 0
    return UNMARKED.get(name.rpartition(".")[2])
