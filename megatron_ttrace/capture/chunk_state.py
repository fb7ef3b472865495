# SPDX-License-Identifier: Apache-2.0
"""What the hooks on one model chunk remember during a traced step."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_ttrace.trace.captured import Place

OnGradient = Callable[[torch.Tensor], torch.Tensor | None]
"""Called with a complete gradient; what it returns, if anything, goes on in its place."""


@dataclasses.dataclass
class Seen:
    """A tensor of the forward pass and the names under which it was seen.

    ``node`` is the graph node that made it, on which its gradient hook sits.
    """

    version: int
    places: list[Place]
    node: Any


class ChunkState:
    """Which microbatch a model chunk is working on.

    Schedules run the microbatches of a chunk in ascending order, forward and backward
    (megatron/core/pipeline_parallel/schedules.py), and interleave chunks and directions freely.

    Attributes:
        repeated: modules that run for the first time in another chunk.
        forward, backward: this rank's number of the microbatch in either direction.
        seen, seen_again: tensors of the forward pass, and of its recomputation.
        emitted: everything that was handed over.
        again: what the microbatch's recomputation, if it makes a graph, has seen.
        followed: what requires a gradient.
        views: tensors that an identity made of another one, which stands for them.
        entering: leaves whose gradient a schedule plan completes
            (:mod:`megatron_ttrace.capture.schedule_plan`).
    """

    def __init__(self, repeated: frozenset[str] = frozenset()) -> None:
        self.repeated = repeated
        self.forward = -1
        self.backward = -1
        self.seen = WeakTensorKeyDictionary()
        self.seen_again = WeakTensorKeyDictionary()
        self.emitted: set[Place] = set()
        self.again: set[Place] = set()
        self.followed: set[Place] = set()
        self.views = WeakTensorKeyDictionary()
        self.entering = WeakTensorKeyDictionary()

    @property
    def current(self) -> int:
        """This rank's number of the microbatch being worked on, recomputation included."""
        return self.backward if is_recomputing() else self.forward

    def begins(self) -> int:
        """Begin the next microbatch's forward pass; returns its number."""
        self.forward += 1
        self.seen = WeakTensorKeyDictionary()
        return self.forward

    def goes_back(self, local: int) -> None:
        """The backward pass works on this microbatch from here on."""
        if self.backward != local:
            self.backward = local
            self.seen_again = WeakTensorKeyDictionary()
            self.again = set()


def is_recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
