# SPDX-License-Identifier: Apache-2.0
"""The functions that ran in the traced steps: where, which results are right, what names say.

Also the numbers that functions pass on, and the process groups that they choose.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.placement.mesh import AXES
from megatron_ttrace.trace.collectives import Function, Ledger, Numbers, Phase, pattern
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import ChangedFunction
from megatron_ttrace.trace.findings import (
    Cause,
    Composed,
    Finding,
    InPart,
    Lack,
    Loss,
    LossShare,
    LossTerm,
    Term,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import is_within, module_of
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Kind, Outcome

type Context = tuple[str, Phase]
"""A module without the numbers of layers, and a part of the step."""

BUILDING: Context = ("", Phase.CONSTRUCTION)
_DEPTH = 6
"""Calls that are followed downwards."""
_SHOWN_BY = {Phase.FORWARD: (Kind.OUTPUT, Kind.ROUTING), Phase.BACKWARD: (Kind.GRAD_INPUT,)}


class Code:
    """The functions that ran; each is known by its number.

    Attributes:
        functions: by number.
        at: those of each context, in the order of their first calls.
        contexts: of each function, within the traced steps.
        first: when each function was first called there: how many others were before.
    """

    def __init__(self, ledger: Ledger) -> None:
        calls = ledger.sources.calls
        self.functions = calls.functions
        self.at: dict[Context, dict[int, None]] = defaultdict(dict)
        self.contexts: dict[int, set[Context]] = defaultdict(set)
        self.first: dict[int, int] = {}
        self._callers: dict[tuple[int, Context], list[int]] = defaultdict(list)
        self._callees: dict[tuple[int, Context], list[int]] = defaultdict(list)
        for function, caller, module, phase in calls.calls:
            context = module, phase
            self.at[context][function] = None
            if context != BUILDING:
                self.contexts[function].add(context)
                self.first.setdefault(function, len(self.first))
            self._callers[function, context].append(caller)
            self._callees[caller, context].append(function)
        self._numbers = {(f.file, f.name): number for number, f in enumerate(self.functions)}
        self._forwards: dict[str, dict[str, int | None]] = defaultdict(dict)
        for name, code in ledger.sources.modules.items():
            forward = self.number(ledger.sources.codes[code].forward)
            self._forwards[pattern(name)][name] = forward

    def number(self, where: str) -> int | None:
        """The function that ``file:line (function)`` names."""
        place = Place.of(where, Clue.RAN)
        return None if place is None else self.named(place.file, place.function)

    def named(self, file: str, name: str) -> int | None:
        """A function by its file and its qualified name."""
        return self._numbers.get((file, name))

    def changed(self, function: ChangedFunction) -> list[int]:
        """What changed of a function: itself, or functions inside of it, or any of a file."""
        if function.line and not function.function:
            return []
        # What has no name of its own (a lambda) belongs to what it is written in.
        starts = [f"{part}.<" for part in function.parts]
        starts = starts or [function.function and f"{function.function}."]
        return [
            number
            for (file, name), number in self._numbers.items()
            if file == function.file
            and (name in function.parts or any(f"{name}.".startswith(start) for start in starts))
        ]

    def ran(self, context: Context, module: str) -> Collection[int]:
        """What ran in a context in a module, inside it or around it.

        The same context of other layers may be of other modules: what only their ``forward`` leads
        to is left out.
        """
        forwards, ran = self._forwards.get(context[0], {}), self.at.get(context, {})
        own = {
            forward
            for name, forward in forwards.items()
            if is_within(name, module) or is_within(module, name)
        }
        others = {*forwards.values()} - own
        if not others or not own:
            return () if others else ran
        leading = {number: self._leading(number, context) for number in ran}
        return [n for n, leads in leading.items() if leads & own or others.isdisjoint(leads)]

    def _leading(self, function: int, context: Context) -> set[int | None]:
        """What leads to a function in a context; for a backward pass, also in the forward pass."""
        leading: set[int | None] = {*self.chain(function, context)}
        for number in self.chain(function, context) if context[1] is Phase.BACKWARD else ():
            if (twin := self.twin(number)) is not None:
                leading |= {*self.chain(twin, (context[0], Phase.FORWARD))}
        return leading

    def twin(self, function: int) -> int | None:
        """The forward function of the autograd function that this is the backward one of."""
        code = self.functions[function]
        head, _, name = code.name.rpartition(".")
        return self.named(code.file, f"{head}.forward") if name == "backward" else None

    def callers(self, function: int, context: Context) -> list[int]:
        """Functions that call a function in the same context."""
        callers = self._callers.get((function, context), ())
        return [caller for caller in callers if caller in self.at[context]]

    def calling(self, words: set[str], context: Context) -> set[int]:
        """What calls, in a context, functions with all these words in their names, and has not."""
        ran = self.at.get(context, ())
        named = {n for n in ran if words <= {*tokens(self.functions[n].name)}}
        return {caller for n in named for caller in self.callers(n, context)} - named

    def entered_by(self, function: int, inside: Context, outside: Context) -> list[int]:
        """What calls a module's function from the context around it, past any ``__call__``."""
        entering: dict[int, None] = {}
        for call in (waiting := [(function, inside)]):
            for caller in self._callers.get(call, ()):
                if caller >= 0 and self.functions[caller].name.endswith(".__call__"):
                    waiting += [(caller, outside)] * ((caller, outside) not in waiting)
                elif caller >= 0:
                    entering[caller] = None
        return list(entering)

    def entering(self, phases: Iterable[Phase]) -> set[int]:
        """What calls, from another part of the step, functions that run in one of these."""
        entered = ((call, by) for call, by in self._callers.items() if call[1][1] in phases)
        return {
            caller
            for (_, context), callers in entered
            for caller in callers
            if caller not in self.at[context]
        }

    def helpers(self, function: int) -> list[int]:
        """What a schedule's function calls for the loss, outside of modules."""
        parts = Phase.OPTIMIZER, Phase.OTHER
        return [
            called for part in parts for called in self._callees.get((function, ("", part)), ())
        ]

    def chain(self, function: int, context: Context, factor: str = "") -> list[int]:
        """A function and all that leads to it in the same context, the nearest first.

        With a ``factor`` only as far as callers name it.
        """
        chain = [function]
        for number in chain:
            for caller in self.callers(number, context):
                is_naming = not factor or factor in self.functions[caller].factors
                if is_naming and caller not in chain:
                    chain.append(caller)
        return chain

    def users(self, function: int, contexts: Iterable[Context] = ()) -> Iterator[int]:
        """What calls an autograd function from another file, given its backward pass."""
        if (twin := self.twin(function)) is None:
            return
        for context in contexts or self.contexts[twin]:
            file, chain = self.functions[twin].file, self.chain(twin, context)
            yield from [number for number in chain if self.functions[number].file != file][:1]

    def compute(self, functions: Iterable[int], index: int) -> bool:
        """Whether one of these functions computes a statistic, by its name."""
        words = COMPUTE.get([*Statistic][index], set())
        return any(words <= {*tokens(self.functions[number].name)} for number in functions)

    def below(self, function: int, context: Context, but: Collection[int] = ()) -> dict[int, int]:
        """A function and what it called, ``but`` some, and these in turn; each with its depth."""
        depths = {function: 0}
        for number in (waiting := [function]):
            for called in self._callees.get((number, context), ()):
                if called not in depths and called not in but and depths[number] < _DEPTH:
                    depths[called] = depths[number] + 1
                    waiting.append(called)
        return depths


