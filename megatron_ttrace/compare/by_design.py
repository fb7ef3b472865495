# SPDX-License-Identifier: Apache-2.0
"""Failures that are no faults: summands that are added up later, and what nothing depends on.

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
Modules that are isolated do not show what becomes of results: there, nothing is excused.

An output is *unused* on a rank if the reference's modules take it as an input and none of them runs
on that rank: a pipeline stage with nothing but the loss computes rotary embeddings. The other ranks
must have all of it, and the inputs that it is must pass, as must all else that the rank has of the
microbatch. With virtual stages the rank itself may have it as well, where modules read it.

An input gradient is that of a *copy* if the tensor is the input or output of other modules too in
the reference, and ranks hold more or less of it than of theirs: a module that gathers its input for
itself gets the gradient without what the others add. Both join in the gradient of the others, which
must pass, as must the copy's own values.

A gradient is *untrained* if the reference has the tensor and no gradient of it, and makes it before
anything that has trained parameters: what a pipeline stage receives always has a gradient.

An input is *ignored* if only one of the runs passes it to its module, and all outputs that the
module has in the microbatch pass: Megatron recomputes layers with other arguments, and inputs are
told apart by their positions.

A single number may be each rank's *own mean* over the tokens that it has: their mean over the
tensor- and context-parallel ranks is the reference's. What is computed from it is judged.

A module that is run for *pieces* of its input, in a loop, runs another number of times where a rank
has fewer tokens. Its runs have no counterparts if all else passes in this step: what contains it
and its parameters' gradients among that.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from megatron_ttrace.compare.gathered import Holding
from megatron_ttrace.compare.judge import judge, summed, verdict_of
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
from megatron_ttrace.trace.store import TraceReader

_GRADIENT = {Kind.OUTPUT: Kind.GRAD_OUTPUT, Kind.INPUT: Kind.GRAD_INPUT}
_WRONG = (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT)
_EVIDENT = 2.0
"""How many times its tolerance the error of a container would be without the reduction."""

_COMPUTED = (Direction.FORWARD, Direction.BACKWARD)

_Place = tuple[int, int, Kind, str]

type _Rule = Callable[[Judged], Judged | None]
"""The verdict in place of a failure; ``None`` if a fault may be behind it."""


def review(
    verdicts: Sequence[Judged],
    held: Iterable[Holding],
    reference: TraceReader,
    tolerances: Tolerances,
    *,
    eps: float,
    mesh: Mesh,
    ledger: Ledger,
    isolated: bool,
) -> list[Judged]:
    """The verdicts, with others on the tensors that fail by design.

    What is partial or unused passes; gradients of copies, untrained ones, inputs that are ignored,
    means of ranks, and modules that run for pieces are unchecked.
    ``mesh`` has the sizes of the candidate's axes, ``ledger`` its collectives. With ``isolated``,
    modules were given the reference's tensors.
    """
    failed = {v.key for v in verdicts if v.verdict.is_failure and v.kind in FLOW}
    if not failed:
        return list(verdicts)
    holders: dict[TraceKey, list[Holding]] = defaultdict(list)
    for record in held:
        holders[record.measured.key].append(record)
    run = _Run(verdicts, holders, tolerances, eps)
    rules: list[_Rule] = [_Unused(run, reference).instead]
    if not isolated:
        ranks = mesh.size(REDUCED_OVER) * mesh.size("cp")
        rules += [_Partial(run, mesh, ledger).instead, _Means(run, ranks).instead]
    rules += [_Copied(run, reference).instead, _Untrained(reference).instead]
    rules += [_Ignored(verdicts).instead, _Pieces(verdicts).instead]
    return [
        next((found for rule in rules if (found := rule(v))), v) if v.key in failed else v
        for v in verdicts
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
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


class _Partial:
    """Which failures are summands that something else adds up."""

    def __init__(self, run: _Run, mesh: Mesh, ledger: Ledger) -> None:
        self._run = run
        self._tolerances = run.tolerances
        self._ranks = mesh.size(REDUCED_OVER) * mesh.size("cp")
        self._ledger = ledger
        self._by_key = {v.key: v for v in run.verdicts}
        self._is_sound = functools.cache(self._has_no_fault)
        self._places: dict[_Place, list[Judged]] = defaultdict(list)
        self._trained = [v.name for v in run.verdicts if v.kind is Kind.MAIN_GRAD]
        flow = [v for v in run.verdicts if v.kind in FLOW]
        for v in flow:
            self._places[v.iteration, v.microbatch, v.kind, module_of(v.name)].append(v)
        self._sums = {
            v.key: error
            for v in flow
            if v.verdict in _WRONG and (error := self._sum(v)) is not None
        }

    def instead(self, failure: Judged) -> Judged | None:
        """The verdict on the sum of the ranks' values; ``None`` if a fault may be behind them."""
        error = self._sums.get(failure.key)
        if error is None or not (self._reaches_parameters(failure) or self._is_harmless(failure)):
            return None
        tolerance = self._tolerances.of(failure.key)
        notes = [Note(Remark.PARTIAL, text=REDUCED_OVER)]
        if tolerance.blind:
            notes.append(Note(Reason.BLIND, tolerance.value, tolerance.bound))
        return verdict_of(
            failure.key,
            failure.shape,
            Outcome.UNCHECKED if tolerance.blind else Outcome.PASS,
            self._run.ranks(failure.key),
            *notes,
            reason=Reason.BLIND if tolerance.blind else None,
            placement=describe_partial(failure.placement, REDUCED_OVER),
            error=error.error,
            tolerance=error.tolerance,
            eps=self._run.eps,
        )

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
        if not complete or (tolerance.blind and not self._reaches_parameters(failure)):
            return None
        worst = max(tolerance.error_of(sums) for _, sums in summed(parts))
        return worst if worst.margin <= 1.0 else None

    def _reaches_parameters(self, failure: Judged) -> bool:
        """Whether a gradient goes to parameters of its module, and nowhere else."""
        module = module_of(failure.name)
        place = failure.iteration, failure.microbatch, Kind.GRAD_INPUT, module
        ends_there = failure.kind is Kind.GRAD_OUTPUT and place not in self._places
        return ends_there and any(is_within(name, module) for name in self._trained)

    def _is_harmless(self, failure: Judged) -> bool:
        around = self._container(failure)
        if not around:
            return False
        container = module_of(around[0].name)
        handed_on = self._is_handed_on(failure, container)
        if any(v.verdict in _WRONG for v in around):
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
        gradient = _GRADIENT.get(failure.kind)
        if gradient is not None:
            used = self._passing(failure, gradient, whatever=whatever)
            error *= self._norm(used) if used is not None else 0.0
        for v in around:
            size = self._norm(v)
            if gradient is not None:
                leaving = self._passing(v, Kind.GRAD_OUTPUT, whatever=whatever)
                size *= self._norm(leaving) if leaving is not None else math.inf
            if error > _EVIDENT * (v.tolerance or 0.0) * size:
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


