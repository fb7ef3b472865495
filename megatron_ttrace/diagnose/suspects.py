# SPDX-License-Identifier: Apache-2.0
"""The functions that may have made a wrong tensor, each with a weight from 0 to 1.

For an activation, they are what ran in its module in that direction; for the gradient of an
activation, also the forward pass of its autograd functions, and what sets something for these; for
a gradient of a parameter or an update, that part of the step; for what is wrong before a step, what
its module's constructor called; for a logged number, what names it and what logs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator

from megatron_ttrace.diagnose import by_purpose
from megatron_ttrace.diagnose.anchors import anchor_of, arrives, is_of_parameters, is_redrawn
from megatron_ttrace.diagnose.code import (
    BUILDING,
    COUNTING,
    DIVIDING,
    DRAWING,
    READING,
    REDRAWING,
    Code,
    Outcomes,
    tokens,
)
from megatron_ttrace.trace.collectives import Ledger, Phase, pattern
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Finding,
    Lack,
    LossShare,
    Miscounted,
    OtherSetting,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import around, module_of
from megatron_ttrace.trace.places import Clue
from megatron_ttrace.trace.records import MOMENTS, ROOT, Direction, Kind, Outcome

OF_PARAMETERS = {
    *(Kind.INITIAL, Kind.LOADED, Kind.PARAM, Kind.MAIN_GRAD, Kind.COUNTED, Kind.BUFFER),
    *(Kind.HYPERPARAMETERS, Kind.PARAM_DELTA, *MOMENTS),
}
_HELD = (Cause.LAYERS, Cause.LAYER_NUMBERS, Cause.FROZEN, Cause.THAWED)
FEW = 0.5
"""Share of the tensors of a kind."""
_INSIDE = 0.3
"""Weight of what ran in a module inside the one concerned, or on the wrong side of the model."""
_SETS = (2.5, 3.0)
"""Points for what a module computes itself; for what it is given by the module around it."""
_DEEPER, _FARTHER = 0.9, 0.85
"""Weights by the number of calls from a constructor, and of modules around it."""
_F, _B, _G = Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENTS
_ALL, _STEP = frozenset(Phase), frozenset(Phase) - {Phase.CONSTRUCTION}


class Suspects:
    """The suspects of one failed tensor.

    Attributes:
        weights: by number of the function.
        clues: what speaks for a function by the way it was found, with points.
        few: whether most tensors of this kind pass.
    """

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
        """``sent``: it was right on the ranks that sent it."""
        self.weights: dict[int, float] = {}
        self.clues: dict[int, dict[Clue, float]] = defaultdict(dict)
        self._code, self._sources = code, ledger.sources
        self._verdict, self._finding = verdict, finding
        self._cause = finding.cause if finding else None
        self.few = outcomes.share(verdict.kind) < FEW
        # The gradients of the module's parameters fail, too.
        self._is_repeated = outcomes.is_repeated
        drawn = () if verdict.verdict is Outcome.NONFINITE else outcomes.names(Kind.INITIAL)
        self._are_given = len({name.rpartition(".")[0] for name in drawn}) > 1
        self._whole, self._right = outcomes.failed(Kind.MAIN_GRAD, verdict.name), outcomes.losses()
        self._owner = self.module = module_of(verdict.name)
        if verdict.kind in OF_PARAMETERS:
            self._owner = self.module.rpartition(".")[0] or ROOT
        if sent:
            self._part(Phase.SCHEDULE, 1.0)
            return
        self._find()
        if (anchor := code.number(anchor_of(self._sources, verdict))) is not None:
            self._take([anchor], self.weights.get(anchor, 0.8))
            built = verdict.kind in OF_PARAMETERS and verdict.direction is Direction.START
            points = 0.3 * (verdict.direction is not Direction.GRADIENT)
            self.add(anchor, Clue.BUILT if built else Clue.RAN, points)

    def add(self, function: int, clue: Clue, points: float) -> None:
        """Let a clue speak for a function with at least so many points."""
        clues = self.clues[function]
        clues[clue] = max(points, clues.get(clue, 0.0))

    def is_silent(self, function: int) -> None:
        """It communicates by its name, but did not: perhaps it was called wrongly."""
        self.add(function, Clue.SILENT, 1.5)
        for user in self.weights.keys() & {*self._code.users(function)}:
            self._take([user], 1.0)
            self.add(user, Clue.CALLS, 1.2)

    def choosing(self) -> Iterator[int]:
        """What names marks where parameters are divided among optimizers, or left out of a sum."""
        lack = self._finding.lack if isinstance(self._finding, Miscounted) else None
        return by_purpose.choosing(self._code, lack, self._verdict.index)

    def _find(self) -> None:
        kind, direction = self._verdict.kind, self._verdict.direction
        by_kind: dict[Kind, Callable[[], None]] = {
            Kind.METRIC: self._logged,
            Kind.TOKENS: self._data,
            Kind.DROPOUT: self._mask,
            Kind.PRECISION: self._precision,
            Kind.GRAD_OUTPUT: self._output_gradient,
            Kind.LOSS: self._loss,
            Kind.MAIN_GRAD: self._parameter_gradient,
            Kind.BUFFER: self._buffer,
        }
        by_direction = {
            Direction.START: self._start,
            Direction.FORWARD: self._output,
            Direction.BACKWARD: self._input_gradient,
            Direction.GRADIENT: self._statistic,
            Direction.UPDATE: self._update,
        }
        of_result = by_kind.get(kind, by_direction[direction])
        if self._cause is Cause.NOT_GATHERED:
            self._part(Phase.PARAMETERS, 1.0)
            self._part(_G, 0.6, 0.4)
            return
        find = self._input if arrives(self._verdict) else of_result
        (self._precision if self._cause is Cause.RECOMPUTED else find)()
        if isinstance(self._finding, OtherSetting):
            # The module's own constructor, and the next one around it.
            module = self._finding.module
            built = map(self._constructor, (module, *around(module)))
            for number, points in zip((n for n in built if n is not None), _SETS, strict=False):
                self._take([number], 1.0)
                self.add(number, Clue.BUILT, points)

    # By what went wrong

    def _data(self) -> None:
        """What reads data, by its name; the script's functions that are not called too late."""
        weight = 0.8
        if self._verdict.verdict in (Outcome.EXTRA, Outcome.MISSING) and not self._is_repeated:
            self._named(COUNTING, 1.0)  # less likely is what reads each of the batches
            weight = 0.4
        self._named(READING, weight)
        self._part(Phase.SCRIPT, weight, weight)
        self._less_likely(lambda first, model: first > model)

    def _mask(self) -> None:
        """What chooses a random state ran in the module or around it; recomputations restore it."""
        if is_redrawn(self._verdict):
            self._named(REDRAWING, 1.0, (_B,))
            return
        for depth, name in enumerate((self.module, *around(self.module))):
            self._take(self._ran_in(name, _F), _FARTHER**depth)
            for caller in self._code.calling(DRAWING, (pattern(name), _F)):
                self._take([caller], 1.0)
                self.add(caller, Clue.DRAWS, 2.0)

    def _start(self) -> None:
        functions = self._code.functions
        if self._cause is Cause.RANDOM_STATE:
            self._take((n for n in self._code.at[BUILDING] if "seed" in functions[n].name), 1.0)
            return
        # If most values or shapes are wrong, it is less likely the constructors of these modules.
        verdict = self._verdict
        few = self.few or not (verdict.kind is Kind.INITIAL or verdict.verdict is Outcome.SHAPE)
        self._built(self._owner, 1.0 if few else 0.5)
        self._built(self.module, 1.0 if few else 0.5)
        is_held = self._cause in _HELD
        for distance, outer in enumerate(around(self._owner), 1):
            farther = (1.0 if few else 0.5) * _FARTHER**distance
            self._built(outer, 1.0 if is_held else farther, whole=is_held)
        if is_held:
            self._built(ROOT, 1.0)  # the model itself may choose, or freeze, its layers
            self._named({"freeze", "frozen"}, 1.0)
        self._part(_G, 0.0, 0.4 if few else 1.0)
        self._part(Phase.OPTIMIZER, 0.0, 0.4)
        self._part(Phase.SCRIPT, 0.0, 0.4)
        if verdict.kind in (Kind.INITIAL, Kind.MAIN_GRAD):
            self._take((n for n in self._code.at[BUILDING] if functions[n].own), 1.0)
        for maker in by_purpose.initializing(self._code, verdict.kind) if self._are_given else ():
            self._take([maker], 1.0)
            self.add(maker, Clue.SETS, 1.0)

    def _named(self, words: set[str], weight: float, phases: Collection[Phase] = _ALL) -> None:
        """What reads data, or recomputes, by its name, and ran in these parts of the step."""
        functions = self._code.functions
        for ran in (ran for at, ran in self._code.at.items() if at[1] in phases):
            named = ((number, {*tokens(functions[number].name)}) for number in ran)
            # Data parallelism reads no data.
            hits = ((n, has - {"data"} if "parallel" in has else has) for n, has in named)
            self._take((n for n, has in hits if not words.isdisjoint(has)), weight)

    def _input(self) -> None:
        if self.module == ROOT:
            # The data pass: what divides a batch among ranks, and sends it.
            self._part(Phase.SCHEDULE, 1.0)
            self._part(Phase.SCRIPT, 1.0)
            self._named(DIVIDING, 0.8, _STEP)
            self._less_likely(lambda first, model: first > model)
            return
        self._ran(self._container(), _F, 1.0)
        # The container may pass on what it was given itself.
        for distance, outer in enumerate(around(self._container()), 1):
            self._take(self._ran_in(outer, _F), _FARTHER**distance)
        code, first = self._sources.of(self.module), self._code.first
        if code is not None and (number := self._code.number(code.forward)) is not None:
            began = first.get(number, 0)  # what the model ran before may have made the input
            self._take((n for n in self._ran_in(ROOT, _F) if first[n] < began), _FARTHER)
            inside, outside = (pattern(self.module), _F), (pattern(self._container()), _F)
            for caller in self._code.entered_by(number, inside, outside):
                self._take([caller], 1.0)
                self.add(caller, Clue.PASSES, 1.5)

    def _loss(self) -> None:
        # The model's own output passes, or it would be the culprit.
        self._part(Phase.SCHEDULE, 1.0)
        self._part(Phase.SCRIPT, 1.0)
        self._less_likely(lambda first, model: first < model)
        self._ran(ROOT, _F, _INSIDE)

    def _less_likely(self, where: Callable[[int, int], bool]) -> None:
        """What was first called after the model, or before it: by when both were."""
        first = self._code.first
        ran = [first[number] for number in self._code.at.get((pattern(ROOT), _F), ())]
        for number in self.weights if ran else ():
            if where(first.get(number, min(ran)), min(ran)):
                self.weights[number] *= _INSIDE

    def _output(self) -> None:
        self._ran(self.module, _F, 1.0)
        # Forward hooks of the script run when the module has ended.
        around_it = self._ran_in(self._container(), _F)
        functions = self._code.functions
        self._take((n for n in around_it if functions[n].part is Phase.SCRIPT), _DEEPER)
        self._built_by(self.module, 0.5)

    def _output_gradient(self) -> None:
        outer = self._container()
        if isinstance(self._finding, ConstantFactor) and self._finding.unscaled:
            self._part(Phase.SCHEDULE, 1.0)
            for number in by_purpose.dividing(self._code, self.weights):
                self.add(number, Clue.AXIS, 2.0)
        self._ran(outer, _B, 0.6)
        self._differentiated(outer, 1.0)
        self._ran(outer, _F, 0.4)
        self._ran(self.module, _B, 0.3)
        self._set_for(outer, 0.9)
        if self.module == ROOT:
            self._part(Phase.SCHEDULE, 1.0)
            self._part(Phase.SCRIPT, 1.0)

    def _input_gradient(self) -> None:
        finding = self._finding
        if isinstance(finding, LossShare) and self._right:
            self._share(finding)
            return
        # Shares of losses are computed in the forward pass; wrong main gradients are older.
        forward = isinstance(finding, LossShare) or (self._whole and finding is None)
        self._ran(self.module, _B, 0.6 if forward else 0.8)
        self._differentiated(self.module, 0.6 if forward else 1.0)
        self._ran(self.module, _F, 1.0 if forward else 0.6)
        # A wrong scale makes a wrong share, which would have been found.
        self._set_for(self.module, 0.9 if finding else 0.3)
        # It is computed from what was recomputed, if anything was.
        self._named({"checkpoint"}, 1.0 * (finding is None), (_F, _B))

    def _share(self, finding: LossShare) -> None:
        """What computes a loss beside the module's output, and what scales its gradient."""
        # A loss that is logged rightly was computed rightly.
        right = all(self._right.values())
        # All losses have one scale: if others have the right share, it is right.
        of_scale = right and len(self._right) <= len(finding.losses)
        self._ran(self.module, _B, 0.9 if of_scale else 0.3)
        self._ran(self.module, _F, 0.6 if of_scale else 1.0)
        self._set_for(self.module, 1.0 if of_scale else 0.3)
        # What attaches a loss to the graph was given what is logged.
        for _, twin in self._autograd(self.module):
            for caller in self._code.callers(twin, (pattern(self.module), _F)):
                self.weights[caller] *= 1.0 if right else 0.6

    def _parameter_gradient(self) -> None:
        if self._cause in (Cause.FROZEN, Cause.THAWED):
            self._start()
            return
        if self._cause is Cause.PRECISION:
            # Gradients have the dtype of the buffers that they are accumulated in.
            self._part(_G, 0.3, 1.0)
            return
        # Less likely if most are right, and even less without a mark on this parameter.
        is_partial = self.few and self._cause is Cause.PARTIAL
        is_unknown = is_partial and not self._sources.calls.marks.get(pattern(self._verdict.name))
        self._part(_G, (0.4 if is_unknown else 0.6) if self.few else 1.0, 0.6)
        self._part(Phase.OPTIMIZER, 0.0, 0.6 if self.few else 0.3)
        self._ran(self._owner, _B, 1.0 if self.few else 0.7)
        self._ran(self._owner, _F, 1.0 if is_unknown else 0.3)
        weight = 0.3 if self.few else 0.6
        self._part(Phase.SCHEDULE, weight)
        # A loop of the user's own has to reduce them.
        self._part(Phase.SCRIPT, weight if self._sources.finalize else 1.0)
        # Gradients of weights may be computed after the backward pass.
        self._named(by_purpose.LATE, 0.8, _STEP)
        for number, distance in by_purpose.late(self._code, self._constructors()):
            if self._cause is Cause.ZERO:
                self._take([number], _FARTHER**distance)
                self.add(number, Clue.NAMES, 2.0)
        self._built_by(self._owner, 1.0 if is_unknown else 0.8 if self.few else 0.4)
        # What reduces gradients selects parameters by marks, which the user's code may set.
        functions, built = self._code.functions, self._code.at[BUILDING]
        self._take((n for n in built if functions[n].own and functions[n].marks), 1.0 * self.few)

    def _statistic(self) -> None:
        verdict, finding = self._verdict, self._finding
        if isinstance(finding, Miscounted) and finding.lack is Lack.UNGROUPED:
            self._update()
            return
        if is_of_parameters(verdict):
            code = self._code
            for number in [n for n in code.contexts if code.compute([n], verdict.index)]:
                for context in code.contexts[number]:
                    self._take(code.below(number, context), 1.0)
            return
        reduced = verdict.kind is Kind.COUNTED and verdict.index == Statistic.REDUCED.number
        if reduced and not self._sources.finalize:
            # A loop of the user's own has to call it.
            self._part(Phase.SCRIPT, 1.0)
            return
        self._part(Phase.OPTIMIZER, 0.3 if reduced else 1.0, 0.5)
        self._part(_G, 1.0 if reduced else 0.3, 0.3)
        # It may lack a mark: what selects it reads that, or tells copies from others by it alone.
        is_whole = not isinstance(finding, Miscounted) or finding.least > 0
        is_copied = self.few and (reduced or (self._cause is Cause.COUNTED_TWICE and is_whole))
        left_out = isinstance(finding, Miscounted) and finding.lack is Lack.LEFT_OUT
        marked = by_purpose.marking(self._code, self._constructor(self._owner))
        for number, weight in marked.items() if left_out or is_copied else ():
            self._take([number], weight if is_copied else 0.3)
            self.add(number, Clue.MARKS, 2.1 if is_copied else 1.5)

    def _update(self) -> None:
        # What updates other parameters rightly was not given this one, or not its values.
        is_built = self._cause in (Cause.NEVER_COUNTED, Cause.HYPERPARAMETERS)
        step, built = (0.6, 1.0) if is_built else (1.0, 0.6)
        self._part(Phase.OPTIMIZER, step, built)
        self._part(_G, 1.0 if self._verdict.kind is Kind.PARAM else 0.3, 0.4)
        if self._cause is Cause.HYPERPARAMETERS and self.few:
            for number, marks in by_purpose.grouping(self._code, self._constructors()):
                self._take([number], 1.0)
                self.add(number, Clue.MARKS, 0.8 * marks)

    def _precision(self) -> None:
        """A context around its forward pass, or around what recomputes that."""
        self._named({"fp8", "checkpoint", "checkpointed", "recompute"}, 0.8, (_F, _B))
        for outer in around(self.module):
            self._take(self._ran_in(outer, _F), 0.7)

    def _buffer(self) -> None:
        self._part(_G, 1.0, 0.4)
        self._ran(self._owner, _F, 0.7)
        self._part(Phase.OPTIMIZER, 0.2)

    def _logged(self) -> None:
        """What names the number, what ran beside its logging, and if few fail, what writes it."""
        name, code = self._verdict.name, self._code
        logging_all, writing = (0.8, 1.0) if self.few else (1.0, 0.9)
        logging: set[int] = set()
        if (logs := code.number(anchor_of(self._sources, self._verdict))) is not None:
            for context in code.contexts[logs]:
                logging |= set(code.chain(logs, context))
                for caller in code.callers(logs, context):
                    for called, depth in code.below(caller, context).items():
                        self._take([called], logging_all)
                        self.add(called, Clue.NAMES, 1.2 if depth < 2 else 0.5)
                        self._take(by_purpose.writing(code, called), writing)
        for number, function in enumerate(code.functions):
            for context in code.contexts[number]:
                if name in function.strings and number not in logging:
                    for called, depth in code.below(number, context).items():
                        self._take([called], 0.5 * _DEEPER**depth)
                        self.add(called, Clue.NAMES, 1.0 if depth < 2 else 0.3)
        self._take(by_purpose.computing(code, name), 1.0)

    # By where it ran

    def _take(self, functions: Iterable[int], weight: float) -> None:
        # What has no weight is no suspect, not even if the user changed it.
        for function in functions if weight else ():
            self.weights[function] = max(weight, self.weights.get(function, 0.0))

    def _container(self) -> str:
        """The innermost module around this one in which functions ran."""
        return next((name for name in around(self.module) if self._ran_in(name, _F)), ROOT)

    def _ran_in(self, module: str, phase: Phase) -> Collection[int]:
        return self._code.ran((pattern(module), phase), self.module)

    def _ran(self, module: str, phase: Phase, weight: float) -> None:
        name = pattern(module)
        for context in [*self._code.at]:
            if context[1] is phase and f"{context[0]}.".startswith(f"{name}."):
                inside = weight if context[0] == name else weight * _INSIDE
                self._take(self._code.ran(context, module), inside)

    def _part(self, part: Phase, weight: float, built: float = 0.0) -> None:
        """What ran in a part of the step, and what of the same files ran before any step."""
        functions = self._code.functions
        for context, ran in self._code.at.items():
            of_part = [number for number in ran if functions[number].part is part]
            if context[1] is part is Phase.SCHEDULE:
                # Schedules run everything: only what they call themselves.
                self._take(of_part, weight)
                for number in of_part:
                    self._take(self._code.helpers(number), weight * _DEEPER)
            elif context[1] is part is Phase.SCRIPT:
                self._take(of_part, weight)
                self._take(ran, weight * _INSIDE)
            elif context[1] is part:
                self._take(ran, weight)
            elif context == BUILDING and built:
                self._take(of_part, built)

    def _built(self, module: str, weight: float, *, whole: bool = True) -> None:
        """A module's constructor, and all it called (``whole``) but other modules' constructors."""
        sources, code = self._sources, self._code
        if (start := self._constructor(module)) is None:
            return
        others = {number for c in sources.codes if (number := code.number(c.built)) is not None}
        below = code.below(start, BUILDING, others - {start}) if whole else {start: 0}
        for function, depth in below.items():
            self._take([function], weight * _DEEPER**depth)
            self.add(function, Clue.BUILT, 0.0)

    def _built_by(self, module: str, weight: float) -> None:
        """Its constructor; what contains a module of another package gave it sizes and marks."""
        names = (module, *around(module))
        builder = next((name for name in names if self._constructor(name) is not None), ROOT)
        self._built(builder, weight, whole=builder == module)

    def _constructors(self) -> list[int | None]:
        """Those of the module that has the parameters, and of those around it."""
        return [*map(self._constructor, (self._owner, *around(self._owner)))]

    def _constructor(self, module: str) -> int | None:
        """A module's constructor, if it is Megatron's."""
        sources = self._sources
        like = (name for name in sources.modules if pattern(name) == pattern(module))
        module_code = sources.of(module if module in sources.modules else next(like, module))
        return self._code.number(module_code.built) if module_code else None

    def _differentiated(self, module: str, weight: float) -> None:
        """Autograd functions whose backward ran in a module, with all that they call."""
        name, code = pattern(module), self._code
        for number, twin in self._autograd(module):
            self._take(code.below(number, (name, _B)), weight)
            self._take(code.below(twin, (name, _F)), weight * 0.8)
            self._take(code.callers(twin, (name, _F)), weight * 0.7)
            # What serves many modules is less likely wrong than what uses it.
            places = [(name, _F)] if len({at for at, _ in code.contexts[number] if at}) > 1 else []
            for user in code.users(number, places) if places and not self._finding else ():
                self._take([user], weight)
                self.add(user, Clue.USES, 0.8)

    def _autograd(self, module: str) -> Iterator[tuple[int, int]]:
        """Backward functions that ran in a module, and the forward functions of their classes."""
        for number in self._ran_in(module, _B):
            if (twin := self._code.twin(number)) is not None:
                yield number, twin

    def _set_for(self, module: str, weight: float) -> None:
        """What sets something in a class whose backward ran in a module, as a loss's scale."""
        name, code = pattern(module), self._code
        backward = [code.functions[number] for number, _ in self._autograd(module)]
        heads = {(function.file, function.name.rpartition(".")[0]) for function in backward}
        for number, function in enumerate(code.functions):
            head, _, method = function.name.rpartition(".")
            if (function.file, head) in heads and method not in ("forward", "backward"):
                elsewhere = [context for context in code.contexts[number] if context[0] != name]
                self._take([number] if elsewhere else (), weight * _DEEPER)
                for caller in (c for context in elsewhere for c in code.callers(number, context)):
                    self._take([caller], weight)
                    self.add(caller, Clue.SETS, 0.3)