class Outcomes:
    """What passed and what failed, by name (without numbers) and kind."""

    def __init__(self, verdicts: Iterable[Judged]) -> None:
        self._failed: set[tuple[str, Kind]] = set()
        self._passed: set[tuple[str, Kind]] = set()
        absent = {Outcome.EXTRA, Outcome.MISSING}
        for verdict in verdicts:
            absent -= {verdict.verdict} if verdict.kind is Kind.INPUT else set()
            key = pattern(module_of(verdict.name)), verdict.kind
            if verdict.verdict.is_failure:
                self._failed.add(key)
            elif verdict.verdict is Outcome.PASS:
                self._passed.add(key)
        self._passed -= self._failed
        # Microbatches that are there twice are as many as the reference's.
        self.is_repeated = not absent

    def names(self, kind: Kind) -> set[str]:
        """Tensors of a kind that fail."""
        return {name for name, other in self._failed if other is kind}

    def separating(self, kind: Kind, marked: Mapping[str, Collection[str]]) -> set[str]:
        """Marks of the parameters that fail in this kind of tensor, and of no other parameter.

        ``marked``: marks by the parameter's name, without numbers.
        """
        failed = [{*marked[name]} for name in self.names(kind) if name in marked]
        others = (marks for name, marks in marked.items() if (name, kind) not in self._failed)
        return set.intersection(*failed).difference(*others) if failed else set()

    def losses(self) -> dict[str, bool]:
        """By name, whether all numbers that are logged of a loss are right."""
        metrics = dict.fromkeys(self.names(Kind.METRIC), False)
        metrics |= {name: True for name, kind in self._passed if kind is Kind.METRIC}
        return {name: right for name, right in metrics.items() if "loss" in name.split("_")}

    def count(self, contexts: Collection[Context], kind: Kind) -> tuple[int, int]:
        """In how many all that a module made is right; if gradients are wrong, where these are."""
        wrong = [it for it in contexts if kind is Kind.MAIN_GRAD and self.failed(kind, it[0])]
        others = [it for it in contexts if it not in wrong]
        return sum(map(self.is_right, others)), len(wrong)

    def is_right(self, context: Context) -> bool:
        """Whether what modules make there passes, if it is judged."""
        name, phase = context
        return any((name, kind) in self._passed for kind in _SHOWN_BY.get(phase, ()))

    def failed(self, kind: Kind, module: str) -> bool:
        """Whether a tensor of a kind of a module's own parameters fails."""
        owner = pattern(module_of(module))
        return any(name.rpartition(".")[0] == owner for name in self.names(kind))

    def share(self, kind: Kind, like: str = "") -> float:
        """How many of the tensors of a kind fail, of those that were judged.

        ``like``: only experts, if this is one, or only what is none.
        """
        # What is counted, or a group's, passes as a whole: one of all parameters.
        is_whole = kind in (Kind.COUNTED, Kind.HYPERPARAMETERS)
        whole = Kind.MAIN_GRAD if is_whole else kind
        failed = self.names(kind)
        judged = {name for name, other in self._failed | self._passed if other is whole} | failed
        # The weights of all experts are one.
        failed, judged = ({n.rstrip("0123456789") for n in names} for names in (failed, judged))
        if like:
            expert = is_within_experts(like)
            failed, judged = (
                {name for name in names if is_within_experts(name) is expert}
                for names in (failed, judged)
            )
        return len(failed) / max(1, len(judged))


