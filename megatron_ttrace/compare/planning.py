# SPDX-License-Identifier: Apache-2.0
"""Which parts of which reference tensors a candidate's tensor must equal: from names and shapes."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import torch

from megatron_ttrace.compare.experts import ExpertRows, Match
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.mcore.roles import is_beyond, is_within_experts
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.infer import (
    NoPlacementError,
    infer_activation,
    infer_buffer,
    infer_head_rows,
)
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import (
    Known,
    Placements,
    copies,
    describe,
    describe_partial,
    plan,
)
from megatron_ttrace.placement.token_index import TokenIndex, ends_of, token_positions
from megatron_ttrace.trace.captured import Partials
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import ROOT, Kind, TraceKey
from megatron_ttrace.trace.store import TraceReader

REDUCED_OVER = "tp"
"""The axis along which ranks compute summands of an activation."""


@dataclasses.dataclass(frozen=True)
class RankLayout:
    """What the comparison must know of the candidate's configuration.

    Attributes:
        gradient_factor: expected candidate/reference ratio of activation gradients: each
            microbatch's loss is divided by the number of microbatches of *its* rank, and by the
            tokens its context-parallel rank sees.
        stacked: modules whose output stacks blocks in its last dim, as of :class:`BlockShard`.
        head_rows: modules that see one row per token and head, and the whole number of heads.
        loss_scale: the candidate's loss scale relative to the reference's.
        dispatcher: Megatron's ``--moe-token-dispatcher-type``; empty without experts.
        sequence_first: modules that return [sequence, batch, hidden] here and
            [batch, sequence, hidden] in the reference: the vocabulary-parallel embedding, where it
            reduce-scatters to sequence-parallel ranks (megatron/core/tensor_parallel/layers.py).
        bounds: names of the batch's tensor that has the ends of packed sequences, where context
            parallelism divides these one by one; else empty. The first that there is counts.
    """

    mesh: Mesh
    seq_length: int
    gradient_factor: float
    sequence_first: frozenset[str] = frozenset()
    stacked: Mapping[str, int | tuple[int, ...]] = dataclasses.field(default_factory=dict)
    head_rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
    loss_scale: float = 1.0
    dispatcher: str = ""
    partials: Partials = dataclasses.field(default_factory=dict)
    bounds: tuple[str, ...] = ()


class _Planned(NamedTuple):
    steps: Placements
    words: str
    boxes: tuple[Box, ...]


class Placer:
    """Plans which part of a logical tensor a rank's activation is, from shapes and names alone."""

    def __init__(self, layout: RankLayout) -> None:
        self._layout = layout
        self._planned: dict[object, _Planned] = {}

    def place(
        self,
        key: TraceKey,
        local: tuple[int, ...],
        whole: tuple[int, ...],
        length: int = 0,
        ends: tuple[int, ...] = (),
    ) -> Match:
        """The place of an activation of shape ``local``, or of its gradient.

        ``length`` is that of the sequence dim, where samples may have another one than the job's,
        ``ends`` are those of packed sequences that are divided one by one.

        Raises:
            NoPlacementError: when the shape fits no layout.
        """
        blocks, layout, module = self.blocks(key), self._layout, module_of(key.name)
        heads = layout.head_rows.get(module, 0)

        def infer() -> Placements:
            if heads:
                return infer_head_rows(local, whole, heads, layout.mesh)
            tokens = length or layout.seq_length
            return infer_activation(
                local, whole, layout.mesh, seq_length=tokens, blocks=blocks, ends=ends
            )

        planned = self._plan((local, whole, blocks, heads, length, ends), infer, whole)
        axis = layout.partials.get((key.kind, module, key.index), "")
        ranks = copies(planned.steps, axis, layout.mesh) if axis else 1
        partial_over = axis if ranks > 1 else ""
        return Match(
            key=key,
            placement=describe_partial(planned.words, partial_over),
            boxes=planned.boxes,
            logical_shape=whole,
            factor=self.factor(key),
            partial_over=partial_over,
            partial_ranks=ranks,
            copies=copies(planned.steps, REDUCED_OVER, layout.mesh),
        )

    def placed(self, key: TraceKey, whole: tuple[int, ...], placement: Placements) -> Match:
        """The place of a tensor whose placement is known."""
        planned = self._plan(("placed", whole, placement), lambda: placement, whole)
        return Match(key, planned.words, planned.boxes, whole, self.factor(key))

    def oriented(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor:
        """``data`` with its dims in the order in which one device has them."""
        turned = module_of(key.name) in self._layout.sequence_first and key.kind in (
            Kind.OUTPUT,
            Kind.GRAD_OUTPUT,
        )
        return data.transpose(0, 1) if turned else data

    def factor(self, key: TraceKey) -> float:
        """Expected candidate/reference ratio."""
        if key.kind in (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT):
            return self._layout.gradient_factor * self._layout.loss_scale
        return self._layout.loss_scale if key.kind is Kind.MAIN_GRAD else 1.0

    def blocks(self, key: TraceKey) -> int | tuple[int, ...]:
        """The blocks that are stacked in a tensor's last dim; 1 if none are."""
        if key.kind not in (Kind.OUTPUT, Kind.GRAD_OUTPUT):
            return 1
        return self._layout.stacked.get(module_of(key.name), 1)

    def _plan(
        self, memo: object, placement: Callable[[], Placements], whole: tuple[int, ...]
    ) -> _Planned:
        """Planning is pure, so each combination of shapes is planned only once, and described."""
        if memo not in self._planned:
            steps = placement()
            boxes = plan(whole, steps, self._layout.mesh)
            self._planned[memo] = _Planned(steps, describe(steps), boxes)
        return self._planned[memo]


class Planner(Placer):
    """Plans the comparisons of one iteration on one rank."""

    def __init__(self, reference: TraceReader, iteration: int, layout: RankLayout) -> None:
        super().__init__(layout)
        self.experts = ExpertRows(
            iteration,
            layout.mesh,
            functools.cache(self._rows),
            lambda key, *_: reference.shape(key),
        )
        self._reference = reference
        self._iteration = iteration
        self._samples_of = functools.cache(self._read_samples)

    def plan(
        self,
        key: TraceKey,
        local: tuple[int, ...],
        known: Known | None = None,
    ) -> list[Match | Measured]:
        """What a tensor of shape ``local`` is compared with; empty where nothing is known.

        The dims of ``local`` are in the reference's order; what is ``known`` need not be inferred.
        Of a tensor that cannot be compared, the finding that says so is returned.
        """
        whole = self._reference.shape(key)
        try:
            if self.experts.holds(key):
                return self.rows(key, local)
            if is_beyond(key, self._layout.mesh, self._layout.dispatcher):
                return []
            if whole is None:
                return [Measured.stranger(key, local)]
            if known is not None and known[0] == whole:
                return [self.placed(key, *known)]
            if known is not None and key.kind is Kind.BUFFER:
                in_experts = is_within_experts(key.name)
                steps = infer_buffer(local, whole, self._layout.mesh, in_experts=in_experts)
                return [self.placed(key, whole, steps)]
            if known is not None:
                raise NoPlacementError(f"the whole tensor is {known[0]}, in the reference {whole}")
            return [self.place(key, local, whole, *self._samples_of(key.microbatch))]
        except ValueError as error:
            return [Measured.misfit(key, local if known is None else known[0], str(error))]

    def rows(self, key: TraceKey, local: tuple[int, ...]) -> list[Match | Measured]:
        """The parts of an experts' tensor. Raises as :meth:`ExpertRows.parts` does."""
        return self.experts.parts(key, local, self.blocks(key), factor=self.factor(key))

    def _rows(self, key: TraceKey) -> TokenIndex | None:
        """Which tokens the reference's rows of some experts are."""
        if key not in self._reference:
            return None
        position, expert = self._reference.data(key).numpy().T
        microbatch = np.full(len(position), key.microbatch, dtype=np.int64)
        return TokenIndex(microbatch, position, expert)

    def activation(self, key: TraceKey, local: tuple[int, ...]) -> Match:
        """The place of an activation that the reference has. Raises as :meth:`place` does."""
        whole = self._reference.entry(key).shape
        return self.place(key, local, whole, *self._samples_of(key.microbatch))

    def _read_samples(self, microbatch: int) -> tuple[int, tuple[int, ...]]:
        """The length of a microbatch's samples, and where its packed sequences end.

        That is if they are divided one by one.
        """
        names = self._layout.bounds
        keys = [TraceKey(self._iteration, microbatch, Kind.TOKENS, name) for name in names]
        key = next((key for key in keys if key in self._reference), None)
        # A row may be all there is, without a dim for it.
        ends = ends_of(torch.atleast_2d(self._reference.data(key)).tolist() if key else ())
        given = TraceKey(self._iteration, microbatch, Kind.INPUT, ROOT)
        shape = self._reference.shape(given) or ()
        length = shape[1] if len(shape) == 2 else self._layout.seq_length
        return ends[-1] if ends else length, ends

    def positions(self, microbatch: int, local: tuple[int, int]) -> torch.Tensor:
        """Positions of this rank's tokens in their microbatch."""
        samples = self._samples_of(microbatch)
        return torch.from_numpy(token_positions(local, self._layout.mesh, *samples))

    def oriented(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor:
        """``data`` with its dims in the reference's order, where it has this tensor."""
        return super().oriented(key, data) if key in self._reference else data
