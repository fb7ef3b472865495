# SPDX-License-Identifier: Apache-2.0
"""Points for the suspects of a failure: each for what speaks for it (:class:`Clue`).

There are fewer if it also ran in other modules, above all in ones whose results are right: as in
fault localisation by Ochiai's coefficient (Abreu, Zoeteweij and van Gemund, 2006), with one failing
context, the culprit.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable

from megatron_ttrace.diagnose.anchors import anchor_of, is_redrawn
from megatron_ttrace.diagnose.by_norms import ByNorms
from megatron_ttrace.diagnose.code import (
    BUILDING,
    CHOOSING,
    DIVIDING,
    EVERYWHERE,
    NAMED,
    PARAMETERS,
    WORDS,
    Code,
    Outcomes,
    choosing_without,
    communicates,
    complementary,
    is_given,
    loss_of,
    origins,
    parts_of,
    tokens,
)
from megatron_ttrace.diagnose.edits import nearest
from megatron_ttrace.diagnose.scaling import FACTORS
from megatron_ttrace.diagnose.suspects import FEW, OF_PARAMETERS, Suspects
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.collectives import Collective, Function, Ledger, Numbers, Phase, pattern
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import ChangedFunction
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Finding,
    Lack,
    Loss,
    LossShare,
    LossTerm,
    Miscounted,
    OtherHyperparameters,
    UnequalShares,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import FLOW, ROOT, Direction, Kind, MetricIndex

_SETS, _FARTHER = 1.5, 0.7
"""Points for what sets a factor; of what leads to a collective, by the number of calls."""
_VALUE, _ORIGIN, _GROUP, _DIVIDES = 2.0, 2.5, 1.5, 4.0
"""Points for a factor of the size of the error, for what makes a number that is off by it, for
process groups that lack the axis, and for what divides the parameter wrongly."""
_MEAN, _INSTEAD = 1.5, 0.4
"""Points for a mean over ranks, if it is too small by their number; weight of other losses."""
_CHANGED, _FAR, _NEAR = 4.0, 0.5, 0.8
"""Points for what the user changed, or wrote; for a change that only ran before the step, a share
of them; the least weight of what the user wrote."""
_CALLED, _LOOPS, _LAYOUT = 1.0, 0.7, 1.0
"""Points for the factor's name; a loop, if some tensors lack something; lines of this run only."""
_STRAYS, _ADDS = 3.0, 1.0
"""Points for what returned something else, though it was given the same; for a module's own code,
if its output is summands."""
_OF_ONE_COPY = {"shared", "shared_embedding"}
"""Marks that one of several copies has by design."""
_MARKS, _UNEQUAL, _CHOOSES, _SEPARATES = 9.0, 4.0, 3.0, 2.0
"""Points for naming marks: one that a reduction selects by; that only some ranks have set; where
parameters are chosen, if some are left out; one that all failing parameters have, and no others."""
_WORDY = 3
"""Words of a function's name; a longer name has a word more easily by chance."""
_SCALED = {*FACTORS, Cause.WEIGHTS, Cause.ADDEND, Cause.SOFTMAX_SCALE, Cause.HYPERPARAMETERS}
_LACKING = {Cause.PARTIAL, Cause.COPY, Cause.NEVER_COUNTED}
_REDUCED = {Cause.PARTIAL, Cause.PARTS, Cause.COPY, Cause.WEIGHTS, *FACTORS}
_MOVED = {
    *(Cause.ZERO, Cause.OTHER_TIME, Cause.OTHER_MODULE, Cause.OFFSET, Cause.ORDER, Cause.HALVES),
    *(Cause.ROWS, Cause.TOKEN_IDS, Cause.NEVER_COUNTED, Cause.COUNTED_TWICE),
}
_DIVISORS = {"step_tokens": "tokens"}
"""Names of factors, and of what is divided by in code."""


