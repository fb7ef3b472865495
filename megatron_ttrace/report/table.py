# SPDX-License-Identifier: Apache-2.0
"""Verdicts aggregated by layer and by cell. All outputs render these; none counts by itself.

A check yields tens of thousands of verdicts; a person wants one row per layer and direction, and a
map of layers by tensors. Both show the worst verdict of each group, never an average.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Self

from megatron_ttrace.report.wording import ranks_text
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import Culprit, Direction, Kind, LoadedIndex, Outcome, Verdict
from megatron_ttrace.trace.sanitise import clean

UNNAMED = "(unnamed)"
WHOLE_STEP = "(whole step)"
"""The row of what belongs to no layer."""
_FOLD = 3
"""As many layers alike, one after the other, are folded."""
UNMEASURED_MARGIN = 1e9
"""Stands for a failure without a number (a missing layer, NaN) where infinity cannot be shown."""

_PER_STEP = (Kind.COUNTED, Kind.HYPERPARAMETERS, Kind.METRIC)
"""One verdict for the step, if it passes."""
_STEPWISE = (Kind.TOKENS, Kind.LOSS, Kind.GRAD_NORM, Kind.METRIC)
_LAYER = re.compile(r"^((?:[^.]+\.)*?)layers\.\d+(?=\.|$)", re.DOTALL)
_NUMBER = re.compile(r"(?<=\blayers\.)\d{1,9}(?=\.|$)")
_DIRECTIONS = tuple(Direction)
_KINDS = {kind: position for position, kind in enumerate(Kind)}


def split_name(name: str, stacks: Collection[str] = ()) -> tuple[str, str]:
    """The layer of a canonical name, and the tensor within it, the same for all experts.

    A module beside the layers of a stack counts as a layer, and so does every other top-level
    module. These keep their own name in front of the tensor, so that the weights of two of them are
    different columns of a map::

        decoder.layers.3.mlp.linear_fc1 -> decoder.layers.3, mlp.linear_fc1
        decoder.final_layernorm.weight -> decoder.final_layernorm, final_layernorm.weight

    ``stacks`` are what precedes ``layers`` in names (:func:`stacks_of`).
    """
    if layer := _LAYER.match(name):
        within = name[layer.end() + 1 :].split(".")
        return layer[0], ".".join("*" if part.isdigit() else part for part in within) or "layer"
    parts = name.split(".")
    size = 2 if len(parts) > 1 and parts[0] in stacks else 1
    return ".".join(parts[:size]) or UNNAMED, ".".join(parts[size - 1 :]) or UNNAMED


def stacks_of(verdicts: Iterable[Verdict]) -> frozenset[str]:
    """The top-level modules that hold numbered layers."""
    names = {verdict.name for verdict in verdicts}
    return frozenset(layer[1][:-1] for name in names if (layer := _LAYER.match(name)))


def margin_of(verdict: Verdict) -> float | None:
    """The margin for ranking: a failure that could not be measured is worse than any number."""
    if verdict.verdict is Outcome.UNCHECKED or verdict.is_luck:
        return None
    if verdict.margin is None:
        return math.inf if verdict.verdict.is_failure else None
    return math.inf if math.isnan(verdict.margin) else verdict.margin


def severity(verdict: Verdict) -> tuple[int, float]:
    """Ranks verdicts: failures above passes above the unchecked, then by margin."""
    level = 2 if verdict.verdict.is_failure else int(verdict.verdict is Outcome.PASS)
    margin = margin_of(verdict)
    return level, -1.0 if margin is None else margin


def worst_of(verdicts: Iterable[Verdict], direction: Direction | None = None) -> Verdict | None:
    """The most severe verdict (of one direction); the earliest of equals: errors propagate."""
    chosen = (v for v in verdicts if direction is None or v.direction is direction)
    return max(chosen, key=severity, default=None)


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """The most severe of the verdicts in a row or a cell, the earliest of equals, and counts."""

    worst: Verdict
    total: int
    failures: int
    unchecked: int

    @classmethod
    def of(cls, verdicts: Sequence[Verdict]) -> Self:
        """Of at least one verdict."""
        counts = Counter(verdict.verdict for verdict in verdicts)
        failures = sum(count for outcome, count in counts.items() if outcome.is_failure)
        worst = max(verdicts, key=severity)
        return cls(worst, len(verdicts), failures, counts[Outcome.UNCHECKED])


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer in one direction; ``depth`` orders the layers from the model's first to its last.

    ``tensor`` names the worst tensor within the layer, ``first`` is the number of the first verdict
    that fails, or of the first one.
    """

    layer: str
    direction: Direction
    group: Group
    depth: int
    tensor: str
    first: int


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of the heat map: a tensor that every layer has.

    A parameter's own initial values share a column with its values before the step, and its values
    after the step with its change.
    """

    direction: Direction
    tail: str
    kind: Kind


Place = tuple[str, Column]
"""A cell of the heat map: a layer and a column."""


@dataclasses.dataclass(frozen=True, slots=True)
class HeatMap:
    """Layers in depth order, columns in execution order, and the cells that exist.

    ``places`` has the cell of every verdict.
    """

    layers: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[Place, Group]
    places: list[Place]


def _places(verdicts: Sequence[Verdict]) -> list[Place]:
    """The cell of every verdict; names repeat, so each is taken apart once."""
    stacks = stacks_of(verdicts)
    known: dict[tuple[str, Kind, Direction, bool], Place] = {}
    places = []
    for verdict in verdicts:
        fails = verdict.verdict.is_failure
        key = verdict.name, verdict.kind, verdict.direction, fails
        if key not in known:
            layer, tail = split_name(verdict.name, stacks)
            kind = verdict.kind
            if kind is Kind.PARAM and verdict.direction is Direction.UPDATE:
                kind = Kind.PARAM_DELTA
            is_number = (kind, verdict.index) == (Kind.LOADED, LoadedIndex.NUMBER)
            if (kind in _PER_STEP or is_number) and not fails:
                layer, tail = WHOLE_STEP, kind.value
            elif kind in (Kind.INITIAL, Kind.LOADED) and not is_number:
                kind = Kind.PARAM
            known[key] = layer, Column(verdict.direction, tail, kind)
        places.append(known[key])
    return places


def _depths(verdicts: Iterable[Verdict], places: Iterable[Place]) -> dict[str, int]:
    """The position of each layer in the depth of the model: by its first output, if it has one."""
    seen: dict[str, int] = {}
    computed: dict[str, int] = {}
    for position, (verdict, (layer, _)) in enumerate(zip(verdicts, places, strict=True)):
        seen.setdefault(layer, position)
        if verdict.kind is Kind.OUTPUT:
            computed.setdefault(layer, position)
    order = seen | computed
    return {layer: depth for depth, layer in enumerate(sorted(order, key=order.__getitem__))}


def layer_rows(verdicts: Sequence[Verdict]) -> list[LayerRow]:
    """Per layer and direction, worst first; equals in depth order."""
    places = _places(verdicts)
    depths = _depths(verdicts, places)
    positions: dict[tuple[str, Direction], list[int]] = defaultdict(list)
    for position, (verdict, (layer, _)) in enumerate(zip(verdicts, places, strict=True)):
        positions[layer, verdict.direction].append(position)
    stacks = stacks_of(verdicts)
    rows = []
    for (layer, direction), own in positions.items():
        group = Group.of([verdicts[position] for position in own])
        worst = group.worst
        tensor = f"{split_name(worst.name, stacks)[1]} {worst.kind.value}.{worst.index}"
        first = min(own, key=lambda position: not verdicts[position].verdict.is_failure)
        rows.append(LayerRow(layer, direction, group, depths[layer], tensor=tensor, first=first))
    return sorted(rows, key=_worst_first)


def _worst_first(row: LayerRow) -> tuple[float, ...]:
    level, margin = severity(row.group.worst)
    return -level, -margin, row.depth, _DIRECTIONS.index(row.direction)


def failing_rows(verdicts: Sequence[Verdict], culprits: Sequence[Culprit]) -> list[LayerRow]:
    """The rows with failures as errors propagate: the first culprit's, then in execution order."""
    rows = [row for row in layer_rows(verdicts) if row.group.failures]
    failures = [verdict for verdict in verdicts if verdict.verdict.is_failure]
    shown = culprits[0].shown_by(failures) if culprits else None
    origin = (split_name(shown.name, stacks_of(verdicts))[0], shown.direction) if shown else None
    return sorted(rows, key=lambda row: ((row.layer, row.direction) != origin, row.first))


