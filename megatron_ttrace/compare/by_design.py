# SPDX-License-Identifier: Apache-2.0
"""Failures that are no faults: summands that are added up later, and what nothing depends on.

Summands are in compare/summands.py. Modules that are isolated do not show what becomes of results:
there, nothing is excused.

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
tensor- and context-parallel ranks is the reference's. What is computed from it is judged, and what
its gradient becomes.

Gradients of activations are *scaled* if all of an iteration have one factor on all ranks, beside
what is expected, and main gradients pass, where it would be evident: a job may scale its loss, and
the sum over ranks back.

A main gradient is *added up later*, in the optimizer's step, if its first moment is right, where
its error would be evident, and so are the update and the norm: clipping hides a factor of all.

A module that is run for *pieces* of its input, in a loop, runs another number of times where a rank
has fewer tokens. Its runs have no counterparts if all else passes in this step: what contains it
and its parameters' gradients among that.
"""

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from megatron_ttrace.compare.gathered import Holding
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.planning import REDUCED_OVER
from megatron_ttrace.compare.summands import EVIDENT, GRADIENT, WRONG, Partial, Run
from megatron_ttrace.compare.tolerance import PartError, Tolerances
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.collectives import Ledger
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import around, is_within, module_of
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import FLOW, ROOT, Kind, Outcome, TraceKey
from megatron_ttrace.trace.store import TraceReader

EXCUSES = (Remark.PARTIAL, Remark.SCALED, Remark.ADDED_UP_LATER, Reason.OWN_MEAN)
"""Of what fails where modules are isolated."""

_LEAST_SHARE = 0.01
"""Of a gradient, the least that becomes part of its mean: 1 - beta1."""
_VALUE = {gradient: value for value, gradient in GRADIENT.items()}

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
    kinds = (*FLOW, Kind.MAIN_GRAD)
    failed = {v.key for v in verdicts if v.verdict.is_failure and v.kind in kinds}
    if not failed:
        return list(verdicts)
    holders: dict[TraceKey, list[Holding]] = defaultdict(list)
    for record in held:
        holders[record.measured.key].append(record)
    run = Run(verdicts, holders, tolerances, eps)
    rules: list[_Rule] = [_Unused(run, reference).instead]
    if not isolated:
        ranks = mesh.size(REDUCED_OVER) * mesh.size("cp")
        rules += [Partial(run, mesh, ledger).instead, _Means(run, ranks).instead]
        rules += [_Scaled(run).instead]
    rules += [_Copied(run, reference).instead, _Untrained(reference).instead]
    rules += [_Ignored(verdicts).instead, _Pieces(verdicts).instead]
    of_kind = dict.fromkeys(FLOW, rules)
    of_kind[Kind.MAIN_GRAD] = [] if isolated else [_AddedUpLater(run).instead]
    return [
        next((found for rule in of_kind[v.kind] if (found := rule(v))), v) if v.key in failed else v
        for v in verdicts
    ]