class _Unused:
    """Which outputs fail only on ranks where nothing reads them."""

    def __init__(self, run: _Run, reference: TraceReader) -> None:
        self._run = run
        self._reference = reference
        self._failed: dict[tuple[int, int], list[Judged]] = defaultdict(list)
        self._readers: dict[TraceKey, list[Judged]] = defaultdict(list)
        for v in run.verdicts:
            if v.verdict.is_failure:
                self._failed[v.iteration, v.microbatch].append(v)
            if v.kind is Kind.INPUT and v.key in reference:
                self._readers[reference.primary(v.key)].append(v)

    def instead(self, failure: Judged) -> Judged | None:
        """The verdict of the ranks that use it; ``None`` if a fault may be behind the failure."""
        if failure.kind is not Kind.OUTPUT or failure.key not in self._reference:
            return None
        key, wrong = failure.key, frozenset(failure.ranks)
        place = key.iteration, key.microbatch
        if any(v.key != key and self._have(v, wrong) for v in self._failed[place]):
            return None
        # What has another shape may be that of one chunk, and another of the rank's has it right.
        misfits = {
            r for held in self._run.holders[key] if held.measured.problem for r in held.ranks
        }
        others = [
            held
            for held in self._run.holders[key]
            if not held.measured.problem and (wrong - misfits).isdisjoint(held.ranks)
        ]
        nowhere = wrong.difference(*(held.ranks for held in others))
        readers = self._readers[self._reference.primary(key)]
        if not readers or any(
            v.verdict is not Outcome.PASS or self._have(v, nowhere) for v in readers
        ):
            return None
        computed = {
            rank
            for v in self._run.verdicts
            if v.verdict is Outcome.PASS
            and (v.iteration, v.microbatch) == place
            and v.kind is Kind.OUTPUT
            for rank in self._run.ranks(v.key)
        }
        if not wrong <= computed:
            return None
        note = Note(Remark.UNUSED, ranks=tuple(sorted(wrong)))
        others = [
            dataclasses.replace(held, measured=dataclasses.replace(held.measured, note=note))
            for held in others
        ]
        [verdict] = judge([(key, failure.shape)], others, self._run.tolerances, self._run.eps)
        return verdict if verdict.verdict is Outcome.PASS else None

    def _have(self, verdict: Judged, ranks: frozenset[int]) -> bool:
        """Whether one of these ranks reported the tensor."""
        return not ranks.isdisjoint(self._run.ranks(verdict.key))


