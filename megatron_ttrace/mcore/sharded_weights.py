# SPDX-License-Identifier: Apache-2.0
"""Weights that data-parallel ranks divide: with FSDP, and with generalized tensor parallelism.

Between steps a module's parameters are sharded tensors (``DTensor``) with FSDP.

With Megatron-FSDP (``--use-megatron-fsdp``, ZeRO-1 to 3) ``orig_param`` of each is the raw
parameter that replaces it in forward and backward passes. Both are views of buckets, two per
parameter group: one that the optimizer steps (main weights, or the model's own if there are none)
and one that the model computes with
(megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py). So are those of its
version 2, each of whose modules has groups of its own (experimental/parameter_group.py there).

torch's FSDP2 (``--use-torch-fsdp2``, ZeRO-3) divides the rows of each parameter. The optimizer
treats the sharded tensors like any others
(megatron/core/distributed/torch_fully_sharded_data_parallel.py).

Generalized tensor parallelism (``--tensor-parallel-num-weight-shards``) divides the rows of
weights, padded to a multiple of what kernels need, among consecutive data-parallel ranks, which
gather them before each use. To the optimizer each rank's rows are a parameter like any other
(megatron/core/tensor_parallel/generalized_tensor_parallelism.py).
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from megatron_ttrace.placement.placements import FlatShard

SHARDS_OF_WEIGHTS = ("gtp_weight_remat_size", "expert_gtp_weight_remat_size")
"""Arguments: how many ranks gather each weight, and each weight of an expert."""


@dataclasses.dataclass(frozen=True)
class WeightPart:
    """This rank's part of one weight, as flat views of the buckets.

    ``stepped`` is what the optimizer steps: elements ``range`` of the flattened parameter.
    ``weights`` is what the model computes with: elements ``weights_range``.
    """

    stepped: torch.Tensor
    range: tuple[int, int]
    weights: torch.Tensor
    weights_range: tuple[int, int]

    @property
    def computed(self) -> torch.Tensor | None:
        """What the model computes with of the elements that are stepped, if all are here."""
        (start, end), (first, last) = self.range, self.weights_range
        is_here = first <= start and end <= last
        return self.weights[start - first : end - first] if is_here else None


@dataclasses.dataclass(frozen=True, slots=True)
class Rows:
    """This rank's rows of a weight: part ``number`` of ``parts`` parts of ``length`` rows each.

    The last ``padding`` rows of all parts together are no rows of the weight.
    """

    number: int
    parts: int
    length: int
    padding: int

    @property
    def all(self) -> int:
        """Rows of the weight, without padding."""
        return self.parts * self.length - self.padding

    @property
    def here(self) -> int:
        """Rows that this rank has, without padding."""
        return min(max(self.all - self.number * self.length, 0), self.length)


def gathered_rows(parameter: torch.nn.Parameter) -> Rows | None:
    """The rows of a weight of generalized tensor parallelism; ``None`` for any other."""
    if not getattr(parameter, "is_gtp_weight_remat", False):
        return None
    weight: Any = parameter
    return Rows(weight.group.rank(), weight.group.size(), weight.shape[0], weight.pad_length)


def are_published(chunks: Iterable[torch.nn.Module]) -> bool:
    """Whether weights are in buckets of Megatron-FSDP, to which :func:`publish` copies them."""
    return any(_buffers_of(chunk) or groups_of(chunk) for chunk in chunks)


def _buffers_of(chunk: torch.nn.Module) -> list[Any]:
    """The parameter buffer of Megatron-FSDP's version 1; empty for any other wrapper."""
    buffer = getattr(chunk, "param_and_grad_buffer", None)
    return [buffer] if hasattr(buffer, "parameter_groups") else []


def groups_of(chunk: torch.nn.Module) -> list[Any]:
    """The parameter groups of Megatron-FSDP's version 2; empty for any other wrapper."""
    modules: Iterable[Any] = getattr(chunk, "modules", tuple)()
    return [group for module in modules for group in getattr(module, "_parameter_groups", ())]


def parts_of(chunks: Iterable[torch.nn.Module]) -> dict[torch.nn.Parameter, WeightPart]:
    """This rank's part of each sharded parameter."""
    parts: dict[torch.nn.Parameter, WeightPart] = {}
    for chunk in chunks:
        buffers, groups = _buffers_of(chunk), groups_of(chunk)
        for buffer in buffers:
            parts.update(_in_buckets(buffer))
        for group in groups:
            parts.update(_in_group(group))
        for parameter in chunk.parameters() if not buffers and not groups else ():
            if (rows := rows_of(parameter)) is not None:
                parts[parameter] = WeightPart(local(parameter), rows, local(parameter), rows)
    return parts