READING = {"batch", "data", "dataset", "iterator", "loader", "sampler"}
"""Words in the names of functions that read data."""
COUNTING = {"microbatches", "batches"}
"""Words in the names of functions that decide how many batches a step has."""
CHOOSING = {"sampler", "rank", "ranks"}
"""Words in the names of functions that choose a rank's samples, whatever is in these."""
DIVIDING = {"batch"}
"""Words in the names of functions that divide among ranks what was read."""
_COMMUNICATE = {"reduce", "allreduce", "gather", "scatter", "broadcast", "sync"}
_OF_CLASS = {"forward", "backward", "apply", "symbolic"}
"""Methods that do what their class is named for."""
PARAMETERS = {"param", "params"}
DRAWING = {"rng", "tracker"}
"""Words in the names of functions that have the random states of a tensor-parallel rank."""
REDRAWING = {"rng", "checkpoint", "checkpointed", "recompute"}
"""Words in the names of functions that recompute, or keep random states for that."""
EVERYWHERE = {"decoder", "layers", "model", "weight", "bias", "grad"}

WORDS: dict[object, str] = {
    Lack.UNFILLED: "copy grads",
    Lack.LEFT_OUT: "filter grads duplicate shared",
    Kind.MAIN_GRAD: "grad grads gradient gradients",
    Kind.GRAD_NORM: "norm",
    Kind.GRAD_OUTPUT: "grad gradient gradients",
    Kind.GRAD_INPUT: "grad gradient gradients checkpoint",
    Kind.LOSS: "loss",
    Kind.PARAM: "param params sync gather",
    Kind.PARAM_DELTA: "step param params",
    Kind.HYPERPARAMETERS: "group groups",
    Kind.INITIAL: "initialize reset",
    Kind.ROUTING: "routing topk",
    Kind.DROPOUT: "dropout random rng states checkpoint",
    Statistic.NUM_ZEROS: "count zeros",
    Statistic.PARAMS_NORM: "params norm",
    Statistic.CLIPPED: "clip norm grad",
    Statistic.STEPPED: "step group groups",
    Loss.AUXILIARY: "aux loss",
    Loss.SEQUENCE: "aux seq loss",
    Loss.GLOBAL: "aux global loss",
    Loss.Z: "z loss",
    Loss.MTP: "mtp loss",
    Loss.INDEXER: "indexer loss",
    Cause.LAYERS: "layers num pipeline",
    Cause.LAYER_NUMBERS: "layer offset",
    Cause.FROZEN: "freeze frozen",
    Cause.THAWED: "freeze frozen",
    Term.LOGARITHM: "loss log",
    Term.LABEL: "predicted target label",
    Term.SOFTMAX: "softmax exp loss",
    "clipping": "clip",
    "loss_scale": "loss scale",
    "auxiliary": "aux loss",
}
"""Words in the names of functions that make something, or apply a factor."""
NAMED: dict[object, set[str]] = {
    key: {*WORDS[key].split()}
    for key in ("clipping", "loss_scale", "auxiliary", *Loss)
    if key in WORDS
}
"""Words in the names of factors: of those that a finding names, and of losses."""