def finite_margin(verdict: Verdict | None) -> float | None:
    """The margin for ranking as a number that a chart can show."""
    margin = margin_of(verdict) if verdict is not None else None
    return None if margin is None else min(margin, UNMEASURED_MARGIN)


def layer_margins(rows: Iterable[LayerRow]) -> dict[str, float]:
    """The worst margin of each layer in depth order, for charts."""
    worst: dict[str, float] = {}
    for row in sorted(rows, key=lambda row: row.depth):
        margin = finite_margin(row.group.worst)
        if margin is not None:
            worst[row.layer] = max(margin, worst.get(row.layer, 0.0))
    return worst


def heat_map(verdicts: Sequence[Verdict]) -> HeatMap:
    """Layer × tensor; of microbatches, iterations, indices and experts the worst.

    What belongs to the whole step is in one row, each in a column of its own.
    """
    places = [
        (WHOLE_STEP, column) if column.kind in _STEPWISE else (layer, column)
        for layer, column in _places(verdicts)
    ]
    members: dict[Place, list[Verdict]] = defaultdict(list)
    for verdict, place in zip(verdicts, places, strict=True):
        members[place].append(verdict)
    cells = {place: Group.of(alike) for place, alike in members.items()}
    columns = dict.fromkeys(column for _, column in places)
    order = {column: number for number, column in enumerate(columns)}

    def key(column: Column) -> tuple[int, int, int]:
        # Activations in execution order, where it means something; step-level kinds side by side.
        stepwise = column.direction in (Direction.START, Direction.UPDATE)
        kind = _KINDS[column.kind] if stepwise else 0
        return _DIRECTIONS.index(column.direction), kind, order[column]

    layers = tuple(sorted(_depths(verdicts, places), key=WHOLE_STEP.__eq__))
    return HeatMap(layers, tuple(sorted(order, key=key)), cells, places)


