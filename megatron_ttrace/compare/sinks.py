# SPDX-License-Identifier: Apache-2.0
"""What is done with a candidate's captured tensor: it is compared at once.

The sink runs the steps in order: plan (planning.py), measure (device.py), store,
and, when isolating, replace (substituter.py). A perturbed replay of the reference is a candidate on
a mesh of one rank.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ttrace.compare.device import TURNED, compare, decided_only, read_back, with_share
from megatron_ttrace.compare.experts import Match, entry_of
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.planning import Planner, RankLayout
from megatron_ttrace.compare.routing import choice, left
from megatron_ttrace.compare.substituter import Perturb, Substituter, makers_of
from megatron_ttrace.compare.tolerance import SAFETY, Tolerances, epsilon
from megatron_ttrace.placement.plan import Known, Placements
from megatron_ttrace.placement.token_index import TokenIndex
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.captured import Place, Routed
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import FLOW, BufferIndex, Kind, RoutingIndex, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter

_DEFAULT = Budget()

_KEEP_DTYPE = (*FLOW, Kind.LOSS)
"""Kinds of tensors whose dtype no layout changes."""

MOST_SKETCHES = 4096
"""Failing tensors of a rank that are examined for being summands: a bound on what a rank sends."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Staged:
    """The number of a finding, and what to store if it fails; ``first`` is its other name."""

    number: int
    data: torch.Tensor
    match: Match | None = None
    first: TraceKey | None = None


@dataclasses.dataclass
class _Keeper:
    """Stores what one rank found, for explanations and for ``ttrace compare``.

    These are the tensors that failed by ``tolerances``; with ``keep_all`` the others too; nothing
    without a ``writer``. ``factor`` is the expected candidate/reference ratio of a tensor.
    ``is_early``: the tolerances are not known yet.
    """

    writer: TraceWriter | None
    tolerances: Tolerances | None
    factor: Callable[[TraceKey], float]
    keep_all: bool
    is_early: bool = False
    kept: dict[TraceKey, int] = dataclasses.field(default_factory=dict)

    def is_decided(self, measured: Measured) -> bool:
        """Whether it is known if a tensor is stored: not before its sums, and the tolerances."""
        if self.writer is None:
            return True
        if self.tolerances is not None:
            return measured.unread is None
        return not self.is_early or measured.problem is not None or measured.is_equal

    def keep(
        self, measured: Measured, data: torch.Tensor, same_as: int | None = None
    ) -> int | None:
        """Store a tensor if it is worth it.

        ``same_as`` is its line if it was stored already, for another piece of it; returned is its
        line, if it is stored.
        """
        if measured.problem:
            if self.keep_all:
                misfit = measured.note.text if measured.note else ""
                self._add(measured, data, data, misfit=misfit)
            return same_as
        suspect = (
            not measured.partial_over  # a partial sum alone proves nothing
            and self.tolerances is not None
            and fails(measured.sums, self.tolerances, measured.key)
        )
        if self.writer is None or not (self.keep_all or suspect):
            return same_as
        if same_as is not None:
            self._add(measured, data, None, same_as=same_as)
            return same_as
        self.kept[measured.key] = self._add(measured, data, data)
        return self.kept[measured.key]

    def keep_again(self, first: TraceKey, measured: Measured, data: torch.Tensor) -> None:
        """Store another name of ``first``, if that was stored."""
        if first in self.kept:
            self._add(measured, data, None, same_as=self.kept[first])

    def keep_sums(self, measured: Measured) -> None:
        """Store a finding that no stored tensor would give again."""
        if self.keep_all and measured.sums is not None:
            self._add(measured, torch.empty(0), None, sums=dataclasses.astuple(measured.sums))

    def _add(
        self, measured: Measured, like: torch.Tensor, data: torch.Tensor | None, **more: Any
    ) -> int:
        """Write a line about a tensor ``like`` this, with its data if given."""
        if self.writer is None:
            return -1
        return self.writer.add(entry_of(measured, like, self.factor(measured.key), **more), data)


