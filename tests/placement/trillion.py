# SPDX-License-Identifier: Apache-2.0
"""A model of 1.03 trillion parameters in layouts of up to 16,384 ranks: shapes, no tensors.

The shape is that of Kimi K2 (``config.json`` of moonshotai/Kimi-K2-Instruct): latent attention, 61
layers of which the first is dense, 384 experts and one shared expert. Names and divided dims are
those that Megatron's layers have (megatron/core/transformer/multi_latent_attention.py,
megatron/core/transformer/moe). Stages, buckets and ranges of buckets come from Megatron's code.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import types
from collections.abc import Iterator

from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer, Range
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from megatron_ttrace.mcore.parameters import ParameterPlace, place_parameter
from megatron_ttrace.placement.mesh import Mesh
from tests.placement.meshes import DEFAULT_ORDER, mesh_of

HIDDEN, VOCABULARY, HEADS, TOP_K = 7168, 163_840, 64, 8
QUERY_RANK, LATENT_RANK, NO_ROPE, ROPE, VALUE = 1536, 512, 128, 64, 128
DENSE, EXPERT = 18_432, 2048
PER_RANK = 6
"""Experts of a rank: 384 on 64 ranks."""
SEQUENCE, SAMPLES = 4096, 1
"""The sequence is as long as the shared expert's gate and up projection, which could mislead."""

QUERIES, KEYS_VALUES = HEADS * (NO_ROPE + ROPE), HEADS * (NO_ROPE + VALUE)

Spec = tuple[str, tuple[int, ...], int | None]
"""Name, logical shape, and the dim that tensor parallelism divides."""

ATTENTION: list[Spec] = [
    ("input_layernorm.weight", (HIDDEN,), None),
    ("self_attention.linear_proj.weight", (HIDDEN, HEADS * VALUE), 1),
    ("self_attention.linear_q_down_proj.weight", (QUERY_RANK, HIDDEN), None),
    ("self_attention.linear_q_up_proj.weight", (QUERIES, QUERY_RANK), 0),
    ("self_attention.linear_kv_down_proj.weight", (LATENT_RANK + ROPE, HIDDEN), None),
    ("self_attention.linear_kv_up_proj.weight", (KEYS_VALUES, LATENT_RANK), 0),
    ("self_attention.q_layernorm.weight", (QUERY_RANK,), None),
    ("self_attention.kv_layernorm.weight", (LATENT_RANK,), None),
    ("pre_mlp_layernorm.weight", (HIDDEN,), None),
]


def mlp(name: str, size: int) -> list[Spec]:
    """A gated MLP."""
    return [
        (f"{name}.linear_fc1.weight", (2 * size, HIDDEN), 0),
        (f"{name}.linear_fc2.weight", (HIDDEN, size), 1),
    ]


@dataclasses.dataclass(eq=False)
class Local:
    """What is read of a rank's parameter, here and in Megatron's layout of buckets."""

    name: str
    whole: tuple[int, ...]
    shape: tuple[int, ...]
    partition_dim: int
    tensor_model_parallel: bool
    allreduce: bool

    @property
    def data(self) -> Local:
        """Its values, of which only the number is known."""
        return self

    def nelement(self) -> int:
        """Number of its elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What one virtual stage holds."""

    layers: tuple[int, ...]
    first: bool
    last: bool


