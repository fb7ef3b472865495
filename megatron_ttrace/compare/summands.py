# SPDX-License-Identifier: Apache-2.0
"""Summands that are added up later, outside of the module that computes them.

Some layers reduce late: each tensor-parallel rank computes a summand of an activation, or of a
gradient, and code outside of the module adds them up. Those that Megatron has are known by name
(mcore/partials.py); in a fork, what is computed from such a tensor tells it from a missing
reduction. It is *partial by design* if

- the ranks' values add up to the reference (compare/sketch.py), within the tensor's own tolerance;
- the nearest container whose own tensor is not such a summand passes, and is not blind: all its
  outputs, or for a gradient all its input gradients;
- nothing else fails inside that container, and main gradients of its parameters pass;
- a summand of the forward pass has a gradient, which passes: the loss depends on it;
- the container would fail without the reduction. To first order its error would be the tensor's
  error times the gain between the two. In the forward pass the gain is known: the backward pass is
  its transpose, and the reference has both gradients. In the backward pass it is taken to be one;
- where collectives were recorded, a sum over these ranks ran in the container.

So a missing reduction diverges: its container fails, or does not notice, or was not compared.

In the forward pass a summand is *handed on* if the container's own code, not a module in it, ran
such a sum, and nothing else in it failed until then. If the container fails then, the fault is
there; gradients may fail for other reasons.

The gradient of a module without input gradients, such as a learned factor, reaches nothing but its
parameters, whose main gradients are judged: there it is enough that the ranks' values add up.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from megatron_ttrace.compare.gathered import Holding
from megatron_ttrace.compare.judge import summed, verdict_of
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.planning import REDUCED_OVER
from megatron_ttrace.compare.tolerance import PartError, Tolerances
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import describe_partial
from megatron_ttrace.trace.collectives import Ledger, Phase
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import around, is_within, module_of
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import FLOW, ROOT, Direction, Kind, Outcome, TraceKey

GRADIENT = {Kind.OUTPUT: Kind.GRAD_OUTPUT, Kind.INPUT: Kind.GRAD_INPUT}
WRONG = (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT)
EVIDENT = 2.0
"""How many times its tolerance the error of a container would be without the reduction."""

_COMPUTED = (Direction.FORWARD, Direction.BACKWARD)

_Place = tuple[int, int, Kind, str]


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What all ranks measured, by tensor, and the verdicts on it."""

    verdicts: Sequence[Judged]
    holders: Mapping[TraceKey, Sequence[Holding]]
    tolerances: Tolerances
    eps: float

    def ranks(self, key: TraceKey) -> list[int]:
        """That have a tensor."""
        return sorted(rank for held in self.holders.get(key, ()) for rank in held.ranks)

    def sums(self, key: TraceKey) -> Iterator[Sums]:
        """Those of a tensor's holders that are numbers."""
        for held in self.holders.get(key, ()):
            if (sums := held.measured.sums) and not (sums.nonfinite or sums.undefined):
                yield sums

    def elements(self, key: TraceKey) -> dict[int, float]:
        """How many elements of a tensor each rank has; of joined parts the mean."""
        found: dict[int, float] = defaultdict(float)
        for held in self.holders.get(key, ()):
            total = held.copies * sum(box.numel for box in held.measured.boxes)
            for rank in held.ranks:
                found[rank] += total / len(held.ranks)
        return found

    def right(self, failure: Judged, error: PartError, why: Note, placement: str) -> Judged:
        """The verdict with another error, which is within the tolerance, unless that is blind."""
        tolerance = self.tolerances.of(failure.key)
        blind = [Note(Reason.BLIND, tolerance.value, tolerance.bound)] * tolerance.blind
        return verdict_of(
            failure.key,
            failure.shape,
            Outcome.UNCHECKED if blind else Outcome.PASS,
            self.ranks(failure.key),
            *(why, *blind),
            reason=Reason.BLIND if blind else None,
            placement=placement,
            error=error.error,
            tolerance=error.tolerance,
            eps=self.eps,
        )


