# SPDX-License-Identifier: Apache-2.0
"""The rows that experts get: tokens routed at random and dispatched as Megatron does."""

import dataclasses
import functools

import numpy as np

from megatron_ttrace.placement.token_index import TokenIndex, token_positions
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


@functools.cache
def dispatch(job: Job, edp: int) -> Dispatch:
    """Route the microbatches of a group's ranks; one per data-parallel rank.

    Args:
        job: whose ranks are numbered so that a group has whole microbatches.
        edp: the group's coordinate.
    """
    sources = job.group(edp)
    microbatches = sorted({mesh.at("dp") for mesh in sources})
    assert len(sources) == len(microbatches) * job.tp * job.cp == job.ep * job.etp
    tokens = SEQUENCE * SAMPLES
    random = np.random.default_rng(7)
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
    local = SEQUENCE // (job.cp * job.tp), SAMPLES
    parts = [(mesh.at("dp"), token_positions(local, mesh, SEQUENCE)) for mesh in sources]
    here = {
        ep: _index(
            [
                (microbatch, positions[chosen[microbatch][positions, expert]], expert)
                for expert in range(ep * PER_RANK, (ep + 1) * PER_RANK)
                for microbatch, positions in parts
            ]
        )
        for ep in range(job.ep)
    }
    return Dispatch(there, here)
