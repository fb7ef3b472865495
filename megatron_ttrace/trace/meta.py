# SPDX-License-Identifier: Apache-2.0
"""The meta data in ``meta.json`` of a reference or a candidate, besides its run and its files."""

import dataclasses
from typing import Annotated, Any

from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.codec import Bounds, Count, Record, Size
from megatron_ttrace.trace.collectives import UNRECORDED, Ledger, Numbers


@dataclasses.dataclass(frozen=True, slots=True)
class Unverified:
    """What of a start was not compared with its checkpoint.

    Attributes:
        why: one device did not load the weights; empty if it did.
        unread: no stored tensor was read; empty if any could be.
        weights: names of weights that are neither stored nor loaded by one device.
        states: names of parameters whose optimizer state is not stored by parameter.
    """

    why: str = ""
    unread: str = ""
    weights: tuple[str, ...] = ()
    states: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceMeta(Record):
    """Of a reference.

    Attributes:
        fingerprint: digest of ``identity``.
        identity: the arguments, data and versions that decide which runs it fits.
        modules: digest and file of the modules beside the script that were imported in the end.
        reads: digest, or size and time, of other files that it read.
        counted: what went into norms, counts and updates (``trace/counted.py``).
        logs: whether Megatron's log was found, and with it what it prints.
        layout: of a reference on several ranks.
        loaded: what was not compared with the checkpoint, in a run that loads one.
        by_module: whether replays gave each module its own inputs.
        epsilon: of the compute dtype; 0 if it is not known.
        numbers: that functions were given and returned, of a reference on one rank.
        in_blocks: matrices that it steps in the blocks that its candidate's ranks hold.
        lines: of the functions that ran there: bits in hexadecimal digits, from the first line on.
    """

    role: str = "reference"
    fingerprint: str = ""
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)
    modules: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    reads: dict[str, str] = dataclasses.field(default_factory=dict)
    microbatches: Count = 1
    loss_scales: dict[str, float] = dataclasses.field(default_factory=dict)
    counted: tuple[Any, ...] = ()
    logs: bool = False
    seconds: Size | None = None
    layout: dict[str, Count] | None = None
    loaded: Unverified | None = None
    fp8: bool = False
    by_module: bool = False
    epsilon: Annotated[float, Bounds(0.0, 0.5)] = 0.0
    numbers: Numbers = dataclasses.field(default_factory=dict)
    lines: dict[str, str] = dataclasses.field(default_factory=dict)
    in_blocks: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CandidateMeta(Record):
    """Of a candidate.

    Attributes:
        complete: whether it has all tensors, and not only those that failed.
        meshes: of its ranks; empty if these are not known.
        counted: as of :class:`ReferenceMeta`, by rank.
        config: of the run (``compare/configuration.py: RunConfig``).
    """

    role: str = "candidate"
    complete: bool = False
    meshes: tuple[Mesh, ...] = ()
    counted: tuple[Any, ...] = ()
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    ledger: Ledger = UNRECORDED

    def contradiction(self) -> str:
        """Why no job has such ranks; empty if one can."""
        for rank, mesh in enumerate(self.meshes):
            if reason := _contradiction(mesh, rank, len(self.meshes)):
                return f"meshes[{rank}]: {reason}"
        return ""


def _contradiction(mesh: Mesh, rank: int, world_size: int) -> str:
    if mesh.rank != rank or mesh.world_size != world_size:
        return f"expected rank {rank} of {world_size}"
    if any(not 1 <= size <= world_size for size in mesh.sizes) or mesh.vpp < 1:
        return f"expected sizes from 1 to {world_size}"
    inside = all(0 <= at < size for at, size in zip(mesh.coordinates, mesh.sizes, strict=True))
    return "" if inside else "a coordinate is outside of its axis"