class _Unused:
    """Which outputs fail only on ranks where nothing reads them."""

    def __init__(self, run: Run, reference: TraceReader) -> None:
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

    def __init__(self, run: Run, reference: TraceReader) -> None:
        self._run = run
        self._reference = reference
        self._passing = {v.key for v in run.verdicts if v.verdict is Outcome.PASS}
        self._same: dict[TraceKey, list[TraceKey]] = defaultdict(list)
        for key in self._passing:
            if key.kind in GRADIENT.values():
                self._same[reference.primary(key)].append(key)

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` unless the values pass, and a gradient that its own joins."""
        key = failure.key
        wrong = failure.kind is Kind.GRAD_INPUT and failure.verdict in WRONG
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
            if key.kind in GRADIENT and step not in begun:
                found.add(dataclasses.replace(key, kind=GRADIENT[key.kind]))
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

    def __init__(self, run: Run, ranks: int) -> None:
        self._run = run
        self._ranks = ranks

    def instead(self, failure: Judged) -> Judged | None:
        """Unchecked; ``None`` unless the mean over all ranks is the reference's."""
        key = failure.key
        of_value = dataclasses.replace(key, kind=_VALUE.get(key.kind, key.kind))
        is_number = math.prod(failure.shape) == 1 and failure.verdict in WRONG
        return failure.unchecked(Reason.OWN_MEAN) if is_number and self._is_mean(of_value) else None

    def _is_mean(self, key: TraceKey) -> bool:
        holders, [*sums] = self._run.holders.get(key, ()), self._run.sums(key)
        is_whole = len(sums) == len(holders) and sum(h.copies for h in holders) == self._ranks
        if not (is_whole and all(each.reference for each in sums)):
            return False
        numbers = [each.dot / each.reference for each in sums]
        mean = sum(h.copies * number for h, number in zip(holders, numbers, strict=True))
        limit = self._run.tolerances.of(key).value
        return abs(mean / self._ranks - 1.0) <= limit < max(numbers) - 1.0


class _Scaled:
    """Which gradients have a factor that all have alike, and main gradients have not."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._factor = functools.cache(self._factor_of)

    def instead(self, failure: Judged) -> Judged | None:
        """A pass; ``None`` unless all gradients of its iteration have its factor."""
        is_gradient = failure.kind in _VALUE and failure.verdict in WRONG
        factor = self._factor(failure.iteration) if is_gradient else None
        if factor is None:
            return None
        error = self._error(failure.key, factor)
        note = Note(Remark.SCALED, factor)
        return self._run.right(failure, error, note, failure.placement)

    def _factor_of(self, iteration: int) -> float | None:
        of = [v for v in self._run.verdicts if v.iteration == iteration]
        reduced = [v for v in of if v.kind is Kind.MAIN_GRAD]
        outcomes = {v.verdict for v in reduced}
        gradients = [v for v in of if v.kind in _VALUE and v.verdict is not Outcome.UNCHECKED]
        holders = [held for v in gradients for held in self._run.holders[v.key]]
        [*sums] = (sums for v in gradients for sums in self._run.sums(v.key))
        size = sum(each.reference for each in sums)
        if (
            not {Outcome.PASS} <= outcomes <= {Outcome.PASS, Outcome.UNCHECKED}
            or not {v.verdict for v in gradients} <= {Outcome.PASS, *WRONG}
            or len(sums) < len(holders)
            or any(held.measured.partial_over for held in holders)
            or not size
        ):
            return None
        factor = sum(each.dot for each in sums) / size
        of_key = self._run.tolerances.of
        passed = (of_key(v.key).value for v in reduced if v.verdict is Outcome.PASS)
        is_evident = abs(factor - 1.0) > EVIDENT * max(passed)
        is_alike = factor > 0 and all(self._error(v.key, factor).margin <= 1.0 for v in gradients)
        return factor if is_evident and is_alike else None

    def _error(self, key: TraceKey, factor: float) -> PartError:
        """The largest relative error of a rank's part, apart from the factor."""
        tolerance = self._run.tolerances.of(key)
        errors = []
        for each in self._run.sums(key):
            diff = each.candidate / factor**2 - 2 * each.dot / factor + each.reference
            # Of these no element is known.
            errors.append(dataclasses.replace(each, diff=max(diff, 0.0), worst=0.0))
        return max(map(tolerance.error_of, errors), default=PartError(math.inf, math.inf, 0.0))


class _AddedUpLater:
    """Which main gradients become right in the optimizer's step."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._by_key = {v.key: v for v in run.verdicts}
        norms = [v for v in run.verdicts if v.kind is Kind.GRAD_NORM]
        self._sound = {v.iteration for v in norms} - {
            v.iteration for v in norms if v.verdict is not Outcome.PASS
        }

    def instead(self, failure: Judged) -> Judged | None:
        """A pass; ``None`` unless what is computed from it passes, and would not otherwise."""
        kinds = Kind.EXP_AVG, Kind.PARAM_DELTA
        moment, update = (
            self._by_key.get(dataclasses.replace(failure.key, kind=kind)) for kind in kinds
        )
        passes = all(v and v.verdict is Outcome.PASS for v in (moment, update))
        passes = passes and failure.iteration in self._sound
        if failure.verdict not in WRONG or not moment or not passes:
            return None
        error, least = (
            size * self._run.tolerances.of(v.key).rms
            for size, v in ((failure.rel_err or 0.0, failure), (moment.tolerance or 0.0, moment))
        )
        if _LEAST_SHARE * error <= EVIDENT * least:
            return None
        right = PartError(0.0, moment.rel_err or 0.0, moment.tolerance or 0.0)
        return self._run.right(failure, right, Note(Remark.ADDED_UP_LATER), failure.placement)


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
