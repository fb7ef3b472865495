# SPDX-License-Identifier: Apache-2.0
"""The rows that experts get: tokens routed at random and dispatched as Megatron does."""

import dataclasses

import numpy as np

from megatron_ttrace.placement.mesh import AXES, Mesh
from megatron_ttrace.placement.token_index import TokenIndex, token_positions
from tests.placement.proof import knowing
from tests.placement.trillion import PER_RANK, SAMPLES, SEQUENCE, TOP_K, Job


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """One layer's dispatch within one group of expert-parallel ranks.

    Attributes:
        there: the reference's rows of each microbatch.
        here: the rows of each expert-parallel rank; expert-tensor ranks have the same.
    """

    there: dict[int, TokenIndex]
    here: dict[int, TokenIndex]


def _index(parts: list[tuple[int, np.ndarray, int]]) -> TokenIndex:
    """From (microbatch, positions, expert), in order."""
    sizes = [len(positions) for _, positions, _ in parts]
    return TokenIndex(
        np.repeat([microbatch for microbatch, _, _ in parts], sizes).astype(np.int64),
        np.concatenate([positions for _, positions, _ in parts]),
        np.repeat([expert for _, _, expert in parts], sizes).astype(np.int64),
    )


def dispatch(job: Job, *, edp: int, ranks: range | None = None, seed: int = 7) -> Dispatch:
    """Route the microbatches of a group's ranks; one per data-parallel rank.

    Args:
        job: whose ranks are numbered so that a group has whole microbatches.
        edp: the group's coordinate.
        ranks: the expert-parallel ranks whose rows are wanted; all by default.
        seed: of the routing.
    """
    sources = job.at(pp=0, edp=edp)
    axes = {axis: sources[:, AXES.index(axis)] for axis in AXES}
    microbatches = [int(number) for number in np.unique(axes["dp"])]
    assert len(sources) == len(microbatches) * job.tp * job.cp == job.ep * job.etp
    mesh: Mesh = job.mesh(0)
    local = SEQUENCE // (job.cp * job.tp), SAMPLES
    tokens = SEQUENCE * SAMPLES
    random = np.random.default_rng(seed)
    chosen = {}
    for microbatch in microbatches:
        best = np.argpartition(random.random((tokens, job.experts)), TOP_K)[:, :TOP_K]
        chosen[microbatch] = np.zeros((tokens, job.experts), dtype=bool)
        np.put_along_axis(chosen[microbatch], best, values=True, axis=1)
    there = {
        microbatch: _index(
            [(microbatch, np.flatnonzero(mine[:, e]), e) for e in range(job.experts)]
        )
        for microbatch, mine in chosen.items()
    }
    parts = []
    for tp, cp, dp in zip(axes["tp"], axes["cp"], axes["dp"], strict=True):
        at = knowing(mesh, tp=int(tp), cp=int(cp))
        parts.append((int(dp), token_positions(local, at, SEQUENCE)))
    here = {}
    for ep in range(job.ep) if ranks is None else ranks:
        here[ep] = _index(
            [
                (microbatch, positions[chosen[microbatch][positions, expert]], expert)
                for expert in range(ep * PER_RANK, (ep + 1) * PER_RANK)
                for microbatch, positions in parts
            ]
        )
    return Dispatch(there, here)
