# SPDX-License-Identifier: Apache-2.0
"""What becomes of a candidate's captured tensor: it is compared in place.

A perturbed replay of the reference is simply a candidate on a mesh of one. The reference itself is
written (megatron_ttrace/compare/writing.py), driven by the same capture.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch

from megatron_ttrace.compare.experts import ExpertRows, is_beyond
from megatron_ttrace.compare.measure import Sums, box_views, measure
from megatron_ttrace.compare.moments import Moments
from megatron_ttrace.compare.routing import Groups, choice
from megatron_ttrace.compare.sketch import sketch_of_share
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.mcore.roles import is_first_of_gated
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.infer import NoPlacementError, infer_activation
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.partial import describe_summand
from megatron_ttrace.placement.plan import Placement, describe, plan
from megatron_ttrace.placement.token_index import TokenIndex, token_positions
from megatron_ttrace.trace.captured import Place, Summands
from megatron_ttrace.trace.records import CHOICE, SCORES, STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter

GRADIENT_KINDS = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """What one rank found out about one of its tensors.

    ``problem`` is empty, ``extra`` (the reference has no such tensor) or ``shape``; ``note`` says
    more. ``sums`` is ``None`` when nothing could be measured. ``sketch``, if any, says that the
    tensor is a summand over the mesh axis ``partial_over``: what adds up to the reference are the
    sketches of all ranks with the same boxes (megatron_ttrace/compare/sketch.py). ``moments``, of
    initial values only, are what is judged in their place (megatron_ttrace/compare/initial.py).
    """

    key: TraceKey
    placement: str
    boxes: tuple[Box, ...]
    logical_shape: tuple[int, ...]
    sums: Sums | None
    problem: str = ""
    note: str = ""
    sketch: tuple[float, ...] = ()
    moments: Moments | None = None
    partial_over: str = ""


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the comparison must know of the candidate's configuration.

    Attributes:
        mesh: this rank's place.
        seq_length: logical sequence length.
        gated: whether MLPs stack gate and up projection.
        gradient_factor: expected candidate/reference ratio of activation gradients: each
            microbatch's loss is divided by the number of microbatches of *its* rank, and by the
            tokens its context-parallel rank sees.
        dispatcher: Megatron's ``--moe-token-dispatcher-type``; empty without experts.
        summands: gradients of inputs that the ranks of an axis hold summands of.
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
    summands: Summands = dataclasses.field(default_factory=dict)


class CompareSink:
    """Compares everything, on the spot, with this rank's slices of the reference."""

    def __init__(
        self,
        reference: TraceReader,
        iteration: int,
        layout: Layout,
        *,
        tolerances: Tolerances | None = None,
        writer: TraceWriter | None = None,
        keep_all: bool = False,
        isolate: bool = False,
        wobble: Callable[[TraceKey, torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        """Prepare a comparison.

        Args:
            reference: the trusted trace.
            iteration: of the traced step.
            layout: of this rank.
            tolerances: to tell which tensors are worth keeping.
            writer: where tensors are kept: the failed ones, so that they can be explained.
            keep_all: keep the others too.
            isolate: hand the reference's slices back, to take the places of what was compared.
            wobble: what is done to them first, in a replay that estimates tolerances.
        """
        self.measured: list[Measured] = []
        self._reference = reference
        self._iteration = iteration
        self._layout = layout
        self._tolerances = tolerances
        self._writer = writer
        self._keep_all = keep_all
        self._isolate = isolate
        self._wobble = wobble
        self._by_key: dict[TraceKey, Measured] = {}
        self._kept: dict[TraceKey, int] = {}
        self._planned: dict[object, tuple[Placement, tuple[Box, ...]]] = {}
        self._experts = ExpertRows(reference, iteration, layout.mesh)

    def tensor(self, places: Sequence[Place], data: torch.Tensor) -> None:
        """Compare an activation or its gradient under each of its names."""
        keys = [TraceKey(self._iteration, *place) for place in places]
        if self._isolate:
            makers = _makers(keys)
            for key, place in zip(keys, places, strict=True):
                instead = None if key in makers else self.replace(place, data)
                self._compare(key, data if instead is None else instead)
            return
        self._compare(keys[0], data)
        for key in keys[1:]:
            self._repeat(keys[0], key, data)

    def repeat(self, first: Place, place: Place, data: torch.Tensor) -> None:
        """Another name of a tensor that was compared already."""
        self._repeat(TraceKey(self._iteration, *first), TraceKey(self._iteration, *place), data)

    def replace(self, place: Place, data: torch.Tensor) -> torch.Tensor | None:
        """This rank's slice of the reference, when isolating and where ``data`` is not that.

        Of what belongs to the whole step only scalars have a slice here.
        """
        key = TraceKey(self._iteration, *place)
        replaceable = data.is_floating_point() or data.dtype == torch.bool
        if not self._isolate or not replaceable:
            return None
        if self._experts.holds(key):
            return self._replace_rows(key, data)
        if key not in self._reference:
            return None
        entry = self._reference.entry(key)
        if key.microbatch == STEP_LEVEL and not entry.shape:
            return self._reference.tensor(entry).clone()
        instead = torch.empty_like(data)
        oriented = self._oriented(key, instead)
        try:
            _, boxes = self._plan_activation(key, tuple(oriented.shape), entry.shape)
        except ValueError:
            return None
        if sum(box.numel for box in boxes) != data.numel():
            return None
        for here, there in box_views(oriented, self._reference.tensor(entry), boxes):
            here.copy_(there)
        axis = self._summand_over(key)
        share = self._factor(key) / (self._layout.mesh.size(axis) if axis else 1)
        if share != 1.0:
            instead.mul_(share)
        return self._substitute(key, instead, data)

    def _substitute(
        self, key: TraceKey, instead: torch.Tensor, data: torch.Tensor
    ) -> torch.Tensor | None:
        """The reference's values; ``None`` where they are no others."""
        if self._wobble is not None and instead.is_floating_point():
            instead = self._wobble(key, instead)
        return None if torch.equal(instead, data) else instead

    def placed(
        self, place: Place, data: torch.Tensor, logical_shape: Sequence[int], placement: Placement
    ) -> None:
        """Compare a tensor of the step (a parameter's kin), whose placement is known.

        When isolating, the step goes on with the reference's main gradients: written in place, for
        that is where the optimizer looks for them.
        """
        key = TraceKey(self._iteration, *place)
        shape = tuple(logical_shape)

        def planned(whole: tuple[int, ...]) -> tuple[Placement, tuple[Box, ...]]:
            if shape != whole:
                raise NoPlacementError(f"the whole tensor is {shape}, in the reference {whole}")
            return self._plan(("placed", whole, placement), lambda: placement, whole)

        self._compare(key, data, planned)
        found = self._by_key[key]
        if self._isolate and key.kind is Kind.MAIN_GRAD and found.sums is not None:
            there = self._reference.tensor(self._reference.entry(key))
            for own, its in box_views(data.detach(), there, found.boxes):
                own.copy_(its)

    def positions(self, local: tuple[int, int]) -> torch.Tensor:
        """Where this rank's tokens stand in their microbatch."""
        return torch.from_numpy(token_positions(local, self._layout.mesh, self._layout.seq_length))

    def dispatched(self, microbatch: int, experts: str, index: TokenIndex) -> None:
        """Learn who the rows are that a layer's experts are about to see, and judge that."""
        is_new = (microbatch, experts) not in self._experts
        for piece, sums in self._experts.announce(microbatch, experts, index):
            if is_new:
                self._add_sums(
                    Measured(piece.key, piece.placement, piece.boxes, piece.logical_shape, sums)
                )

    def routed(
        self,
        microbatch: int,
        router: str,
        scores: torch.Tensor,
        chosen: torch.Tensor,
        groups: Groups | None,
    ) -> torch.Tensor | None:
        """Judge a router's choice; the reference's takes its place."""
        key = TraceKey(self._iteration, microbatch, Kind.ROUTING, router, CHOICE)
        if key not in self._reference:
            return None
        entry = self._reference.entry(key)
        placement, boxes = self._plan_activation(key, tuple(chosen.shape), entry.shape)
        theirs = torch.empty_like(chosen)
        for here, there in box_views(theirs, self._reference.tensor(entry), boxes):
            here.copy_(there)
        if key not in self._by_key:
            self._compare(dataclasses.replace(key, index=SCORES), scores)
            sums, others = choice(scores, chosen, theirs, groups)
            note = f"{others} of {len(chosen)} tokens routed otherwise" if others else ""
            self._add_sums(Measured(key, describe(placement), boxes, entry.shape, sums, note=note))
        return theirs

    def _compare_rows(self, key: TraceKey, data: torch.Tensor) -> None:
        """Compare an experts' tensor with its pieces of several microbatches' tensors."""
        shape = tuple(data.shape)
        try:
            pieces = self._experts.pieces(key, shape, gated=self._is_gated(key))
        except ValueError as error:
            there = self._reference.entry(key).shape if key in self._reference else shape
            self._misfit(Measured(key, "", (), there, None, "shape", str(error)), data)
            return
        kept: int | None = None
        for piece in pieces:
            if piece.key not in self._reference:
                note = "not in the reference"
                self._misfit(Measured(piece.key, "", (), shape, None, "extra", note), data)
                continue
            whole = self._reference.tensor(self._reference.entry(piece.key))
            factor = self._factor(key)
            sums = measure(data, whole, piece.boxes, factor)
            share: tuple[float, ...] = ()
            if piece.is_summand:
                share = sketch_of_share(
                    data, whole, piece.boxes, factor, self._layout.mesh.size("etp")
                )
            found = Measured(
                piece.key,
                piece.placement,
                piece.boxes,
                piece.logical_shape,
                sums,
                sketch=share,
                partial_over=piece.partial_over,
            )
            self._add(found)
            kept = self._keep(found, data, kept)

    def _replace_rows(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor | None:
        """An experts' tensor with the reference's rows; of a summand, with an equal share each."""
        instead = data.detach().clone()
        try:
            pieces = self._experts.pieces(key, tuple(data.shape), gated=self._is_gated(key))
        except ValueError:
            return None
        for piece in pieces:
            if piece.key not in self._reference:
                continue
            whole = self._reference.tensor(self._reference.entry(piece.key))
            share = self._factor(key) / (self._layout.mesh.size("etp") if piece.is_summand else 1)
            for here, there in box_views(instead, whole, piece.boxes):
                here.copy_(there)
                if share != 1.0:
                    here.mul_(share)
        return self._substitute(key, instead, data)

    def _compare(
        self,
        key: TraceKey,
        data: torch.Tensor,
        planned: Callable[[tuple[int, ...]], tuple[Placement, tuple[Box, ...]]] | None = None,
    ) -> None:
        if self._experts.holds(key):
            self._compare_rows(key, data)
            return
        if is_beyond(key, self._layout.mesh, self._layout.dispatcher):
            return
        if key not in self._reference:
            note = "not in the reference"
            self._misfit(Measured(key, "", (), tuple(data.shape), None, "extra", note), data)
            return
        entry = self._reference.entry(key)
        data = self._oriented(key, data)
        try:
            if planned is not None:
                placement, boxes = planned(entry.shape)
            else:
                placement, boxes = self._plan_activation(key, tuple(data.shape), entry.shape)
        except ValueError as error:
            self._misfit(Measured(key, "", (), entry.shape, None, "shape", str(error)), data)
            return
        whole = self._reference.tensor(entry)
        factor = self._factor(key)
        found = Measured(
            key, describe(placement), boxes, entry.shape, measure(data, whole, boxes, factor)
        )
        axis = self._summand_over(key)
        if axis:
            found = dataclasses.replace(
                found,
                placement=describe_summand(found.placement, axis),
                partial_over=axis,
                sketch=sketch_of_share(data, whole, boxes, factor, self._layout.mesh.size(axis)),
            )
        self._add(found)
        self._keep(found, data)

    def _repeat(self, first: TraceKey, key: TraceKey, data: torch.Tensor) -> None:
        known = self._by_key.get(first)
        same = (
            not self._experts.holds(key)
            and not self._isolate  # else it has the reference's values by now
            and known is not None
            and known.sums is not None
            and key in self._reference
            and self._reference.primary(first) == self._reference.primary(key)
            and self._is_gated(first) == self._is_gated(key)
        )
        if not same or known is None:
            self._compare(key, data)
            return
        self._add(dataclasses.replace(known, key=key))
        if first in self._kept and self._writer is not None:
            entry = self._entry(self._by_key[key], data)
            self._writer.add(dataclasses.replace(entry, same_as=self._kept[first]), None)

    def _add(self, found: Measured) -> None:
        self.measured.append(found)
        self._by_key[found.key] = found

    def _add_sums(self, found: Measured) -> None:
        """A finding that no stored tensor would give again."""
        self._add(found)
        if self._keep_all and self._writer is not None and found.sums is not None:
            sums = dataclasses.astuple(found.sums)
            entry = self._entry(found, torch.empty(0))
            self._writer.add(dataclasses.replace(entry, sums=sums), None)

    def _misfit(self, found: Measured, data: torch.Tensor) -> None:
        self._add(found)
        if self._keep_all and self._writer is not None:
            entry = dataclasses.replace(self._entry(found, data), misfit=found.note)
            self._writer.add(entry, data)

    def _keep(self, found: Measured, data: torch.Tensor, same_as: int | None = None) -> int | None:
        """Store a failed tensor; ``same_as`` is its line if it was stored for another piece."""
        if self._writer is None:
            return same_as
        suspect = (
            not found.sketch  # a summand alone proves nothing
            and self._tolerances is not None
            and fails(found.sums, self._tolerances, found.key)
        )
        if not self._keep_all and not suspect:
            return same_as
        entry = self._entry(found, data)
        if same_as is None:
            self._kept[found.key] = self._writer.add(entry, data)
            return self._kept[found.key]
        self._writer.add(dataclasses.replace(entry, same_as=same_as), None)
        return same_as

    def _entry(self, found: Measured, data: torch.Tensor) -> Entry:
        return Entry(
            key=found.key,
            shape=tuple(data.shape),
            dtype=str(data.dtype).removeprefix("torch."),
            logical_shape=found.logical_shape,
            placement=found.placement,
            boxes=found.boxes,
            partial_over=found.partial_over,
            factor=self._factor(found.key),
        )

    def _factor(self, key: TraceKey) -> float:
        return self._layout.gradient_factor if key.kind in GRADIENT_KINDS else 1.0

    def _summand_over(self, key: TraceKey) -> str | None:
        """The axis whose ranks each have a summand of this tensor; ``None`` for all others."""
        if key.kind is not Kind.GRAD_INPUT:
            return None
        axis = self._layout.summands.get((key.name.partition("#")[0], key.index))
        return axis if axis and self._layout.mesh.size(axis) > 1 else None

    def _oriented(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor:
        """``data`` with its dims in the reference's order."""
        turned = key.name.partition("#")[0] in self._layout.sequence_first and key.kind in (
            Kind.OUTPUT,
            Kind.GRAD_OUTPUT,
        )
        return data.transpose(0, 1) if turned else data

    def _is_gated(self, key: TraceKey) -> bool:
        return (
            self._layout.gated
            and key.kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT)
            and is_first_of_gated(key.name.split("#")[0])
        )

    def _plan_activation(
        self, key: TraceKey, local: tuple[int, ...], whole: tuple[int, ...]
    ) -> tuple[Placement, tuple[Box, ...]]:
        gated = self._is_gated(key)
        return self._plan(
            (local, whole, gated),
            lambda: infer_activation(
                local,
                whole,
                self._layout.mesh,
                seq_length=self._layout.seq_length,
                gated=gated,
            ),
            whole,
        )

    def _plan(
        self, memo: object, placement: Callable[[], Placement], whole: tuple[int, ...]
    ) -> tuple[Placement, tuple[Box, ...]]:
        """Planning is pure, so each combination of shapes is planned once."""
        if memo not in self._planned:
            steps = placement()
            self._planned[memo] = steps, plan(whole, steps, self._layout.mesh)
        return self._planned[memo]


def _makers(keys: Sequence[TraceKey]) -> list[TraceKey]:
    """Of the names of one gradient those of the modules that computed it: the innermost takers.

    The gradient of a tensor is made by the modules that it enters, not by the one that it left, nor
    by what contains those, nor by one that hands on what it was given (dropout that is off).
    """
    left = {key.name for key in keys if key.kind is Kind.GRAD_OUTPUT}
    entered = [key for key in keys if key.kind is Kind.GRAD_INPUT and key.name not in left]
    return [
        key for key in entered if not any(o.name.startswith(f"{key.name}.") for o in entered)
    ] or list(keys)


def rank_error(sums: Sums, rms: float) -> float:
    """The relative error of one rank's part of a tensor.

    ``rms(c - r over the part) / max(rms(r over the part), rms(r over the whole tensor))``. For a
    part that is the whole tensor this is ``||c - r|| / ||r||``. For a smaller part, dividing by the
    part's own size finds a wrong shard however many ranks there are, and a part that happens to be
    nearly zero is not judged against itself. Sums that are no numbers are an infinite error.
    """
    if sums.n == 0 or sums.diff == 0.0:
        return 0.0
    scale = max(math.sqrt(sums.reference / sums.n), rms)
    error = math.sqrt(sums.diff / sums.n) / scale if scale else math.inf
    return math.inf if math.isnan(error) else error


def fails(sums: Sums | None, tolerances: Tolerances, key: TraceKey) -> bool:
    """Whether one rank's part alone is beyond the tolerance."""
    if sums is None:
        return False
    tolerance = tolerances.of(key)
    return sums.nonfinite > 0 or rank_error(sums, tolerance.rms) > tolerance.value