class Points:
    """Points for the suspects of one failure."""

    def __init__(
        self,
        code: Code,
        ledger: Ledger,
        outcomes: Outcomes,
        verdict: Judged,
        finding: Finding | None,
        *,
        sent: bool,
    ) -> None:
        self._code, self._ledger, self._outcomes = code, ledger, outcomes
        self._verdict = verdict
        findings = list(parts_of(finding))
        self._causes = {f.cause for f in findings}
        self._ratios = [abs(f.ratio) for f in findings if isinstance(f, ConstantFactor) and f.ratio]
        self._axes = {axis for f in findings for axis in f.axes}
        self._mesh = self._axes & {*AXES}
        if isinstance(finding, OtherHyperparameters) and len(finding.values) > 1:
            self._causes -= _SCALED  # it is in another group of parameters
        self._axes |= {"tokens"} if Cause.WEIGHTS in self._causes else set()  # of their means
        self._suspects = Suspects(code, ledger, outcomes, verdict, finding, sent=sent)
        self._few = self._suspects.few
        by_ranks = [ranks for f in findings if isinstance(f, UnequalShares) for ranks in f.by_ranks]
        is_missing = bool(by_ranks) and all(w.missing for _, weights in by_ranks for w in weights)
        # Nothing was done to these tensors that was done to others.
        self._passed_over = (
            self._few
            and verdict.kind in (Kind.MAIN_GRAD, Kind.COUNTED, Kind.PARAM_DELTA)
            and (is_missing or not self._causes.isdisjoint(_LACKING))
        )
        # One factor is for all parameters, or for all that are experts.
        few = outcomes.share(verdict.kind, verdict.name) < FEW
        self._of_few = few and verdict.kind is Kind.MAIN_GRAD
        self._lack = finding.lack if isinstance(finding, Miscounted) else None
        self._is_reduced = (verdict.kind, verdict.index) == (Kind.COUNTED, Statistic.REDUCED.number)
        self._are_others = verdict.kind is Kind.TOKENS and Cause.OTHER_TIME in self._causes
        self._words = _sending(verdict.kind) if sent else self._words_of(findings)
        losses = {loss for f in findings if isinstance(f, LossShare) for loss in f.losses}
        self._factors = dict.fromkeys(losses, 1.0) | dict.fromkeys(NAMED.keys() & self._axes, 2.0)
        # Of these parameters, each rank has the right values of its own part.
        self._unsent = verdict.kind is Kind.PARAM and any(map(complementary, findings))
        # The share of a loss is computed beside the module's output.
        self._of_loss = isinstance(finding, LossShare)
        self._losses = losses if losses and Loss.MAIN not in losses else set()
        own = {(pattern(verdict.name.rpartition(".")[0]), Phase.FORWARD)}  # no proof of gradients
        self._passed_before = own if verdict.direction is Direction.GRADIENT else set()
        self._norms = ByNorms(code, ledger, outcomes, verdict)
        self._lines: dict[tuple[int, Clue], int] = {}
        self._expected: Numbers = {}
        self._apart = {*ledger.apart}
        self._reducing, self._edited = set[int](), set[int]()

    def scores(self) -> dict[int, float]:
        """By number of the function."""
        self._setters()
        self._communication()
        self._silence()
        for number in self._suspects.weights:
            self._own_code(number, self._code.functions[number])
        self._marks()
        self._by_norms()
        self._summands()
        return {number: self._score(number) for number in self._suspects.weights}

    def facts(self, expected: Numbers) -> None:
        """For what makes a wrong number, chooses other groups, or divides the parameter."""
        suspects, code, ledger = self._suspects, self._code, self._ledger
        self._expected = expected
        if not self._of_few:
            # What is computed from wrong values is not a cause: only among what ran before.
            for number in origins(ledger, expected, self._ratios, self._axes):
                suspects.add(number, Clue.ORIGIN, _ORIGIN)
        if self._causes & _REDUCED and Cause.TOO_LARGE not in self._causes:
            chosen = choosing_without(ledger, self._mesh)
            for number in chosen.keys() & suspects.weights.keys():
                suspects.add(number, Clue.GROUP, _GROUP)
                self._lines[number, Clue.GROUP] = chosen[number]
        divides = code.number(ledger.sources.sharding)
        if module_of(self._verdict.name) in ledger.torn and divides is not None:
            for number in code.below(divides, BUILDING):
                suspects.weights[number] = 1.0
                suspects.add(number, Clue.DIVIDES, _DIVIDES)

    def changes(self, changed: Iterable[ChangedFunction]) -> None:
        """For what the user changed, as far as it is near."""
        suspects = self._suspects
        found, far = nearest(changed, self._code, suspects.weights, self._verdict)
        self._edited = {*found} - far
        for number, function in found.items():
            # The more was changed, the less it says of each.
            share = len({*found.values()}) ** -0.5 * (_FAR if number in far else 1.0)
            suspects.weights[number] = max(share, suspects.weights.get(number, 0.0))
            suspects.add(number, function.clue, _CHANGED * share)
            self._lines[number, function.clue] = function.line

    def place(self, number: int) -> Place:
        """A suspect with the clue that is worth most."""
        function, points = self._code.functions[number], self._suspects.clues[number]
        known = {Clue.BUILT if Clue.BUILT in points else Clue.RAN: 0.0} | points
        clue = max(known, key=lambda clue: points.get(clue, 0.0))
        # Where the user changed it is more precise than where it begins.
        line = self._lines.get((number, clue)) or self._lines.get((number, Clue.CHANGED))
        return Place(function.file, line or function.line, function.name.partition(".<")[0], clue)

    def _score(self, number: int) -> float:
        contexts = self._code.contexts[number] - self._passed_before
        right, wrong = self._outcomes.count(contexts, self._verdict.kind)
        right *= not self._of_loss
        # What was computed from something wrong is neither right nor wrong.
        passed = right + 0.5 * max(0, len(contexts) - max(1, wrong) - right)
        passed *= number not in self._norms.straying
        # There is more to be wrong in a long function.
        prior = 0.15 * math.log2(max(2.0, self._code.functions[number].size / 32))
        points = prior + sum(self._suspects.clues[number].values())
        weight = self._suspects.weights[number] * self._norms.weight(number)
        if self._losses and loss_of(self._code.functions[number]) not in {None, *self._losses}:
            weight *= _INSTEAD
        return weight * points / math.sqrt(1.0 + passed)

    def _words_of(self, findings: Iterable[Finding]) -> dict[str, float]:
        """Words in names of functions that have to do with the failure, with their points."""
        verdict, module = self._verdict, self._suspects.module
        keys: list[tuple[object, float]] = [(verdict.kind, 0.5)]
        if self._lack is Lack.UNFILLED:
            keys = [(Lack.UNFILLED, 1.0)]
        elif verdict.kind is Kind.COUNTED:
            keys.append(([*Statistic][verdict.index], 0.5))
            keys.append((self._lack, 0.5))
        for finding in findings:
            if isinstance(finding, LossShare):
                keys += [(loss, -0.35) for loss in Loss if loss not in finding.losses]
                keys += [(loss, 0.35) for loss in finding.losses]
            keys += [(key, 1.0) for key in (*finding.axes, finding.cause)]
            keys += [(finding.term, 1.0)] if isinstance(finding, LossTerm) else []
        words = dict.fromkeys(set(tokens(module)) - EVERYWHERE, 0.35)
        words |= dict.fromkeys(("grad", "grads") if verdict.kind is Kind.PARAM else (), -1.0)
        is_read = (verdict.kind, module) == (Kind.INPUT, ROOT)
        words |= dict.fromkeys(DIVIDING if is_read else (), 0.5)
        words |= dict.fromkeys(("rng", "states") if is_redrawn(verdict) else (), 0.7)
        words |= dict.fromkeys(CHOOSING if self._are_others else (), 0.7)
        if verdict.kind is Kind.BUFFER:
            words |= dict.fromkeys(tokens(module.rpartition(".")[2]), 0.7)
        if verdict.kind is Kind.METRIC:
            words |= dict.fromkeys(tokens(verdict.name), 0.5)
            if verdict.index == MetricIndex.LEFT:
                words |= dict.fromkeys(("clear", "reset", "zero"), 1.0)
        elif verdict.kind is Kind.GRAD_OUTPUT and module == ROOT:
            words["loss"] = 1.0
        elif verdict.kind is Kind.GRAD_INPUT and not self._causes:
            # A loss of its own that is wrong too.
            for name in self._outcomes.names(Kind.METRIC):
                words |= dict.fromkeys(tokens(name), 0.5)
        for key, points in sorted(keys, key=lambda pair: pair[1]):
            words |= dict.fromkeys(WORDS.get(key, "").split(), points)
        return words

    def _concerns(self, number: int) -> bool:
        """Whether a function names an axis of the finding, or none."""
        axes = {*self._code.functions[number].axes} & {*AXES}
        return not self._mesh or not axes or not axes.isdisjoint(self._mesh)

    def _own_code(self, number: int, function: Function) -> None:
        add, clues = self._suspects.add, self._suspects.clues[number]
        add(number, Clue.OWN, _CHANGED * (function.own and self._suspects.weights[number] >= _NEAR))
        if self._verdict.kind in FLOW and not self._causes:
            add(number, Clue.LAYOUT, _LAYOUT * (function.where in self._apart))
        if {_DIVISORS.get(axis, axis) for axis in self._axes} & {*function.axes}:
            # A function that mentions all axes is weak evidence for one.
            add(number, Clue.AXIS, len(function.axes) ** -0.5)
        if self._passed_over and function.loops and number in (self._reducing or {number}):
            add(number, Clue.LOOPS, _LOOPS)
        if self._causes & _SCALED and not self._passed_over:
            named = max((self._named(name) for name in function.factors), default=0.0)
            # One factor is for all parameters.
            scales = 0.3 if self._of_few and function.part is Phase.GRADIENTS else 0.7
            add(number, Clue.SCALES, scales * function.scales + named)
            has_factor = is_given(self._ledger, self._expected, function, self._ratios)
            add(number, Clue.VALUE, _VALUE * (has_factor and not self._of_few))
            # What sets a scale for each layout is wrong by the size of an axis.
            add(number, Clue.SETS, _SETS * bool(self._axes and Clue.SETS in clues))
        kind = self._verdict.kind
        summed = kind is Kind.COUNTED and self._lack is not Lack.UNFILLED and not self._is_reduced
        is_moved = bool(self._causes & _MOVED) and kind is not Kind.PARAM_DELTA and not summed
        is_most = kind is Kind.INITIAL and not self._few
        if is_most or (is_moved and not self._unsent and not self._are_others):
            add(number, Clue.MOVES, 0.7 * function.moves)
        head, _, name = function.name.rpartition(".")
        points = sum(self._words.get(word, 0.0) for word in {*tokens(name)})
        points *= math.sqrt(min(1.0, _WORDY / max(1, len(tokens(name)))))
        points += 0.5 * sum(self._words.get(word, 0.0) for word in {*tokens(head)})
        if self._mesh and self._causes & _REDUCED and Clue.REDUCES not in clues:
            points += 0.7 * communicates(function)
        # A function that is called after the factor, and after nothing else.
        points += _CALLED * any({*tokens(name)} == NAMED.get(axis) for axis in self._axes)
        if points:
            add(number, Clue.NAMES, points + clues.get(Clue.NAMES, 0.0))

    def _communication(self) -> None:
        """For what leads to a collective that the finding is about, or to any if there is none."""
        kind, weights = self._verdict.kind, self._suspects.weights
        gathers, reduces = set[int](), set[int]()
        sizes: Counter[str] = Counter()
        for call in self._ledger.collectives:
            if call.direction is Phase.GRADIENTS and self._fits(call):
                sizes[call.where] += call.bytes
        likely = (min if self._few else max)(sizes.values(), default=0)
        for call in self._ledger.collectives:
            chain = self._chain(call)
            if call.direction is Phase.PARAMETERS:
                gathers |= set(chain)
            elif call.direction is Phase.GRADIENTS:
                reduces |= set(chain)
            # What reduces few tensors is likely to be wrong if few are.
            points = self._worth(call, chain) - (sizes.get(call.where, likely) != likely)
            if points > 0 and chain and (place := Place.of(call.where, Clue.REDUCES)):
                self._lines.setdefault((chain[0], Clue.REDUCES), place.line)
            if self._fits(call):
                self._reducing |= {*chain}
            selects = any(self._code.functions[number].marks for number in chain[:1])
            for distance, number in enumerate(chain):
                share = _FARTHER**distance
                if self._passed_over and self._fits(call) and not selects:
                    # It reduced others: what goes through all of them may have left these out.
                    share = 1.0 if distance and self._code.functions[number].loops else share / 2
                self._suspects.add(number, Clue.REDUCES, max(0.0, points) * share)
        if kind is Kind.MAIN_GRAD:
            for number in (gathers - reduces) & weights.keys():
                weights[number] *= 0.5

    def _chain(self, call: Collective) -> list[int]:
        """What leads to a collective, the nearest first."""
        function = self._code.number(call.where)
        phase = Phase.GRADIENTS if call.direction is Phase.PARAMETERS else call.direction
        return [] if function is None else self._code.chain(function, (pattern(call.module), phase))

    def _fits(self, call: Collective) -> bool:
        """Whether it reduces over axes of the finding."""
        return call.operation.reduces and not self._mesh.isdisjoint(call.axes)

    def _worth(self, call: Collective, chain: list[int]) -> float:
        kind = self._verdict.kind
        if self._lack not in (None, Lack.LOST):
            return 0.0
        if self._fits(call) and self._causes & _REDUCED:
            if kind is Kind.BUFFER:
                return 1.25
            if not self._causes.isdisjoint((Cause.PARTIAL, Cause.COPY)):
                return 2.5
            # What is summed, but by a wrong share, may as well be scaled elsewhere.
            return 1.8 + _MEAN * (call.reduction == "avg" and Cause.TOO_SMALL in self._causes)
        is_sum = call.operation.reduces and call.dtype.startswith("float")
        phase = Phase.GRADIENTS if self._is_reduced else Phase.OPTIMIZER
        of_norm = kind in (Kind.GRAD_NORM, Kind.COUNTED) and call.direction is phase
        if of_norm and kind is Kind.COUNTED:
            of_norm = self._code.compute(chain, self._verdict.index)
        if (of_norm and is_sum) or (kind is Kind.PARAM and call.direction is Phase.PARAMETERS):
            return 1.5
        return 0.0 if self._causes else 0.4

    def _setters(self) -> None:
        """For what computed, before the step, a factor that a suspect of the step scales by.

        The factor is followed by its name, from the file that uses it to what calls this.
        """
        if self._of_few or self._causes.isdisjoint(FACTORS):
            return
        code, weights = self._code, self._suspects.weights
        used: dict[tuple[str, str], float] = {}
        for number, weight in weights.items():
            user = code.functions[number]
            if user.scales and code.contexts[number]:
                for name in user.factors:
                    used[user.file, name] = max(weight, used.get((user.file, name), 0.0))
        for number in code.at[BUILDING]:
            for name in code.functions[number].factors:
                weight = used.get((code.functions[number].file, name), 0.0)
                for setter in code.chain(number, BUILDING, name) if weight else ():
                    function = code.functions[setter]
                    if name in function.sets and not self._axes.isdisjoint(function.axes):
                        weights[setter] = max(weights.get(setter, 0.0), weight)
                        self._suspects.add(setter, Clue.SETS, _SETS)

    def _named(self, factor: str) -> float:
        """Points for a factor whose name is that of the finding's, or of its loss."""
        words = {*tokens(factor)}
        fits = {key: len(wanted) for key, wanted in NAMED.items() if wanted <= words}
        most = max(fits.values(), default=0)
        return max((self._factors.get(key, 0.0) for key in fits if fits[key] == most), default=0.0)

    def _silence(self) -> None:
        """For functions of modules that communicate by their names, but did not.

        Also for those that send parameters after a step, if each rank has only updated its own.
        """
        if Cause.TOO_LARGE in self._causes:
            # What is too large lacks nothing.
            return
        spanned = {axis for call in self._ledger.collectives for axis in call.axes}
        ran: dict[int, set[str]] = defaultdict(set)
        for call in self._ledger.collectives:
            for number in self._chain(call):
                ran[number].add(pattern(call.module))
        passes = Phase.FORWARD, Phase.BACKWARD
        silent: dict[int, None] = {}
        for number in self._suspects.weights:
            function = self._code.functions[number]
            contexts = [context for context in self._code.contexts[number] if context[1] in passes]
            modules = {name for name, _ in contexts}
            named = communicates(function) and spanned & {*function.axes}
            if named and modules and not modules & ran[number]:
                # The axis may be known to the caller alone.
                below = (n for context in contexts for n in self._code.below(number, context))
                quiet = (n for n in below if communicates(self._code.functions[n]))
                silent |= dict.fromkeys(n for n in quiet if not modules & ran[n])
        for number in self._suspects.weights if self._unsent else ():
            function = self._code.functions[number]
            could = communicates(function) and not PARAMETERS.isdisjoint(tokens(function.name))
            if could and function.part is Phase.GRADIENTS and not ran[number]:
                silent[number] = None
        own = pattern(self._suspects.module)
        for number in silent:
            # What is right in another module, where it sent nothing either, need not send anything.
            if self._norms.alike[number] <= ran[number] | {own}:
                self._suspects.is_silent(number)

    def _by_norms(self) -> None:
        """For what returned something else, and for what only this run calls there."""
        suspects = self._suspects
        for number in self._norms.straying.keys() & suspects.weights.keys():
            suspects.weights[number] = 1.0
            suspects.add(number, Clue.STRAYS, _STRAYS * self._norms.straying[number])
        for number in self._norms.called & suspects.weights.keys():
            suspects.add(number, Clue.LAYOUT, _STRAYS / 2)

    def _summands(self) -> None:
        """For a module's own code, which has to add up what it computes."""
        own = self._code.number(anchor_of(self._ledger.sources, self._verdict))
        is_sum = Cause.PARTIAL in self._causes and self._verdict.kind is Kind.OUTPUT
        if is_sum and own is not None and own in self._suspects.weights:
            self._suspects.add(own, Clue.RAN, _ADDS)

    def _marks(self) -> None:
        """For what marks a parameter whose gradient is wrong, or selects parameters by marks."""
        suspects, kind, code = self._suspects, self._verdict.kind, self._code
        partial = self._ledger.sources.calls.partial.get(pattern(self._verdict.name), ())
        unequal = {*partial} - _OF_ONE_COPY
        for number in code.at[BUILDING] if unequal and kind in OF_PARAMETERS else ():
            if not unequal.isdisjoint(code.functions[number].marks):
                suspects.weights[number] = 1.0
                suspects.add(number, Clue.MARKS, _UNEQUAL)
        # Collectives, in which something may be lost, do not select.
        if kind not in (Kind.MAIN_GRAD, Kind.COUNTED) or self._lack is Lack.LOST:
            return
        separating = self._outcomes.separating(kind, self._ledger.sources.calls.marks)
        for number in [*suspects.choosing()] if self._few else ():
            suspects.weights[number] = 1.0
            fits = not separating or not separating.isdisjoint(code.functions[number].marks)
            suspects.add(number, Clue.SELECTS, _CHOOSES if fits else 1.0)
        missing = kind is Kind.MAIN_GRAD and Cause.PARTIAL in self._causes
        set_here = {*self._ledger.sources.calls.marks.get(pattern(self._verdict.name), ())}
        selecting = {mark for n in self._reducing for mark in self._code.functions[n].marks}
        lost = Cause.PARTS in self._causes if set_here & selecting else missing and bool(selecting)
        # What lacks a reduction by a choice is not most of them.
        chosen = missing and self._few and not lost
        for number in list(suspects.weights):
            marks = {*self._code.functions[number].marks}
            is_built = Clue.BUILT in suspects.clues[number]
            if is_built and lost and marks & selecting:
                # The reduction selects parameters by marks that this one lacks, or has wrongly:
                # what the user changed may have removed those that unchanged code sets.
                suspects.weights[number] = 1.0
                may_set = number in self._edited or not self._edited
                suspects.add(number, Clue.MARKS, _MARKS if may_set else _SEPARATES)
            elif is_built and marks and self._few and not missing:
                suspects.add(number, Clue.MARKS, 0.7)
            elif marks and chosen and not is_built and self._concerns(number):
                suspects.add(number, Clue.SELECTS, 1.5)
            if marks & separating:
                suspects.add(number, Clue.SELECTS, _SEPARATES)


def _sending(kind: Kind) -> dict[str, float]:
    """Words of functions that send a tensor between pipeline stages, with their points."""
    direction = "forward" if kind is Kind.INPUT else "backward"
    return dict.fromkeys(("send", "recv", "communicate", direction), 0.4)