COMPUTE: dict[Statistic, set[str]] = {
    Statistic.GRAD_NORM: {"norm"},
    Statistic.NUM_ZEROS: {"zeros"},
    Statistic.PARAMS_NORM: {"params", "norm"},
}
"""Words in the names of functions that compute a statistic."""


@functools.cache
def tokens(name: str) -> tuple[str, ...]:
    """The words of a name, in lower case."""
    return tuple(word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))


def communicates(function: Function) -> bool:
    """Whether a function sends something, by its name.

    Of an autograd function, the class has the name; other methods of a class may do anything.
    """
    name = function.name.rpartition(".")[2]
    words = tokens(function.name if name in _OF_CLASS else name)
    return not _COMMUNICATE.isdisjoint(words) or "alltoall" in "".join(words)


def loss_of(function: Function) -> Loss | None:
    """The loss that a function is named for."""
    words = {*tokens(function.name)}
    fits = {loss: len(NAMED[loss]) for loss in Loss if NAMED.get(loss, {""}) <= words}
    return max(fits, key=lambda loss: fits[loss], default=None)


_DATA = {"dp", "edp", "cp"}
_EQUAL = 1e-3
"""How near a number must be to a factor."""


def origins(
    ledger: Ledger, expected: Numbers, ratios: Sequence[float], axes: Collection[str] = ()
) -> set[int]:
    """Functions that make a number which is off by one of these ratios, or by its inverse.

    Such a function returns the number or passes it to others; it was not given it, and nothing that
    it calls has returned it. What the reference's functions are given and return is ``expected``. A
    data-parallel rank's share of that may yet be summed, and is not off; if the error itself is the
    size of such ``axes``, no function need have looked it up. Nor is the inverse, in a schedule: a
    rank's means are over fewer microbatches.
    """
    calls = ledger.sources.calls
    off = [value for ratio in ratios for value in (ratio, 1 / ratio) if not _near(ratio, 1.0)]
    sizes = {max(ratio, 1 / ratio) for ratio in ratios if not _DATA.isdisjoint(axes)}
    shares = {1.0, *sizes} | {
        lookup.size for lookup in calls.lookups if not _DATA.isdisjoint(lookup.group.split("-"))
    }
    given: set[int] = set()
    returning: set[int] = set()
    for number, function in enumerate(calls.functions):
        right = expected.get(function.where, {})
        fewer = {1 / size for size in shares} if function.part is Phase.SCHEDULE else set()
        for name, values in ledger.numbers.get(function.where, {}).items():
            if _is_off(values, right.get(name, ()), off, shares | fewer):
                (given if name else returning).add(number)
    callees: dict[int, set[int]] = defaultdict(set)
    for call in calls.calls:
        callees[call.caller].add(call.function)
    return {
        number
        for number in {*callees, *returning} - given - {-1}
        if (number in returning or not given.isdisjoint(callees[number]))
        and returning.isdisjoint(callees[number] - {number})
    }


