# SPDX-License-Identifier: Apache-2.0
"""What a candidate's captured tensor is compared with: which parts of which reference tensors.

Planning looks at names and shapes only; no element of any tensor is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from megatron_ttrace.compare.experts import ExpertRows, Match, is_beyond
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.mcore.roles import is_first_of_gated
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.infer import NoPlacementError, infer_activation
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import Placements, describe, plan
from megatron_ttrace.placement.token_index import token_positions
from megatron_ttrace.trace.captured import Partials
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader

__all__ = ["Match", "Planner", "RankLayout"]


@dataclasses.dataclass(frozen=True)
class RankLayout:
    """What the comparison must know of the candidate's configuration.

    Attributes:
        mesh: this rank's place.
        seq_length: logical sequence length.
        gated: whether MLPs stack gate and up projection.
        gradient_factor: expected candidate/reference ratio of activation gradients: each
            microbatch's loss is divided by the number of microbatches of *its* rank, and by the
            tokens its context-parallel rank sees.
        dispatcher: Megatron's ``--moe-token-dispatcher-type``; empty without experts.
        partials: gradients of inputs that are partial over an axis.
        sequence_first: modules that hand out [sequence, batch, hidden] here and
            [batch, sequence, hidden] in the reference: the vocabulary-parallel embedding, where it
            reduce-scatters to sequence-parallel ranks (megatron/core/tensor_parallel/layers.py).
    """

    mesh: Mesh
    seq_length: int
    gated: bool
    gradient_factor: float
    sequence_first: frozenset[str] = frozenset()
    dispatcher: str = ""
    partials: Partials = dataclasses.field(default_factory=dict)


class Planner:
    """Plans the comparisons of one iteration on one rank."""

    def __init__(self, reference: TraceReader, iteration: int, layout: RankLayout) -> None:
        self.experts = ExpertRows(reference, iteration, layout.mesh)
        self._reference = reference
        self._layout = layout
        self._planned: dict[object, tuple[Placements, tuple[Box, ...]]] = {}

    def plan(
        self,
        key: TraceKey,
        local: tuple[int, ...],
        known: tuple[tuple[int, ...], Placements] | None = None,
    ) -> list[Match | Measured]:
        """What a tensor of shape ``local`` is compared with; empty where nothing can be said.

        Args:
            key: its name.
            local: its shape, with the dims in the reference's order.
            known: logical shape and placement, where these need not be inferred.

        Returns:
            Its parts; for one that cannot be compared, the finding that says so.
        """
        whole = self._reference.entry(key).shape if key in self._reference else local
        try:
            if self.experts.holds(key):
                return self.rows(key, local)
            if is_beyond(key, self._layout.mesh, self._layout.dispatcher):
                return []
            if key not in self._reference:
                return [Measured.stranger(key, local)]
            if known is not None:
                return [self._parameter(key, whole, *known)]
            return [self.activation(key, local)]
        except ValueError as error:
            return [Measured.misfit(key, whole, str(error))]

    def rows(self, key: TraceKey, local: tuple[int, ...]) -> list[Match | Measured]:
        """An experts' tensor: parts of several microbatches' tensors.

        Raises:
            NoPlacementError: when rows or columns do not fit.
        """
        return self.experts.parts(key, local, gated=self.is_gated(key), factor=self.factor(key))

    def activation(self, key: TraceKey, local: tuple[int, ...]) -> Match:
        """A tensor that the reference has, whose placement follows from its shape.

        Raises:
            NoPlacementError: when the shape fits no layout.
        """
        whole, gated, layout = self._reference.entry(key).shape, self.is_gated(key), self._layout
        placement, boxes = self._plan(
            (local, whole, gated),
            lambda: infer_activation(
                local, whole, layout.mesh, seq_length=layout.seq_length, gated=gated
            ),
            whole,
        )
        axis = self._partial_over(key)
        words = describe(placement, axis)
        ranks = layout.mesh.size(axis) if axis else 1
        return Match(key, words, boxes, whole, self.factor(key), axis, ranks)

    def _parameter(
        self,
        key: TraceKey,
        whole: tuple[int, ...],
        shape: tuple[int, ...],
        placement: Placements,
    ) -> Match:
        if shape != whole:
            raise NoPlacementError(f"the whole tensor is {shape}, in the reference {whole}")
        _, boxes = self._plan(("placed", whole, placement), lambda: placement, whole)
        return Match(key, describe(placement), boxes, whole, self.factor(key))

    def positions(self, local: tuple[int, int]) -> torch.Tensor:
        """Where this rank's tokens stand in their microbatch."""
        return torch.from_numpy(token_positions(local, self._layout.mesh, self._layout.seq_length))

    def factor(self, key: TraceKey) -> float:
        """Expected candidate/reference ratio."""
        return (
            self._layout.gradient_factor if key.kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT) else 1.0
        )

    def _partial_over(self, key: TraceKey) -> str:
        """The axis over which this tensor is partial; empty if it is not."""
        if key.kind is not Kind.GRAD_INPUT:
            return ""
        axis = self._layout.partials.get((key.name.partition("#")[0], key.index))
        return axis if axis and self._layout.mesh.size(axis) > 1 else ""

    def oriented(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor:
        """``data`` with its dims in the reference's order."""
        turned = (
            key.name.partition("#")[0] in self._layout.sequence_first
            and key.kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT)
            and key in self._reference
        )
        return data.transpose(0, 1) if turned else data

    def is_gated(self, key: TraceKey) -> bool:
        """Whether this is gate and up projection, side by side."""
        return (
            self._layout.gated
            and key.kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT)
            and is_first_of_gated(key.name.split("#")[0])
        )

    def _plan(
        self, memo: object, placement: Callable[[], Placements], whole: tuple[int, ...]
    ) -> tuple[Placements, tuple[Box, ...]]:
        """Planning is pure, so each combination of shapes is planned once."""
        if memo not in self._planned:
            steps = placement()
            self._planned[memo] = steps, plan(whole, steps, self._layout.mesh)
        return self._planned[memo]