@dataclasses.dataclass(frozen=True)
class Job:
    """A layout. ``4 * pp - 3`` layers on two virtual stages: 61 on 16 stages."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int = 1
    order: str = DEFAULT_ORDER

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def edp(self) -> int:
        """Number of replicas of an expert."""
        return self.world // (self.etp * self.ep * self.pp)

    @property
    def experts(self) -> int:
        """Number of experts in a layer."""
        return PER_RANK * self.ep

    @property
    def pipeline(self) -> str:
        """``--pipeline-model-parallel-layout``: uneven at both ends."""
        return f"Et|(tt|)*{2 * self.pp - 3}t|tL" if self.pp > 1 else "Et|ttL"

    def mesh(self, rank: int) -> Mesh:
        """The place of a rank."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp, "ep": self.ep, "etp": self.etp}
        return mesh_of(rank, self.world, **sizes, order=self.order)

    def group(self, edp: int) -> list[Mesh]:
        """The ranks of the first stage that send each other rows of experts."""
        meshes = map(self.mesh, range(self.world))
        return [mesh for mesh in meshes if (mesh.at("pp"), mesh.at("edp")) == (0, edp)]

    @functools.cached_property
    def chunks(self) -> dict[int, list[Chunk]]:
        """The virtual stages of each pipeline rank; layers are counted as Megatron runs them."""
        layout = PipelineParallelLayerLayout(self.pipeline, self.pp).layout
        chunks_by_stage: dict[int, list[Chunk]] = {stage: [] for stage in range(self.pp)}
        layer = 0
        for virtual in range(len(layout[0])):
            for stage in range(self.pp):
                kinds = layout[stage][virtual]
                count = kinds.count(LayerType.decoder)
                chunks_by_stage[stage].append(
                    Chunk(
                        tuple(range(layer, layer + count)),
                        LayerType.embedding in kinds,
                        LayerType.loss in kinds,
                    )
                )
                layer += count
        return chunks_by_stage

    def dense(self, chunk: Chunk) -> Iterator[Local]:
        """The parameters of a chunk that are not of experts, in the model's order."""
        specs: list[Spec] = []
        if chunk.first:
            specs.append(("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN), 0))
        for layer in chunk.layers:
            inner = mlp("mlp", DENSE) if layer == 0 else mlp("mlp.shared_experts", EXPERT)
            if layer:
                inner.append(("mlp.router.weight", (self.experts, HIDDEN), None))
            specs += [
                (f"decoder.layers.{layer}.{leaf}", *more) for leaf, *more in ATTENTION + inner
            ]
        if chunk.last:
            specs.append(("decoder.final_layernorm.weight", (HIDDEN,), None))
            specs.append(("output_layer.weight", (VOCABULARY, HIDDEN), 0))
        return (self._local(*spec, self.tp, allreduce=True) for spec in specs)

    def of_experts(self, chunk: Chunk, ep: int) -> Iterator[Local]:
        """The parameters of a chunk's experts on an expert-parallel rank."""
        for layer in chunk.layers:
            for name, shape, dim in mlp(f"decoder.layers.{layer}.mlp.experts", EXPERT):
                for expert in range(PER_RANK * ep, PER_RANK * (ep + 1)) if layer else ():
                    yield self._local(f"{name}{expert}", shape, dim, self.etp, allreduce=False)

    @staticmethod
    def _local(
        name: str, whole: tuple[int, ...], dim: int | None, size: int, *, allreduce: bool
    ) -> Local:
        shape = list(whole)
        if dim is not None:
            shape[dim] //= size
        divided = dim is not None and size > 1
        return Local(name, whole, tuple(shape), dim or 0, divided, allreduce)


def place(local: Local, mesh: Mesh) -> ParameterPlace:
    """As the package reads it; the logical shape is found again."""
    placed = place_parameter(local.name, local, mesh, stacked=2)  # type: ignore[arg-type]
    assert placed.logical_shape == local.whole, local.name
    return placed


@dataclasses.dataclass(frozen=True)
class Zero:
    """The distributed optimizer's division of one buffer of parameters, by Megatron's own code."""

    layout: object
    shards: int

    @classmethod
    def of(cls, parameters: list[Local], job: Job, shards: int) -> Zero:
        """Divide among ``shards`` ranks; the bucket size is the default of Megatron's DDP."""
        settings = types.SimpleNamespace(pad_buckets_for_high_nccl_busbw=False)
        size = max(40_000_000, 1_000_000 * job.dp * job.cp)
        made = DistributedOptimizer._compute_per_buffer_param_layout(
            parameters, size, shards, settings
        )
        return cls(made, shards)

    def ranges(self, shard: int) -> Iterator[tuple[Local, int, int]]:
        """The elements of each parameter that a rank of the data-parallel group owns."""
        index: dict[Local, tuple[int, int, int]] = self.layout.param_index_map  # type: ignore[attr-defined]
        buckets: list[tuple[int, int]] = self.layout.bucket_indices  # type: ignore[attr-defined]
        for number, (start, end) in enumerate(buckets):
            part = (end - start) // self.shards
            mine = Range(start + shard * part, start + (shard + 1) * part)
            inside = {local: where for local, where in index.items() if where[2] == number}
            owned = DistributedOptimizer._build_model_gbuf_param_range_map(inside, mine, start)
            for local, ranges in owned.items():
                yield local, ranges["param"].start, ranges["param"].end


Dim = tuple[int, tuple[str, ...]]
PARALLEL: Dim = (SEQUENCE, ("cp", "tp"))
WHOLE: Dim = (SEQUENCE, ("cp",))
ONE: Dim = (SAMPLES, ())


def plain(size: int) -> Dim:
    """A dim that no axis divides."""
    return size, ()


def split(size: int) -> Dim:
    """A dim that tensor parallelism divides."""
    return size, ("tp",)


def rows(size: int) -> tuple[Dim, ...]:
    """[sequence, batch, size], divided by sequence parallelism."""
    return PARALLEL, ONE, plain(size)


def columns(size: int) -> tuple[Dim, ...]:
    """[sequence, batch, size], divided by tensor parallelism."""
    return WHOLE, ONE, split(size)


Activation = tuple[str, str, tuple[Dim, ...], int]
"""Module, ``input`` or ``output``, dims, and the blocks stacked in the last one.

Gradients have the shapes of what they are gradients of.
"""


def linear(name: str, before: tuple[Dim, ...], after: tuple[Dim, ...]) -> list[Activation]:
    """Input and output of a layer."""
    gated = 2 if name.endswith("linear_fc1") else 1
    return [(name, "input", before, 1), (name, "output", after, gated)]


def activations(chunk: Chunk, job: Job) -> Iterator[Activation]:
    """All that is captured in a chunk for one microbatch, outside of experts."""
    tokens, hidden = (ONE, WHOLE), rows(HIDDEN)
    if chunk.first:
        yield from linear("embedding.word_embeddings", tokens, hidden)
    heads = (WHOLE, ONE, split(HEADS))
    latent, queries = rows(LATENT_RANK), rows(QUERY_RANK)
    attention = "self_attention"
    common = [
        *linear("input_layernorm", hidden, hidden),
        *linear(f"{attention}.linear_q_down_proj", hidden, queries),
        *linear(f"{attention}.q_layernorm", queries, queries),
        *linear(f"{attention}.linear_q_up_proj", queries, columns(QUERIES)),
        *linear(f"{attention}.linear_kv_down_proj", hidden, rows(LATENT_RANK + ROPE)),
        *linear(f"{attention}.kv_layernorm", latent, latent),
        *linear(f"{attention}.linear_kv_up_proj", latent, columns(KEYS_VALUES)),
        (f"{attention}.core_attention", "input", (*heads, plain(NO_ROPE + ROPE)), 1),
        (f"{attention}.core_attention", "input", (*heads, plain(VALUE)), 1),
        (f"{attention}.core_attention", "output", columns(HEADS * VALUE), 1),
        *linear(f"{attention}.linear_proj", columns(HEADS * VALUE), hidden),
        *linear("pre_mlp_layernorm", hidden, hidden),
    ]
    probabilities = ((SEQUENCE * SAMPLES, ("cp", "tp")), plain(job.experts))
    for layer in chunk.layers:
        mlp_name, size = ("mlp", DENSE) if layer == 0 else ("mlp.shared_experts", EXPERT)
        inner = [
            *linear(f"{mlp_name}.linear_fc1", hidden, columns(2 * size)),
            *linear(f"{mlp_name}.linear_fc2", columns(size), hidden),
            *(linear("mlp.router", hidden, probabilities) if layer else ()),
        ]
        for name, side, dims, blocks in common + inner:
            yield f"decoder.layers.{layer}.{name}", side, dims, blocks
    if chunk.last:
        yield from linear("decoder.final_layernorm", hidden, hidden)
        yield from linear("output_layer", hidden, columns(VOCABULARY))
        yield "loss", "output", tokens, 1