def folds(heat_map: HeatMap) -> dict[str, str]:
    """The rows that can be shown as one: layer -> name of the row for it and its neighbours.

    Three or more consecutive layers of a stack with the same cells, which all pass, fail, or are
    unchecked alike.
    """
    looks: dict[str, set[tuple[Column, int]]] = defaultdict(set)
    for (layer, column), group in heat_map.cells.items():
        looks[layer].add((column, severity(group.worst)[0]))
    runs: list[list[str]] = []
    for layer in heat_map.layers:
        number = _NUMBER.search(layer)
        before = runs[-1][-1] if runs else ""
        next_to = number and before == f"{layer[: number.start()]}{int(number[0]) - 1}"
        if next_to and looks[before] == looks[layer]:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return {
        layer: f"{run[0]}-{run[-1].rpartition('.')[2]}"
        for run in runs
        if len(run) >= _FOLD
        for layer in run
    }


def unchecked_reasons(verdicts: Iterable[Verdict]) -> list[tuple[Reason | None, int]]:
    """Why tensors were not checked, most frequent first; ``None`` where no reason is recorded."""
    unchecked = (verdict for verdict in verdicts if verdict.verdict is Outcome.UNCHECKED)
    return Counter(verdict.reason for verdict in unchecked).most_common()


def by_cause(culprits: Iterable[Culprit]) -> list[list[Culprit]]:
    """Culprits with one cause, together: one bug in every layer is one story."""
    groups: dict[object, list[Culprit]] = defaultdict(list)
    for position, culprit in enumerate(culprits):
        groups[culprit.group or (position,)].append(culprit)
    return list(groups.values())


def folded(culprits: Sequence[Culprit], order: Iterable[str]) -> list[str]:
    """Names of culprits, the same module of several layers as one: ``... (in all 64 layers)``.

    The culprits have one cause; ``order`` has the names of all modules of the run.
    """
    modules: dict[str, set[str]] = {}
    for name in order:
        modules.setdefault(_NUMBER.sub("*", name), set()).add(name)
    layers: dict[str, dict[str, str]] = {}
    for culprit in culprits:
        number = _NUMBER.search(culprit.name)
        same = layers.setdefault(_NUMBER.sub("*", culprit.name), {})
        same[culprit.name] = number[0] if number else ""
    texts = []
    for pattern, names in layers.items():
        total = len(modules.get(pattern, set()) | names.keys())
        if len(names) == 1:
            texts += [clean(name) for name in names]
        elif len(names) == total:
            texts.append(f"{clean(pattern)} (in all {total} layers)")
        else:
            which = ranks_text(map(int, names.values()))
            texts.append(f"{clean(pattern)} (in {len(names)} of {total} layers: {which})")
    return texts


def tally(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Number of verdicts of each outcome that occurs, in the order of :class:`Outcome`."""
    counted = Counter(verdict.verdict for verdict in verdicts)
    return {outcome.value: counted[outcome] for outcome in Outcome if counted[outcome]}