class Partial:
    """Which failures are summands that something else adds up."""

    def __init__(self, run: Run, mesh: Mesh, ledger: Ledger) -> None:
        self._run = run
        self._tolerances = run.tolerances
        self._ranks = mesh.size(REDUCED_OVER) * mesh.size("cp")
        self._ledger = ledger
        self._by_key = {v.key: v for v in run.verdicts}
        self._is_sound = functools.cache(self._has_no_fault)
        self._places: dict[_Place, list[Judged]] = defaultdict(list)
        self._trained = [v for v in run.verdicts if v.kind is Kind.MAIN_GRAD]
        flow = [v for v in run.verdicts if v.kind in FLOW]
        for v in flow:
            self._places[v.iteration, v.microbatch, v.kind, module_of(v.name)].append(v)
        self._sums = {
            v.key: error for v in flow if v.verdict in WRONG and (error := self._sum(v)) is not None
        }

    def instead(self, failure: Judged) -> Judged | None:
        """The verdict on the sum of the ranks' values; ``None`` if a fault may be behind them."""
        error, reached = self._sums.get(failure.key), self._reached(failure)
        if error is None or not (reached or self._is_harmless(failure)):
            return None
        if reached and all(v.verdict is Outcome.UNCHECKED for v in reached):
            reason, notes = reached[0].reason, reached[0].notes
            unseen = Outcome.UNCHECKED
            return dataclasses.replace(failure, verdict=unseen, reason=reason, notes=notes)
        placement = describe_partial(failure.placement, REDUCED_OVER)
        return self._run.right(failure, error, Note(Remark.PARTIAL, text=REDUCED_OVER), placement)

    def _sum(self, failure: Judged) -> PartError | None:
        """The relative error of the ranks' sum, if it is one that passes."""
        holders = self._run.holders[failure.key]
        tolerance = self._tolerances.of(failure.key)
        parts = [
            (held, sums)
            for held in holders
            if held.measured.sketch
            and (sums := held.measured.sums)
            and not (sums.nonfinite or sums.undefined)
        ]
        complete = len(parts) == len(holders) and sum(h.copies for h in holders) == self._ranks
        if not complete or (tolerance.blind and not self._reached(failure)):
            return None
        worst = max(tolerance.error_of(sums) for _, sums in summed(parts))
        return worst if worst.margin <= 1.0 else None

    def _reached(self, failure: Judged) -> list[Judged]:
        """Main gradients of its module's parameters, if a gradient goes to these and nowhere else.

        Where they are not judged, nothing shows whether the ranks' values are added up.
        """
        module = module_of(failure.name)
        place = failure.iteration, failure.microbatch, Kind.GRAD_INPUT, module
        ends_there = failure.kind is Kind.GRAD_OUTPUT and place not in self._places
        return [v for v in self._trained if is_within(v.name, module)] if ends_there else []

    def _is_harmless(self, failure: Judged) -> bool:
        around = self._container(failure)
        if not around:
            return False
        container = module_of(around[0].name)
        handed_on = self._is_handed_on(failure, container)
        if any(v.verdict in WRONG for v in around):
            return handed_on
        return (
            all(v.verdict is Outcome.PASS for v in around)
            and (handed_on or self._is_sound(failure.iteration, container))
            and self._is_sensitive(failure, around, whatever=handed_on)
            and self._is_reduced(failure, container)
        )

    def _is_handed_on(self, failure: Judged, container: str) -> bool:
        """Whether the container adds up itself, and nothing else in it fails until then."""
        place, forward = (failure.iteration, failure.microbatch), Direction.FORWARD
        return (
            failure.direction is forward
            and all(
                v.key in self._sums
                for v in self._run.verdicts
                if v.verdict.is_failure
                and (v.iteration, v.microbatch, v.direction) == (*place, forward)
                and module_of(v.name) != container
                and is_within(v.name, container)
            )
            and self._is_reduced(failure, container, itself=True)
        )

    def _has_no_fault(self, iteration: int, container: str) -> bool:
        """Whether nothing fails in it but summands, and its parameters' gradients pass."""
        within = [
            v
            for v in self._run.verdicts
            if v.iteration == iteration
            and (v.direction in _COMPUTED or v.kind is Kind.MAIN_GRAD)
            and is_within(v.name, container)
        ]
        return all(v.key in self._sums for v in within if v.verdict.is_failure) and any(
            v.kind is Kind.MAIN_GRAD and v.verdict is Outcome.PASS for v in within
        )

    def _container(self, failure: Judged) -> list[Judged]:
        """The tensors of the nearest container in which ranks' values are no summands."""
        forward = failure.direction is Direction.FORWARD
        kind = Kind.OUTPUT if forward else Kind.GRAD_INPUT
        for name in (*around(module_of(failure.name)), ROOT):
            values = self._places[failure.iteration, failure.microbatch, kind, name]
            if any(v.key not in self._sums for v in values):
                return values
        return []

    def _is_sensitive(self, failure: Judged, around: Iterable[Judged], *, whatever: bool) -> bool:
        """Whether the container's error without the reduction would be evident.

        Gradients have to pass, or may be ``whatever``.
        """
        error = (failure.rel_err or 0.0) * self._norm(failure)
        gradient = GRADIENT.get(failure.kind)
        if gradient is not None:
            used = self._passing(failure, gradient, whatever=whatever)
            error *= self._norm(used) if used is not None else 0.0
        for v in around:
            size = self._norm(v)
            if gradient is not None:
                leaving = self._passing(v, Kind.GRAD_OUTPUT, whatever=whatever)
                size *= self._norm(leaving) if leaving is not None else math.inf
            if error > EVIDENT * (v.tolerance or 0.0) * size:
                return True
        return False

    def _passing(self, verdict: Judged, kind: Kind, *, whatever: bool) -> Judged | None:
        """The gradient of the same tensor, if it passes or is a sum that does, or ``whatever``."""
        key = dataclasses.replace(verdict.key, kind=kind)
        found = self._by_key.get(key)
        passes = found is not None and (found.verdict is Outcome.PASS or key in self._sums)
        return found if passes or whatever else None

    def _norm(self, verdict: Judged) -> float:
        """The norm of the reference's tensor."""
        return self._tolerances.of(verdict.key).rms * math.sqrt(math.prod(verdict.shape))

    def _is_reduced(self, failure: Judged, container: str, *, itself: bool = False) -> bool:
        """Whether a sum over the axis ran there, or in it ``itself``, of at least this tensor."""
        ledger = self._ledger
        if not ledger.recorded or REDUCED_OVER in ledger.unseen:
            return not itself
        phases = [Phase.BACKWARD, Phase.FORWARD, Phase.RECOMPUTATION]
        phases = phases[:1] if failure.direction is Direction.BACKWARD else phases[1:]
        elements = min(
            sum(box.numel for box in held.measured.boxes) for held in self._run.holders[failure.key]
        )
        return any(
            collective.operation.reduces
            and collective.reduction == "sum"
            and REDUCED_OVER in collective.group.split("-")
            and collective.direction in phases
            # The backward pass of code between modules belongs to none.
            and (not collective.module or is_within(collective.module, container))
            and (not itself or collective.module == container)
            and collective.bytes >= elements * _itemsize(collective.dtype)
            for collective in ledger.collectives
        )


def _itemsize(dtype: str) -> float:
    return float(getattr(getattr(torch, dtype, None), "itemsize", math.inf))
