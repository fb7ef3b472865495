# SPDX-License-Identifier: Apache-2.0
"""Where a failure begins; and where it does if only one of both runs has a tensor."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import around, is_within, module_of
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Direction, Kind, Outcome

ABSENT = (Outcome.MISSING, Outcome.EXTRA, Outcome.UNCOVERED)

At = tuple[int, str]
"""A microbatch, and a module in it."""


class Origin(NamedTuple):
    """A failure that is not a consequence of another one, and the module that it belongs to."""

    verdict: Judged
    module: str
    grounds: Grounds


def owner(parameter: str) -> str:
    """The module that a parameter belongs to."""
    return parameter.rpartition(".")[0] or parameter


def of_module(v: Judged) -> str:
    """The module that a tensor belongs to."""
    is_parameter = v.microbatch == STEP_LEVEL and v.kind is not Kind.PRECISION
    return owner(v.name) if is_parameter else v.name


def where_gradients_end(verdicts: Sequence[Judged]) -> list[Judged]:
    """The first gradient that was not computed, if any: in a module whose outputs have theirs.

    Of modules that contain each other it is the innermost.
    """
    backward = [v for v in verdicts if v.direction is Direction.BACKWARD]
    absent = [v for v in backward if v.verdict in ABSENT]
    reached = {
        (v.microbatch, v.name)
        for v in backward
        if v.kind is Kind.GRAD_OUTPUT and v.verdict not in ABSENT
    }
    ends = [v for v in absent if v.kind is Kind.GRAD_INPUT and (v.microbatch, v.name) in reached]
    ends = [v for v in ends if v.microbatch == ends[0].microbatch]
    inner = (
        v for v in ends if not any(v.name != w.name and is_within(w.name, v.name) for w in ends)
    )
    return [*inner, *absent][:1]


def absent_origins(verdicts: Sequence[Judged]) -> list[Origin]:
    """Absent modules: by their parameters, or by their activations if no parameter is absent.

    Where all parameters of a module are absent, it is named, and not each module in it.
    A gradient that is absent was not computed: that belongs to its own stage.
    """
    early = (Direction.START, Direction.FORWARD)
    absent = [v for v in verdicts if v.verdict in ABSENT and v.direction in early]
    if (other := _other_microbatch(verdicts, absent)) is not None:
        return [other]
    parameters: dict[Outcome, Counter[str]] = defaultdict(Counter)
    for v in verdicts:
        if v.kind is Kind.PARAM and v.direction is Direction.START:
            parameters[v.verdict].update(containers(v.name))
    totals = sum(parameters.values(), Counter())
    origins = []
    for v in absent:
        if v.kind is not Kind.PARAM:
            continue
        alike = parameters[v.verdict]
        absent_names = [name for name in containers(v.name) if alike[name] == totals[name]]
        module, grounds = owner(v.name), Grounds.ABSENT
        is_whole = absent_names and totals[absent_names[0]] > totals[module]
        if v.verdict is not Outcome.UNCOVERED and is_whole:
            # The innermost of those that have all these parameters.
            module = max(absent_names, key=lambda name: (totals[name], len(name)))
            grounds = Grounds.ABSENT_MODULE
        origins.append(Origin(v, module, grounds))
    if origins:
        return _of_another_kind(origins)
    # A module that was not called has no input, and called none of the modules inside it.
    uncalled = {
        (v.microbatch, v.name)
        for v in absent
        if v.verdict is Outcome.MISSING and v.kind is Kind.INPUT
    }
    outermost = [v for v in absent if uncalled.isdisjoint(places_around(v))]
    # Its parameters are there: it was built.
    built = {name for v in verdicts if v.kind is Kind.PARAM for name in around(v.name)}
    return [
        Origin(
            v,
            v.name,
            Grounds.NOT_CALLED
            if (v.microbatch, v.name) in uncalled and module_of(v.name) in built
            else Grounds.ABSENT,
        )
        for v in outermost
    ]


def _of_another_kind(origins: list[Origin]) -> list[Origin]:
    """With the smallest module around all of them, in layers that lack some and have others."""
    parameters: dict[str, dict[Outcome, list[str]]] = defaultdict(lambda: defaultdict(list))
    for origin in origins:
        name = origin.verdict.name
        parameters[_layer(name)][origin.verdict.verdict].append(name)
    both = {
        layer: _around_all((*lacks, *has))
        for layer, of in parameters.items()
        if layer and (lacks := of[Outcome.MISSING]) and (has := of[Outcome.EXTRA])
    }
    return [
        Origin(origin.verdict, module, Grounds.ANOTHER_KIND)
        if (module := both.get(_layer(origin.verdict.name)))
        else origin
        for origin in origins
    ]


def _around_all(parameters: Iterable[str]) -> str:
    """The smallest module that contains all of them."""
    words = zip(*(name.split(".")[:-1] for name in parameters), strict=False)
    return ".".join(word for word, *_ in itertools.takewhile(lambda w: len({*w}) == 1, words))


def _layer(name: str) -> str:
    """The outermost element of a list that a parameter is in; empty if there is none."""
    outermost_first = reversed([*around(name)])
    return next((module for module in outermost_first if module[-1].isdigit()), "")


def _other_microbatch(verdicts: Sequence[Judged], absent: Sequence[Judged]) -> Origin | None:
    """The first tensor of the first microbatch that only one of both runs has."""
    of_step = [v for v in verdicts if v.microbatch != STEP_LEVEL]
    for outcome, grounds in (
        (Outcome.EXTRA, Grounds.MORE_MICROBATCHES),
        (Outcome.MISSING, Grounds.FEWER_MICROBATCHES),
    ):
        common = {v.microbatch for v in of_step if v.verdict is not outcome}
        alone = (v for v in absent if v.verdict is outcome and v.microbatch != STEP_LEVEL)
        first = next((v for v in alone if v.microbatch not in common), None)
        if first is not None and common:
            twice = any(v.verdict is Outcome.EXTRA and v.microbatch in common for v in absent)
            repeated = outcome is Outcome.MISSING and twice
            return Origin(first, ROOT, Grounds.REPEATED_MICROBATCHES if repeated else grounds)
    return None


def containers(name: str) -> Iterator[str]:
    """The modules that contain a parameter or module, from the outermost; lists are none."""
    words = name.split(".")
    return (
        ".".join(words[:number]) for number in range(1, len(words)) if not words[number].isdigit()
    )


def places_around(verdict: Judged) -> Iterator[At]:
    """The modules around a module from the outermost: their first run, then the one of its own."""
    runs = dict.fromkeys(("", verdict.name.removeprefix(module_of(verdict.name))))
    names = containers(verdict.name)
    return ((verdict.microbatch, f"{name}{run}") for name in names for run in runs)
