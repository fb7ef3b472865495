# SPDX-License-Identifier: Apache-2.0
"""Verdicts rolled up to layers and cells. Pure arithmetic: every sink renders these, none counts.

A check yields tens of thousands of verdicts; a person wants one row a layer and direction, and a
map of layers by tensors. Both keep the worst verdict of what they stand for, never an average.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from megatron_ttrace.trace.records import Culprit, Direction, Kind, Outcome, Reason, Verdict

UNNAMED = "(unnamed)"

_LAYER = re.compile(r"^((?:[^.]+\.)*?layers\.\d+)(?:\.(.*))?$", re.DOTALL)
_STACKS = frozenset({"decoder", "encoder", "mtp"})
_DIRECTIONS = tuple(Direction)
_KINDS = {kind: position for position, kind in enumerate(Kind)}

# Where a group stands in the depth of a model; unlisted modules come after the decoder.
_DEPTH = (
    (re.compile(r"^(tokens|labels|loss_mask|attention_mask|position_ids)$"), 0),
    (re.compile(r"^embedding$"), 1),
    (re.compile(r"^(rotary_pos_emb|position_embeddings?)$"), 2),
    (re.compile(r"^(.*\.)?encoder\."), 3),
    (re.compile(r"^(.*\.)?decoder\.layers\."), 4),
    (re.compile(r"^(.*\.)?decoder\."), 5),
    (re.compile(r"^mtp\."), 7),
    (re.compile(r"^output_layer$"), 8),
    (re.compile(r"^model$"), 9),
    (re.compile(r"^(.* )?loss$"), 10),
    (re.compile(r"^grad_norm$"), 11),
)
_OTHER = 6


def split_name(name: str) -> tuple[str, str]:
    """The group a canonical name belongs to, and the name within that group.

    ``decoder.layers.3.mlp.linear_fc1`` -> (``decoder.layers.3``, ``mlp.linear_fc1``);
    ``decoder.final_layernorm.weight`` -> (``decoder.final_layernorm``, ``weight``).
    """
    found = _LAYER.match(name)
    if found:
        return found[1], found[2] or ""
    parts = name.split(".")
    size = 2 if len(parts) > 1 and parts[0] in _STACKS else 1
    return ".".join(parts[:size]) or UNNAMED, ".".join(parts[size:])


def layer_of(name: str) -> str:
    """The group of a canonical name: its layer, or its top-level module, or a step-level name."""
    return split_name(name)[0]


def tail_of(name: str) -> str:
    """The tensor within its group, one for all experts of a layer.

    Groups other than layers keep their own name in front, so that the weights of
    ``decoder.final_layernorm`` and of ``output_layer`` are different columns of a map.
    """
    group, tail = split_name(name)
    if _LAYER.match(group):
        return ".".join("*" if part.isdigit() else part for part in tail.split(".")) or "layer"
    own = group.removeprefix("decoder.").removeprefix("encoder.")
    return f"{own}.{tail}" if tail else own


def natural_key(text: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key under which ``layers.2`` comes before ``layers.10``."""
    pieces = re.findall(r"[0-9]+|[^0-9]+", text)
    # int() refuses beyond 4300 digits; such a name is hostile and sorts as text.
    return tuple(
        (0, int(p), "") if p[0] in "0123456789" and len(p) < 20 else (1, 0, p) for p in pieces
    )


def depth_key(layer: str) -> tuple[int, tuple[tuple[int, int, str], ...]]:
    """Sort key from the tokens through the layers to the gradient norm."""
    rank = next((rank for pattern, rank in _DEPTH if pattern.match(layer)), _OTHER)
    return rank, natural_key(layer)


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


def worst_of(verdicts: Iterable[Verdict]) -> Verdict | None:
    """The most severe verdict; the earliest of equals, since errors propagate forward."""
    return max(verdicts, key=severity, default=None)