def _in_group(group: Any) -> Iterator[tuple[torch.nn.Parameter, WeightPart]]:
    """Those of version 2."""
    for item, parameter in enumerate(group.fsdp_parameters):
        buckets = group.main_weight, group.model_weight
        stepped, weights = (_in_local(bucket, item) for bucket in buckets)
        yield parameter.sharded, WeightPart(*stepped, *weights)


def _in_local(bucket: Any, item: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """This rank's elements of a parameter in a bucket of version 2, and their range."""
    owned = bucket._get_owned_range(item)
    if owned is None:
        return bucket.local_buffer[:0], (0, 0)
    at, start = owned.buffer_relative_offset, owned.tensor_relative_offset
    return bucket.local_buffer[at : at + owned.numel], (start, start + owned.numel)


def _in_buckets(buffer: Any) -> Iterator[tuple[torch.nn.Parameter, WeightPart]]:
    """Those of version 1."""
    sharded = {id(p.orig_param): p for _, p in buffer.optimizer_named_parameters}
    for group in buffer.parameter_groups:
        weights = group.model_weight_buffer
        main = group.main_weight_buffer or weights
        is_divided = bool(weights and weights.is_data_distributed)
        for item, raw in enumerate(group.params):
            stepped = _in_bucket(main, item, raw, shard=weights is not None)
            computed = _in_bucket(weights, item, raw, shard=is_divided)
            yield sharded[id(raw)], WeightPart(*stepped, *computed)


def _in_bucket(
    buffer: Any, item: int, raw: torch.nn.Parameter, *, shard: bool
) -> tuple[torch.Tensor, tuple[int, int]]:
    """A parameter's elements in a bucket, this rank's or all, and their range.

    Without a bucket (``no_shard`` has none for the model's weights) the raw parameter has them.
    """
    if buffer is None:
        return raw.detach().view(-1), (0, raw.numel())
    values = buffer.get_item(item, only_shard=shard).detach().view(-1)
    return values, range_of(buffer, item) if shard else (0, raw.numel())


def rows_of(parameter: torch.nn.Parameter) -> tuple[int, int] | None:
    """This rank's elements of a flattened parameter that torch's FSDP2 divides, else ``None``.

    Rows are divided as by ``torch.chunk``: all ranks but the last ones have equally many. Only
    since 0.19 does Megatron mark such parameters.
    """
    is_sharded = getattr(parameter, "_local_tensor", None) is not None
    if not is_sharded or hasattr(parameter, "orig_param"):
        return None
    mesh: Any = parameter.device_mesh  # type: ignore[attr-defined]
    rows, *columns = parameter.shape
    rows_per_rank = -(-rows // mesh.size())
    start = min(mesh.get_local_rank() * rows_per_rank, rows)
    width = math.prod(columns)
    return start * width, min(start + rows_per_rank, rows) * width


def range_of(buffer: Any, item: int) -> tuple[int, int]:
    """The elements of a parameter that are in this rank's shard of its bucket."""
    index = buffer.item_index_map[item]
    bucket, shard = buffer.bucket_index, buffer.shard_bucket_index
    part = FlatShard.of_bucket(
        index.global_data_index,
        index.size,
        bucket.size,
        shard.global_data_index // shard.size,
        bucket.size // shard.size,
    )
    return part.start, part.end


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor, flat; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None else part.detach().reshape(-1)


def like(sharded: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """This rank's flat ``values`` as a tensor that is sharded like ``sharded``."""
    if getattr(sharded, "_local_tensor", None) is None:
        return values
    made = torch.empty_like(sharded, dtype=values.dtype)
    made._local_tensor.view(-1).copy_(values)  # type: ignore[attr-defined]
    return made


def publish(chunks: Iterable[torch.nn.Module]) -> None:
    """Copy what the optimizer steps to what the model computes with, on all ranks."""
    for chunk in chunks:
        for group in groups_of(chunk):
            group.sync_model_weight_from_main_weight()
        for buffer in _buffers_of(chunk):
            buffer.copy_main_weights_to_model_weights()
            if buffer.ddp_config.fsdp_double_buffer:
                _gather_in_turn(chunk)
            else:
                chunk.start_param_sync(force_sync=True)  # type: ignore[operator]
            chunk.synchronize_param_gather()  # type: ignore[operator]


def _gather_in_turn(chunk: Any) -> None:
    """Gather all weights, as Megatron-FSDP does; a pool of buffers has no room for all at once."""
    wrapper = chunk.module
    wrapper._replace_param_with_raw_if_needed()
    pipeline = wrapper.all_gather_pipeline
    for number, group in enumerate(chunk.param_and_grad_buffer.parameter_groups):
        pipeline.async_bucket_gather(bucket_id=number, bwd=False)
        pipeline.wait_bucket_ready(number, False)
        if group.fsdp_unit_id is not None:
            pipeline.release_bucket(number, False)