class CompareSink:
    """Compares each tensor of one iteration at once with this rank's part of the reference."""

    def __init__(
        self,
        reference: TraceReader,
        iteration: int,
        layout: RankLayout,
        *,
        tolerances: Tolerances | None = None,
        writer: TraceWriter | None = None,
        keep_all: bool = False,
        isolate: bool = False,
        perturb: Perturb | None = None,
        same_code: bool = False,
        gradients: str = "",
        budget: Budget = _DEFAULT,
        early: bool = False,
    ) -> None:
        """Prepare a comparison.

        Args:
            reference: the trusted trace.
            iteration: of the traced step.
            layout: of this rank.
            tolerances: show which tensors failed.
            writer: stores the failed ones, so that they can be explained.
            keep_all: store all of them.
            isolate: replace what was compared by the reference's values.
            perturb: changes these first, in a replay that estimates tolerances.
            same_code: the reference runs the same code, so that each tensor has its dtype.
            gradients: the dtype in which the settings let main gradients be kept; empty if they
                leave it open, as Megatron-FSDP's may.
            budget: bounds the copies that wait on a device for their verdicts; beyond that the host
                waits for the device.
            early: the tolerances are given later, with :meth:`judge_by`; the caller knows that
                there is memory for copies of all tensors that are not equal.
        """
        self._measured: list[Measured] = []
        self._staged: list[_Staged] = []
        self._staged_bytes, self._most_staged = 0, budget.staged
        self._sketches = 0
        self._reference = reference
        self._tolerances = tolerances
        self._iteration = iteration
        self._isolate = isolate
        self._same_code, self._gradients = same_code, gradients
        self._by_key: dict[TraceKey, Measured] = {}
        self._again: list[Measured] = []
        self._planner = Planner(reference, iteration, layout)
        self._substituter = Substituter(reference, self._planner, perturb)
        self._keeper = _Keeper(writer, tolerances, self._planner.factor, keep_all, early)

    def _compare(
        self,
        key: TraceKey,
        data: torch.Tensor,
        known: Known | None = None,
    ) -> None:
        """Everything that is done with a tensor under one of its names."""
        # 1. Transpose it as the reference has it.
        data = self._planner.oriented(key, data)
        kept: int | None = None
        staged: torch.Tensor | None = None
        # 2. Plan: which parts of the reference must it equal?
        for match in self._planner.plan(key, tuple(data.shape), known):
            # 3. Measure how far it is from them.
            if isinstance(match, Match) and (why := self._coarser(match.key, data.dtype)):
                measured = Measured.misfit(match.key, match.logical_shape, why, Remark.DTYPE)
            elif isinstance(match, Match):
                measured = self._shared(compare(self._reference, match, data), match, data)
            else:
                measured = match
            # 4. Record it, for the judge.
            self._add(measured)
            # 5. Store what failed, once that is known.
            if self._keeper.is_decided(measured):
                kept = self._keeper.keep(measured, data, kept)
            else:
                staged = data.detach().clone() if staged is None else staged
                planned = match if isinstance(match, Match) else None
                self._stage(_Staged(len(self._measured) - 1, staged, planned))
        # 6. Capture then asks for a replacement, with replace().

    def _coarser(self, key: TraceKey, dtype: torch.dtype) -> str:
        """How a dtype is coarser than that of the reference; empty if it is not.

        Its rounding may be within the tolerance, which is estimated for the whole model's dtype.
        """
        if not self._same_code:
            return ""
        theirs = allowed = self._reference.entry(key).dtype
        if key.kind is Kind.MAIN_GRAD:
            allowed = self._gradients and max(theirs, self._gradients, key=epsilon)
        elif key.kind not in _KEEP_DTYPE:
            allowed = ""
        if not (allowed and 0.0 < epsilon(allowed) < epsilon(dtype)):
            return ""
        return f"{str(dtype).removeprefix('torch.')}, in the reference {theirs}"

    def judge_by(self, tolerances: Tolerances) -> None:
        """Go on with tolerances that were not known before."""
        self._tolerances = self._keeper.tolerances = tolerances

    @property
    def measured(self) -> list[Measured]:
        """All findings. Waits for a device that still has sums of them."""
        self._settle()
        return self._measured

    def _stage(self, staged: _Staged) -> None:
        self._staged.append(staged)
        self._staged_bytes += staged.data.nbytes if staged.first is None else 0
        if self._staged_bytes > self._most_staged and self._tolerances is not None:
            self._settle()

    def _settle(self) -> None:
        """Read what was left on the device, and store what failed, in the order of capture."""
        self._measured = read_back(self._measured)
        self._by_key = {measured.key: measured for measured in self._measured}
        kept: int | None = None
        of: torch.Tensor | None = None
        for staged in self._staged:
            measured = self._measured[staged.number]
            if staged.first is not None:
                sketch = self._by_key[staged.first].sketch
                self._measured[staged.number] = dataclasses.replace(measured, sketch=sketch)
                self._keeper.keep_again(staged.first, measured, staged.data)
                continue
            if staged.match is not None:
                measured = self._shared(measured, staged.match, staged.data)
                self._measured[staged.number] = self._by_key[measured.key] = measured
            same_as = kept if staged.data is of else None
            kept, of = self._keeper.keep(measured, staged.data, same_as), staged.data
        self._staged, self._staged_bytes = [], 0
        self._take_again()

    def _take_again(self) -> None:
        """What was right at first and wrong later counts as wrong."""
        again, self._again = read_back(self._again), []
        if (limits := self._tolerances) is None:
            return
        wrong = {other.key: other for other in again if fails(other.sums, limits, other.key)}
        for number, measured in enumerate(self._measured if wrong else ()):
            other = wrong.get(measured.key)
            if other is not None and not fails(measured.sums, limits, measured.key):
                self._measured[number] = self._by_key[other.key] = other

    def _shared(self, measured: Measured, match: Match, data: torch.Tensor) -> Measured:
        """The finding with what the judge needs if it is a summand; a device has it later."""
        unread = measured.unread is not None
        if self._tolerances is None or unread or self._sketches == MOST_SKETCHES:
            return measured
        whole = self._reference.data(match.key)
        measured = decided_only(measured, match, data, self._reference, self._tolerances)
        shared = with_share(measured, match, data, whole, self._tolerances)
        self._sketches += shared is not measured
        return shared

    def _add(self, measured: Measured) -> None:
        self._measured.append(measured)
        self._by_key[measured.key] = measured

    def tensor(self, places: Sequence[Place], data: torch.Tensor) -> None:
        """Compare an activation or its gradient under each of its names."""
        keys = [TraceKey(self._iteration, *place) for place in places]
        if self._isolate:
            makers = makers_of(keys)
            for key, place in zip(keys, places, strict=True):
                instead = None if key in makers else self.replace(place, data)
                self._compare(key, data if instead is None else instead)
            return
        self._compare(keys[0], data)
        for place in places[1:]:
            self.repeat(places[0], place, data)

    def repeat(self, first: Place, place: Place, data: torch.Tensor) -> None:
        """Take another name of a tensor that was compared already."""
        earlier, key = TraceKey(self._iteration, *first), TraceKey(self._iteration, *place)
        known = self._by_key.get(earlier)
        same = (
            not self._planner.experts.holds(key)
            and not self._isolate  # when isolating, it has the reference's values by now
            and known is not None
            and known.sums is not None
            and key in self._reference
            and self._reference.primary(earlier) == self._reference.primary(key)
            and self._planner.blocks(earlier) == self._planner.blocks(key)
        )
        if not same or known is None:
            self._compare(key, data)
            return
        measured = dataclasses.replace(known, key=key)
        self._add(measured)
        if self._keeper.is_decided(measured):
            self._keeper.keep_again(earlier, measured, data)
        else:
            self._stage(_Staged(len(self._measured) - 1, data.detach(), first=earlier))

    def again(
        self,
        place: Place,
        data: torch.Tensor,
        why: Remark,
        known: Known | None = None,
    ) -> None:
        """Compare what a tensor is when it is used again; nothing of it is stored."""
        key = TraceKey(self._iteration, *place)
        first = self._by_key.get(key)
        if first is None or first.sums is None or first.partial_over:
            return
        if self._tolerances is None and not self._keeper.is_early:
            return
        data = self._planner.oriented(key, data)
        for match in self._planner.plan(key, tuple(data.shape), known):
            if isinstance(match, Match):
                measured = compare(self._reference, match, data)
                self._again.append(dataclasses.replace(measured, note=Note(why)))

    def replace(self, place: Place, data: torch.Tensor) -> torch.Tensor | None:
        """When isolating: this rank's part of the reference, unless ``data`` equals it."""
        if not self._isolate:
            return None
        return self._substituter.instead(TraceKey(self._iteration, *place), data)

    def placed(
        self, place: Place, data: torch.Tensor, logical_shape: Sequence[int], placement: Placements
    ) -> None:
        """Compare a tensor whose placement is known: a parameter, or of a parameter's shape.

        When isolating, the step continues with the reference's main gradients. They are written in
        place, where the optimizer reads them.
        """
        key = TraceKey(self._iteration, *place)
        settled = self._either_way(key, data)
        self._compare(key, data if settled is None else settled, (tuple(logical_shape), placement))
        measured = self._by_key[key]
        if settled is not None:
            note = Note(Remark.AT_THE_MEAN, int((settled != data).sum()), len(data))
            self._measured[-1] = self._by_key[key] = dataclasses.replace(measured, note=note)
        if self._gives(key.kind) and measured.sums is not None:
            self._substituter.fill(data.detach(), key, measured.boxes)
            data.detach().mul_(self._planner.factor(key))

    def _either_way(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor | None:
        """A router's bias after the step, as the reference's where either direction may be right.

        It moves by the sign of what an expert's load is below the mean. Where tokens are counted in
        16 bits, these are equal within rounding; a bias that moved the other way is two steps off.
        ``None`` if that decides nothing.
        """
        if key.kind is not Kind.BUFFER or key.index != BufferIndex.AFTER:
            return None
        keys = [dataclasses.replace(key, index=index) for index in BufferIndex]
        if not all(each in self._reference for each in keys):
            return None
        theirs, load, before = (self._reference.data(each).to(data.device) for each in keys)
        if load.itemsize > 2 or theirs.shape != data.shape:
            return None
        even = (load.double() - 1.0).abs() <= SAFETY * epsilon(load.dtype) / 2
        even &= (data - theirs).abs() <= TURNED * (theirs - before).abs().max()
        mixed = torch.where(even, theirs, data)
        return None if torch.equal(mixed, data) else mixed

    def _gives(self, kind: Kind) -> bool:
        """Whether the optimizer gets the reference's main gradients."""
        return self._isolate and kind is Kind.MAIN_GRAD

    def positions(self, microbatch: int, local: tuple[int, int]) -> torch.Tensor:
        """Positions of this rank's tokens in their microbatch."""
        return self._planner.positions(microbatch, local)

    def dispatched(self, microbatch: int, experts: str, index: TokenIndex) -> None:
        """Take which tokens a layer's experts are about to receive, and compare that."""
        is_new = (microbatch, experts) not in self._planner.experts
        for measured in self._planner.experts.announce(microbatch, experts, index):
            if is_new:
                self._add(measured)
                self._keeper.keep_sums(measured)

    def routed(self, microbatch: int, router: str, routed: Routed) -> torch.Tensor | None:
        """Compare a router's choice of experts; returns the reference's, which replaces it."""
        key = TraceKey(self._iteration, microbatch, Kind.ROUTING, router, RoutingIndex.CHOICE)
        if key not in self._reference:
            return None
        of_run = dataclasses.replace(key, name=routed.of(router))
        if routed.run is not None and of_run in self._reference:
            self._judge_choice(of_run, routed)
        match = self._planner.activation(key, tuple(routed.chosen.shape))
        return self._substituter.chosen(match, routed.chosen)

    def _judge_choice(self, key: TraceKey, routed: Routed) -> None:
        """Compare what a run of a router chose, in the forward pass and in its recomputation."""
        chosen = routed.chosen
        match = self._planner.activation(key, tuple(chosen.shape))
        scores = dataclasses.replace(key, index=RoutingIndex.SCORES)
        is_first = scores not in self._by_key
        if is_first:
            self._compare(scores, routed.scores)
        if routed.by is None or tuple(chosen.shape) == match.logical_shape:
            sums, others = choice(routed, self._substituter.chosen(match, chosen))
            if is_first:
                self._chose(match, sums, Remark.ROUTED, others, len(chosen))
            else:
                self._again.append(match.measured(sums, Note(Remark.RECOMPUTED)))

    def kept(
        self, microbatch: int, router: str, probabilities: torch.Tensor, kept: torch.Tensor
    ) -> torch.Tensor | None:
        """Judge what is left of a choice; what is left in the reference takes its place."""
        key = TraceKey(self._iteration, microbatch, Kind.ROUTING, router, RoutingIndex.KEPT)
        if key not in self._reference:
            return None
        match = self._planner.activation(key, tuple(kept.shape))
        theirs = self._substituter.chosen(match, kept)
        if key not in self._by_key and tuple(kept.shape) == match.logical_shape:
            sums, others = left(probabilities, kept, theirs)
            self._chose(match, sums, Remark.DROPPED, others)
        return theirs

    def _chose(self, match: Match, sums: Sums, remark: Remark, others: int, limit: int = 0) -> None:
        measured = match.measured(sums, Note(remark, others, limit) if others else None)
        self._add(measured)
        self._keeper.keep_sums(measured)