class _Copied:
    """Which gradients are those of copies that ranks make of a tensor for one module."""

    def __init__(self, run: _Run, reference: TraceReader) -> None:
        self._run = run
        self._reference = reference
        self._passing = {v.key for v in run.verdicts if v.verdict is Outcome.PASS}
        self._same: dict[TraceKey, list[TraceKey]] = defaultdict(list)
        for key in self._passing:
            if key.kind in _GRADIENT.values():
                self._same[reference.primary(key)].append(key)

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` unless the values pass, and a gradient that its own joins."""
        key = failure.key
        wrong = failure.kind is Kind.GRAD_INPUT and failure.verdict in _WRONG
        if not wrong or dataclasses.replace(key, kind=Kind.INPUT) not in self._passing:
            return None
        mine = self._run.elements(key)
        for other in sorted(self._same[self._reference.primary(key)]):
            theirs = self._run.elements(other)
            if all(rank in theirs and theirs[rank] != number for rank, number in mine.items()):
                return failure.unchecked(Reason.COPY, other.name)
        return None


class _Untrained:
    """Which gradients nothing depends on that is trained."""

    def __init__(self, reference: TraceReader) -> None:
        self._reference = reference

    @functools.cached_property
    def _gradients(self) -> set[TraceKey]:
        """Those of all that the reference makes before anything trained runs."""
        trained = {
            module
            for key in self._reference
            if key.kind is Kind.MAIN_GRAD
            for module in (*around(key.name), ROOT)
        }
        found: set[TraceKey] = set()
        begun: set[tuple[int, int]] = set()
        for key in self._reference:
            step = key.iteration, key.microbatch
            if key.kind is Kind.OUTPUT and module_of(key.name) in trained:
                begun.add(step)
            if key.kind in _GRADIENT and step not in begun:
                found.add(dataclasses.replace(key, kind=_GRADIENT[key.kind]))
        return found

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` unless the candidate alone has it, and the reference the tensor."""
        if failure.verdict is not Outcome.EXTRA or failure.key not in self._gradients:
            return None
        return failure.unchecked(Reason.UNTRAINED)


class _Ignored:
    """Which inputs are passed by one of the runs alone, to no effect."""

    def __init__(self, verdicts: Iterable[Judged]) -> None:
        self._outputs: dict[tuple[int, int, str], list[Outcome]] = defaultdict(list)
        for v in verdicts:
            if v.kind is Kind.OUTPUT:
                self._outputs[v.iteration, v.microbatch, v.name].append(v.verdict)

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` if it may have had an effect, or is an input of the model."""
        absent = failure.verdict in (Outcome.EXTRA, Outcome.MISSING)
        if failure.kind is not Kind.INPUT or not absent or failure.name == ROOT:
            return None
        outputs = self._outputs[failure.iteration, failure.microbatch, failure.name]
        is_right = outputs and all(outcome is Outcome.PASS for outcome in outputs)
        return failure.unchecked(Reason.IGNORED) if is_right else None


class _Means:
    """Which numbers are means over a rank's own tokens."""

    def __init__(self, run: _Run, ranks: int) -> None:
        self._run = run
        self._ranks = ranks

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` unless the mean over all ranks is the reference's."""
        holders, [*sums] = self._run.holders[failure.key], self._run.sums(failure.key)
        is_number = math.prod(failure.shape) == 1 and failure.kind in (Kind.INPUT, Kind.OUTPUT)
        is_whole = len(sums) == len(holders) and sum(h.copies for h in holders) == self._ranks
        if not (is_number and is_whole and all(each.reference for each in sums)):
            return None
        shares = zip(holders, sums, strict=True)
        mean = sum(h.copies * each.dot / each.reference for h, each in shares) / self._ranks
        is_right = abs(mean - 1.0) <= self._run.tolerances.of(failure.key).value
        return failure.unchecked(Reason.OWN_MEAN) if is_right else None


class _Pieces:
    """Which modules run for pieces of their input that are other ones in this layout."""

    def __init__(self, verdicts: Sequence[Judged]) -> None:
        runs: dict[tuple[int, str], set[str]] = defaultdict(set)
        uneven: set[tuple[int, str]] = set()
        for v in verdicts:
            if v.kind is Kind.OUTPUT:
                place = v.iteration, module_of(v.name)
                runs[place].add(v.name)
                if v.verdict in (Outcome.MISSING, Outcome.EXTRA):
                    uneven.add(place)
        self._modules = {place for place in uneven if len(runs[place]) > 1}
        outputs = (v for v in verdicts if v.kind is Kind.OUTPUT)
        passing = {(v.iteration, v.name) for v in outputs if v.verdict is Outcome.PASS}
        self._wrong = {
            v.iteration
            for v in verdicts
            if (v.verdict.is_failure and not self._is_in(v))
            or (v.kind is Kind.MAIN_GRAD and self._is_in(v) and v.verdict is not Outcome.PASS)
        }
        self._wrong |= {
            iteration
            for iteration, module in self._modules
            if not any((iteration, name) in passing for name in (*around(module), ROOT))
        }

    def _is_in(self, verdict: Judged) -> bool:
        modules = (module for iteration, module in self._modules if iteration == verdict.iteration)
        return any(is_within(verdict.name, module) for module in modules)

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` if anything else fails."""
        is_harmless = failure.iteration not in self._wrong and self._is_in(failure)
        return failure.unchecked(Reason.PIECES) if is_harmless else None


def _itemsize(dtype: str) -> float:
    return float(getattr(getattr(torch, dtype, None), "itemsize", math.inf))
