# SPDX-License-Identifier: Apache-2.0
"""What the hooks on one model chunk remember during a traced step."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.records import ROOT

OnGradient = Callable[[torch.Tensor], torch.Tensor | None]
"""Called with a complete gradient; what it returns, if anything, goes on in its place."""


_received: Counter[int] = Counter()
"""How often collectives of traced steps wrote into each storage."""


def receive(tensors: Iterable[torch.Tensor]) -> None:
    """Collectives do not count what they write, in the tensor's version."""
    _received.update(_storage(tensor) for tensor in tensors)


def version_of(tensor: torch.Tensor) -> int:
    """A number that grows where a tensor is modified in place."""
    return tensor._version + (_received[_storage(tensor)] if _received else 0)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0


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
        forward, backward: this rank's number of the microbatch in either direction.
        running: the layers that run now, the outermost first.
        aside: a pass without gradients is under way, which belongs to no microbatch.
        seen, seen_again: tensors of the forward pass, and of its recomputation.
        again: what the microbatch's recomputation, if it makes a graph, has seen.
        runs: when a module ran without a graph in the forward pass (how many nodes were made until
            then), and under which name.
        followed: what requires a gradient.
        run: which of its runs in the microbatch a module is in, or was last; ``None`` if a
            recomputation does not tell.
        views: tensors that an identity made of another one, which stands for them.
        entering: leaves whose gradient a schedule plan completes
            (:mod:`megatron_ttrace.capture.schedule_plan`).
    """

    def __init__(self) -> None:
        self.forward = -1
        self.backward = -1
        self.running: list[str] = []
        self.aside = False
        self.seen = WeakTensorKeyDictionary()
        self.seen_again = WeakTensorKeyDictionary()
        self.emitted: set[Place] = set()
        self.again: set[Place] = set()
        self.runs: defaultdict[Place, list[tuple[int, Place]]] = defaultdict(list)
        self.followed: set[Place] = set()
        self.run: dict[str, int | None] = {}
        self.views = WeakTensorKeyDictionary()
        self.entering = WeakTensorKeyDictionary()

    @property
    def current(self) -> int:
        """This rank's number of the microbatch being worked on, recomputation included."""
        return self.backward if is_recomputing() else self.forward

    @property
    def layer(self) -> str:
        """The innermost layer that runs; the model if none does."""
        return self.running[-1] if self.running else ROOT

    def begins(self) -> int:
        """Begin the next microbatch's forward pass; returns its number."""
        self.forward += 1
        self.seen = WeakTensorKeyDictionary()
        return self.forward

    def leaves(self, layer: str) -> None:
        """A layer has run, or has raised an error."""
        if self.layer == layer:
            self.running.pop()

    def goes_back(self, local: int) -> None:
        """The backward pass works on this microbatch from here on."""
        if self.backward != local:
            self.backward = local
            self.seen_again = WeakTensorKeyDictionary()
            self.again = set()

    def ran(self, place: Place, numbered: Place) -> None:
        """A module ran in the forward pass, under this name; without a graph it runs again."""
        if not torch.is_grad_enabled():
            self.runs[place].append((torch._C._autograd._get_sequence_nr(), numbered))

    def recomputed(self, place: Place) -> list[Place]:
        """The names of the runs of a module that may be recomputed now, the likeliest first.

        A backward pass recomputes the last checkpoint first. The node of a checkpoint was made
        before what runs in it, the node whose hook starts a recomputation
        (``CheckpointWithoutOutput`` of megatron/core/tensor_parallel/random.py) after it, when all
        later runs are done.
        """
        node: Any = torch._C._current_autograd_node()
        made = 0 if node is None else node._sequence_nr()
        runs = self.runs[place]
        later = [name for nodes, name in runs if nodes > made]
        return later + [name for nodes, name in reversed(runs) if nodes <= made]


def is_recomputing() -> bool:
    """Whether this forward pass runs inside a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)
