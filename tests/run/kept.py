# SPDX-License-Identifier: Apache-2.0
"""Runs as ``ttrace record`` keeps them, made by hand."""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.moved import Moved, write_moves
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.meta import CandidateMeta, ReferenceMeta
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceWriter, seal
from tests.placement.meshes import mesh_of
from tests.trace.traces import written

EMBEDDING = TraceKey(1, STEP_LEVEL, Kind.PARAM, "embedding.word_embeddings.weight")
OUTPUT = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp")
GRADIENT = TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, "decoder.layers.0.mlp.linear_fc1.weight")


def tensors(seed: int = 0) -> dict[TraceKey, torch.Tensor]:
    """Two tensors of a step."""
    generator = torch.Generator().manual_seed(seed)
    return {key: torch.randn(4, 6, generator=generator) for key in (OUTPUT, GRADIENT)}


def run(
    home: Path,
    own: Mapping[TraceKey, torch.Tensor],
    reference: Mapping[TraceKey, torch.Tensor] | None = None,
    *,
    ranks: int = 2,
    moved: float = 1e-6,
    version: str = "0.19.2",
    microbatches: int = 1,
    samples: int = 2,
    seed: int = 1234,
    **config: object,
) -> Path:
    """A run of tensor-parallel ranks, which hold the rows of each tensor, and its reference.

    ``moved`` is how far the replays of the reference moved each tensor.
    """
    for rank in range(ranks):
        writer = TraceWriter(home / "candidate", rank)
        for key, data in own.items():
            rows = data.shape[0] // ranks
            box = Box((rank * rows, 0), (rows, data.shape[1]), (0, 0))
            local = data[rank * rows : (rank + 1) * rows].clone()
            shape = tuple(data.shape)
            writer.add(Entry.of(key, local, logical_shape=shape, boxes=(box,)), local)
        writer.close()
    meshes = tuple(mesh_of(rank, ranks, tp=ranks) for rank in range(ranks))
    described = RunConfig(iterations=(1,), **config).to_json()  # type: ignore[arg-type]
    meta = CandidateMeta(complete=True, meshes=meshes, config=described)
    seal(home / "candidate", meta.to_json())
    trusted = own if reference is None else reference
    written(home / "reference", trusted)
    sizes = {key: (data.numel(), float(data.norm())) for key, data in trusted.items()}
    moves = {key: Moved(*size, (moved,)) for key, size in sizes.items()}
    write_moves(home / "reference", moves)
    arguments = {"make_vocab_size_divisible_by": 256, "micro_batch_size": samples, "seed": seed}
    of_reference = ReferenceMeta(
        fingerprint=home.name,
        identity={
            "versions": {"megatron-core": version},
            "arguments": arguments,
            "ttrace": {"iterations": [1], "init": config.get("init", "")},
        },
        microbatches=microbatches,
        epsilon=2.0**-23,
    )
    seal(home / "reference", of_reference.to_json())
    return home