@dataclasses.dataclass(slots=True)
class Group:
    """What is known about the verdicts that a row or a cell stands for.

    Attributes:
        worst: the most severe verdict, the earliest of equals.
        total: number of verdicts.
        failures: how many of them fail.
        unchecked: how many were not checked.
    """

    worst: Verdict
    total: int = 0
    failures: int = 0
    unchecked: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one more verdict."""
        self.total += 1
        self.failures += verdict.verdict.is_failure
        self.unchecked += verdict.verdict is Outcome.UNCHECKED
        if severity(verdict) > severity(self.worst):
            self.worst = verdict

    @property
    def margin(self) -> float | None:
        """The worst margin; infinite for a failure without a number."""
        return margin_of(self.worst)


@dataclasses.dataclass(frozen=True, slots=True)
class LayerRow:
    """One layer in one direction."""

    layer: str
    direction: Direction
    group: Group


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """One column of the heat map: a tensor that every layer has.

    A parameter's own initial values stand with those it has before the step, and its values after
    the step with its change: what it starts from, and what the step makes of it.
    """

    direction: Direction
    tail: str
    kind: Kind


@dataclasses.dataclass(frozen=True, slots=True)
class HeatMap:
    """Layers in depth order, columns in execution order, and the cells that exist."""

    layers: tuple[str, ...]
    columns: tuple[Column, ...]
    cells: dict[tuple[str, Column], Group]


def place_of(verdict: Verdict) -> tuple[str, Column]:
    """The cell of the heat map that a verdict belongs to: its layer and its column."""
    kind = verdict.kind
    if kind is Kind.PARAM and verdict.direction is Direction.UPDATE:
        kind = Kind.PARAM_DELTA
    elif kind is Kind.INITIAL:
        kind = Kind.PARAM
    return layer_of(verdict.name), Column(verdict.direction, tail_of(verdict.name), kind)


def places_of(verdicts: Iterable[Verdict]) -> list[tuple[str, Column]]:
    """The cell of every verdict; names repeat, so each is taken apart once."""
    known: dict[tuple[str, Kind, Direction], tuple[str, Column]] = {}
    places = []
    for verdict in verdicts:
        key = (verdict.name, verdict.kind, verdict.direction)
        if key not in known:
            known[key] = place_of(verdict)
        places.append(known[key])
    return places


def layer_rows(verdicts: Iterable[Verdict]) -> list[LayerRow]:
    """Per layer and direction, worst first; equals in depth order."""
    groups: dict[tuple[str, Direction], Group] = {}
    layers: dict[str, str] = {}
    for verdict in verdicts:
        layer = layers.get(verdict.name)
        if layer is None:
            layer = layers[verdict.name] = layer_of(verdict.name)
        groups.setdefault((layer, verdict.direction), Group(verdict)).add(verdict)
    rows = [LayerRow(layer, direction, group) for (layer, direction), group in groups.items()]
    return sorted(rows, key=_worst_first)


def _worst_first(row: LayerRow) -> tuple[object, ...]:
    level, margin = severity(row.group.worst)
    return -level, -margin, depth_key(row.layer), _DIRECTIONS.index(row.direction)


def depth_order(layers: Iterable[str]) -> list[str]:
    """Layers from the first to the last of the model."""
    return sorted(set(layers), key=depth_key)


def heat_map(verdicts: Sequence[Verdict]) -> HeatMap:
    """Layer × tensor, microbatches, iterations, indices and experts rolled up to the worst."""
    cells: dict[tuple[str, Column], Group] = {}
    order: dict[Column, int] = {}
    for verdict, place in zip(verdicts, places_of(verdicts), strict=True):
        order.setdefault(place[1], len(order))
        cells.setdefault(place, Group(verdict)).add(verdict)
    columns = sorted(order, key=lambda c: (_DIRECTIONS.index(c.direction), *_column_key(c, order)))
    layers = depth_order(layer for layer, _ in cells)
    return HeatMap(tuple(layers), tuple(columns), cells)


def _column_key(column: Column, order: dict[Column, int]) -> tuple[int, int]:
    """Activations in execution order, where it means something; step-level kinds side by side."""
    stepwise = column.direction in (Direction.START, Direction.UPDATE)
    return (_KINDS[column.kind] if stepwise else 0), order[column]


def unchecked_reasons(verdicts: Iterable[Verdict]) -> list[tuple[Reason | None, int]]:
    """Why tensors were not checked, most frequent first; ``None`` where no reason is recorded."""
    unchecked = (one for one in verdicts if one.verdict is Outcome.UNCHECKED)
    return Counter(one.reason for one in unchecked).most_common()


def by_cause(culprits: Iterable[Culprit]) -> list[list[Culprit]]:
    """Culprits that are explained alike, together: one bug in every layer is one story."""
    groups: dict[object, list[Culprit]] = {}
    for position, culprit in enumerate(culprits):
        alike = culprit.explanation if culprit.cause else position
        key = culprit.direction, culprit.kind, culprit.cause, alike
        groups.setdefault(key, []).append(culprit)
    return list(groups.values())


def tally(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Number of verdicts of each outcome that occurs, in the order of :class:`Outcome`."""
    counted = Counter(verdict.verdict for verdict in verdicts)
    return {outcome.value: counted[outcome] for outcome in Outcome if counted[outcome]}