def _is_off(
    values: Iterable[float], right: Sequence[float], off: Sequence[float], shares: Collection[float]
) -> bool:
    """Whether a number that the reference lacks is one of the reference's times a factor."""
    return any(
        _near(value, expected * factor)
        for value in values
        if not any(_near(value * size, expected) for size in shares for expected in right)
        for expected in right
        for factor in off
    )


def _near(value: float, other: float) -> bool:
    return abs(value - other) <= _EQUAL * abs(other)


def is_given(
    ledger: Ledger, expected: Numbers, function: Function, ratios: Sequence[float]
) -> bool:
    """Whether a factor that a function was given is one of these ratios, or its inverse.

    The backward pass of an autograd function uses what other methods of it were given. A factor
    that the reference's function was not given is to be blamed on what gave it.
    """
    head, _, name = function.name.rpartition(".")
    users: Sequence[Function] = [function]
    if head and name == "backward":
        functions = ledger.sources.calls.functions
        users = [other for other in functions if other.name.startswith(f"{head}.")]
    return any(
        abs(abs(value) / ratio - 1) < _EQUAL < abs(ratio - 1)
        for user in users
        for factor in user.factors
        for value in _shared(user.where, factor, ledger.numbers, expected)
        for error in ratios
        for ratio in (error, 1 / error)
    )


def _shared(where: str, name: str, numbers: Numbers, expected: Numbers) -> list[float]:
    """The values of a number that the reference also has, or all if it has none."""
    values, right = (known.get(where, {}).get(name, ()) for known in (numbers, expected))
    return [v for v in values if not right or any(_near(v, other) for other in right)]


def choosing_without(ledger: Ledger, axes: set[str]) -> dict[int, int]:
    """Functions of the step that name one of these axes, and choose only groups over others.

    With the line where each does so first.
    """
    calls = ledger.sources.calls
    chosen: dict[int, list[bool]] = defaultdict(list)
    lines: dict[int, int] = {}
    for lookup in calls.lookups:
        if lookup.phase is not Phase.CONSTRUCTION:
            spanned = {*lookup.group.split("-")}
            # Which axes a group without such a name spans is not known.
            may_fit = lookup.size > 1 and (not spanned <= {*AXES} or not spanned.isdisjoint(axes))
            chosen[lookup.function].append(may_fit)
            lines.setdefault(lookup.function, lookup.line)
    return {
        number: lines[number]
        for number, fits in chosen.items()
        if not any(fits) and not axes.isdisjoint(calls.functions[number].axes)
    }


def complementary(finding: Finding) -> bool:
    """Whether no element is wrong on all ranks that are wrong in a part."""
    spans = [span for _, span, _ in finding.spans] if isinstance(finding, InPart) else []
    return len(spans) > 1 and max(a for a, _ in spans) > min(b for _, b in spans)


def parts_of(finding: Finding | None) -> Iterator[Finding]:
    """A finding and those that it consists of."""
    if finding is not None:
        yield finding
    match finding:
        case Composed(steps=steps):
            for step in steps:
                yield from parts_of(step)
        case LossShare(fault=fault) | LossTerm(fault=fault) | InPart(fault=fault):
            yield from parts_of(fault)
