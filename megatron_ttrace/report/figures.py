# SPDX-License-Identifier: Apache-2.0
"""Geometry of the figures of the HTML report; the template only draws what is computed here.

The figures need no script, so they are complete in print and in viewers that run none.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import combinations, groupby, pairwise
from typing import Any

from megatron_ttrace.report import table
from megatron_ttrace.report.wording import error_text, number, sci
from megatron_ttrace.trace.records import Direction, Kind, Outcome, Verdict
from megatron_ttrace.trace.sanitise import clean

# Bounds between the colour classes, of passes and of failures.
_PASS_BOUNDS = (0.0, 0.1, 0.5)
_FAIL_BOUNDS = (2.0, 10.0, 100.0)
UNMEASURED = 8
UNCHECKED = 9
LEGEND = (
    (0, "exact"),
    (1, "≤ 0.1"),
    (2, "≤ 0.5"),
    (3, "≤ 1"),
    (4, "fails, ≤ 2"),
    (5, "≤ 10"),
    (6, "≤ 100"),
    (7, "> 100"),
    (UNMEASURED, "fails, no number"),
    (UNCHECKED, "unchecked"),
)

_KIND_LABELS = {
    Kind.INPUT: "in",
    Kind.OUTPUT: "out",
    Kind.GRAD_OUTPUT: "gout",
    Kind.GRAD_INPUT: "gin",
    Kind.MAIN_GRAD: "",
    Kind.PARAM_DELTA: "Δ",
    Kind.EXP_AVG: "m",
    Kind.EXP_AVG_SQ: "v",
    Kind.PARAM: "",
}
_LABEL_LIMIT = 28
# Pixels a cell takes, by number of columns: half a step should fit on a line.
_PITCHES = ((100, 16), (240, 14), (math.inf, 11))
# Pixels between panels, and of a character of a row's label.
GAP = 14
_LETTER = 6.7
# The same of a column's label.
_SMALL = 6.3


def colour_class(verdict: Verdict) -> int:
    """The colour class of a verdict: 0-3 pass, 4-7 fail, then without a number, unchecked."""
    if verdict.verdict is Outcome.UNCHECKED:
        return UNCHECKED
    margin = verdict.margin
    if not verdict.verdict.is_failure:
        return 0 if margin is None else sum(not margin <= bound for bound in _PASS_BOUNDS)
    if margin is None or math.isnan(margin):
        return UNMEASURED
    return 4 + sum(margin > bound for bound in _FAIL_BOUNDS)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrangement:
    """Panels on lines: fits from ``width`` pixels on; ``starts`` marks the first of each line."""

    width: int
    starts: tuple[bool, ...]


def arrangements(widths: Sequence[int], label: int, gap: int) -> list[Arrangement]:
    """The best arrangement on every number of lines, the narrowest first, panels in their order.

    Each line begins with row labels of ``label`` pixels; ``gap`` follows each panel and label. The
    style sheet chooses by the actual width of the page (container queries), without a script.
    """
    narrower: list[Arrangement] = []
    count = len(widths)

    def width(ends: tuple[int, int]) -> int:
        return sum(widths[slice(*ends)]) + gap * (ends[1] - ends[0])

    for lines in range(1, count + 1):
        best = min(
            (label + gap + max(map(width, pairwise([0, *cuts, count]))), cuts)
            for cuts in combinations(range(1, count), lines - 1)
        )
        if not narrower or best[0] < narrower[-1].width:
            starts = tuple(panel in (0, *best[1]) for panel in range(count))
            narrower.append(Arrangement(best[0], starts))
    return narrower[::-1]


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """The heat map of one direction.

    ``labels`` are (x, label, full name) of the columns, ``cells`` (class, x, y, size, cell id),
    ``origins`` (x, y, width) of the frames around culprits.
    """

    direction: str
    width: int
    labels: list[tuple[int, str, str]] = dataclasses.field(default_factory=list)
    cells: list[tuple[int, float, float, float, int]] = dataclasses.field(default_factory=list)
    origins: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """All panels and their common rows: (y, label, whether it stands for several layers)."""

    rows: list[tuple[int, str, bool]]
    height: int
    panels: list[Panel]


@dataclasses.dataclass(frozen=True, slots=True)
class HeatMapFigure:
    """The map with layers alike folded, the whole one if it differs, and their cells by id.

    A cell is (row, column, content); ``places`` names them. ``label`` is the width of the row
    labels in pixels, ``lines`` how panels go on lines, ``folded`` the number of layers in folds.
    """

    maps: list[Map]
    label: int
    lines: list[Arrangement]
    header: int
    pitch: int
    folded: int
    cells: list[tuple[int, int, table.Group]]
    places: list[table.Place]


def _column_label(column: table.Column) -> str:
    """The module without its parents, and the kind abbreviated."""
    parts = column.tail.split(".")
    size = 2 if parts[-1] in ("weight", "bias") else 1
    name = clean(".".join(parts[-size:]), _LABEL_LIMIT)
    kind = _KIND_LABELS.get(column.kind, column.kind.value)
    return name if not kind or name == kind else f"{name} {kind}"


def heat_map_figure(
    heat_map: table.HeatMap, culprits: Collection[Collection[table.Place]] = ()
) -> HeatMapFigure:
    """Place every cell of the heat map; failures are drawn larger, so colour is not alone.

    ``culprits`` are the cells of each culprit, to be framed together.
    """
    columns = heat_map.columns
    header = 30 + math.ceil(_SMALL * max((len(_column_label(c)) for c in columns), default=0))
    pitch = next(pixels for most, pixels in _PITCHES if len(columns) <= most)
    row_of = {layer: row for row, layer in enumerate(heat_map.layers)}
    # A column is free between panels, so that arrow keys tell them apart.
    directions = tuple(Direction)
    column_of = {
        column: number + directions.index(column.direction) for number, column in enumerate(columns)
    }
    places = sorted(heat_map.cells, key=lambda place: (column_of[place[1]], row_of[place[0]]))
    ids = {place: number for number, place in enumerate(places)}
    names = table.folds(heat_map)
    maps = [
        _map(heat_map, culprits, renamed, ids=ids, header=header, pitch=pitch)
        for renamed in ([names, {}] if names else [{}])
    ]
    longest = max((len(text) for drawing in maps for _, text, _ in drawing.rows), default=0)
    label = math.ceil(_LETTER * longest) + 4
    return HeatMapFigure(
        maps=maps,
        label=label,
        lines=arrangements([panel.width for panel in maps[0].panels], label, GAP),
        header=header,
        pitch=pitch,
        folded=len(names),
        cells=[(row_of[place[0]], column_of[place[1]], heat_map.cells[place]) for place in places],
        places=places,
    )


def _map(
    heat_map: table.HeatMap,
    culprits: Collection[Collection[table.Place]],
    renamed: Mapping[str, str],
    *,
    ids: Mapping[table.Place, int],
    header: int,
    pitch: int,
) -> Map:
    """The panels, with rows in ``renamed`` as one: each of its cells is that of the worst."""
    names = {layer: renamed.get(layer, layer) for layer in heat_map.layers}
    rows = {name: header + row * pitch for row, name in enumerate(dict.fromkeys(names.values()))}
    top = {layer: rows[name] for layer, name in names.items()}
    alike: dict[tuple[int, table.Column], list[table.Place]] = defaultdict(list)
    for layer, column in heat_map.cells:
        alike[top[layer], column].append((layer, column))
    panels = []
    for direction, columns in groupby(heat_map.columns, lambda column: column.direction):
        left = {column: position * pitch for position, column in enumerate(columns)}
        panel = Panel(direction.value, max(len(left) * pitch + 4, 8 * len(direction)))
        for column, x in left.items():
            full = clean(f"{column.tail} {column.kind.value}")
            panel.labels.append((x + pitch // 2 + 4, _column_label(column), full))
        for (y, column), places in alike.items():
            if column in left:
                place = max(places, key=lambda place: table.severity(heat_map.cells[place].worst))
                group = heat_map.cells[place]
                size = pitch - (1 if group.failures else 4)
                inset = (pitch - size) / 2
                colour = colour_class(group.worst)
                panel.cells.append((colour, left[column] + inset, y + inset, size, ids[place]))
        frames = {
            frame
            for culprit in culprits
            for frame in _frames(
                [(top[layer], left[column]) for layer, column in culprit if column in left], pitch
            )
        }
        panel.origins.extend(sorted(frames))
        panels.append(panel)
    folds = set(renamed.values())
    labels = [(y, clean(name, 40), name in folds) for name, y in rows.items()]
    return Map(labels, header + len(rows) * pitch + 4, panels)


def _frames(corners: Iterable[tuple[int, int]], pitch: int) -> list[tuple[int, int, int]]:
    """One frame (x, y, width) around cells that are side by side."""
    frames: list[tuple[int, int, int]] = []
    for y, x in sorted(set(corners)):
        if frames and frames[-1][1] == y and sum(frames[-1][::2]) == x:
            frames[-1] = (frames[-1][0], y, frames[-1][2] + pitch)
        else:
            frames.append((x, y, pitch))
    return frames


CURVE_KINDS = (Kind.OUTPUT, Kind.GRAD_INPUT, Kind.MAIN_GRAD, Kind.PARAM_DELTA)
CURVE_WIDTH, CURVE_HEIGHT = 560, 210
PLOT = (46, 8, CURVE_WIDTH - 8, CURVE_HEIGHT - 26)
"""Left, top, right and bottom of the plot in a curve, in pixels."""
_MAX_POINTS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Error and tolerance of one kind over the depth of the model, on a log scale.

    ``points`` are (x, y, fails, number of the verdict, text), ``bands`` (x, width, shaded, x of the
    label, label) of the layers.
    """

    title: str
    error: str
    tolerance: str
    points: list[tuple[float, float, bool, int, str]]
    ticks: list[tuple[float, str]]
    bands: list[tuple[float, float, bool, float, str]]


def curves(verdicts: Sequence[Verdict], heat_map: table.HeatMap) -> list[Curve]:
    """One curve for each direction that measured anything."""
    depth = {layer: number for number, layer in enumerate(heat_map.layers)}

    def layer_of(position: int) -> str:
        return heat_map.places[position][0]

    def worst(positions: Iterable[int]) -> int:
        return max(positions, key=lambda position: table.severity(verdicts[position]))

    drawn = []
    for kind in CURVE_KINDS:
        by_name: dict[str, list[int]] = defaultdict(list)
        for position, verdict in enumerate(verdicts):
            if verdict.kind is kind and verdict.rel_err is not None:
                by_name[verdict.name].append(position)
        points = list(map(worst, by_name.values()))
        if kind is Kind.GRAD_INPUT:
            points.reverse()
        points.sort(key=lambda position: depth[layer_of(position)])
        by_layer = [(layer, list(group)) for layer, group in groupby(points, layer_of)]
        if len(points) > _MAX_POINTS:
            by_layer = [(layer, [worst(group)]) for layer, group in by_layer]
        curve = _curve(kind, verdicts, by_layer)
        if curve is not None:
            drawn.append(curve)
    return drawn


def _curve(
    kind: Kind, verdicts: Sequence[Verdict], by_layer: list[tuple[str, list[int]]]
) -> Curve | None:
    """The curve of verdicts (by their numbers) in depth order."""
    points = [position for _, group in by_layer for position in group]
    numbers = [
        value
        for position in points
        for value in (verdicts[position].rel_err, verdicts[position].tolerance)
        if value is not None and math.isfinite(value) and value > 0
    ]
    if not numbers:
        return None
    low = min(max(math.floor(math.log10(min(numbers))), -20), 19)
    high = max(min(math.ceil(math.log10(max(numbers))), 20), low + 1)
    left, top, right, bottom = PLOT
    step = (right - left) / len(points)

    def x_of(position: float) -> float:
        return round(left + step * position, 1)

    def y_of(value: float) -> float:
        if not math.isfinite(value):
            return top
        level = math.log10(value) if value > 0 else low
        share = (min(max(level, low), high) - low) / (high - low)
        return round(bottom - share * (bottom - top), 1)

    error, tolerance, dots = [], [], []
    for position, row in enumerate(points):
        verdict, x = verdicts[row], x_of(position + 0.5)
        if verdict.rel_err is not None:
            y = y_of(verdict.rel_err)
            error.append(f"{x},{y}")
            text = (
                f"{clean(verdict.name)} {kind.value}: {error_text(verdict)}, "
                f"tolerance {sci(verdict.tolerance)}"
            )
            dots.append((x, y, verdict.verdict.is_failure, row, text))
        if verdict.tolerance is not None:
            tolerance.append(f"{x},{y_of(verdict.tolerance)}")
    skip = max(1, math.ceil((high - low) / 6))
    return Curve(
        title=f"{kind.direction.value}: {kind.value}",
        error=" ".join(error),
        tolerance=" ".join(tolerance),
        points=dots,
        ticks=[(y_of(10.0**level), f"1e{level}") for level in range(low, high + 1, skip)],
        bands=_bands([(layer, len(group)) for layer, group in by_layer], x_of),
    )


def _bands(
    layers: Iterable[tuple[str, int]], x_of: Callable[[float], float]
) -> list[tuple[float, float, bool, float, str]]:
    """Alternating background, one band per layer, with a label where there is room for it."""
    bands = []
    start = 0
    free_from = 0.0
    for position, (layer, size) in enumerate(layers):
        left, right = x_of(start), x_of(start + size)
        label = clean(layer.rsplit(".", 1)[-1], 16)
        half = 3.0 * len(label)
        centre = min((left + right) / 2, CURVE_WIDTH - half)
        if centre - half < free_from:
            label = ""
        else:
            free_from = centre + half + 4
        bands.append((left, round(right - left, 1), position % 2 == 1, round(centre, 1), label))
        start += size
    return bands


MAX_RANKS = 256
_STATES = {
    "culprit": "a culprit fails here",
    "failing": "other failures",
    "fine": "no failure",
}


@dataclasses.dataclass(frozen=True, slots=True)
class RankCell:
    """One rank: its state is ``culprit``, ``failing`` or ``fine``."""

    rank: int
    state: str
    title: str


@dataclasses.dataclass(frozen=True, slots=True)
class RankMap:
    """The process mesh: one row of ranks per dp and cp coordinate, by pipeline stage."""

    stages: list[str]
    rows: list[tuple[str, list[list[RankCell]]]]
    note: str


def rank_map(
    config: Mapping[str, Any], verdicts: Iterable[Verdict], culprit_ranks: Iterable[int]
) -> RankMap | None:
    """The ranks in Megatron's default order (tp, then cp, dp, pp), failing ones marked.

    ``None`` for one rank, for too many, and for a configuration that contradicts itself.
    """
    axes = ("tp", "cp", "dp", "pp", "vpp", "ep")
    tp, cp, dp, pp, vpp, ep = (number(config.get(axis)) or 1 for axis in axes)
    world = number(config.get("world_size")) or tp * cp * dp * pp
    if min(tp, cp, dp, pp, world) < 1 or not 1 < world <= MAX_RANKS:
        return None
    if "dp" not in config:
        dp = world // (tp * cp * pp)
    if tp * cp * pp * dp != world:
        return None
    failing = (rank for v in verdicts if v.verdict.is_failure for rank in v.ranks)
    states = dict.fromkeys(failing, "failing")
    states |= dict.fromkeys(culprit_ranks, "culprit")

    def cell(t: int, c: int, d: int, p: int) -> RankCell:
        rank = t + tp * (c + cp * (d + dp * p))
        state = states.get(rank, "fine")
        title = f"rank {rank}: tp {t}, cp {c}, dp {d}, pp {p}; {_STATES[state]}"
        return RankCell(rank, state, title)

    rows = [
        (
            " ".join([f"dp {d}"] * (dp > 1) + [f"cp {c}"] * (cp > 1)),
            [[cell(t, c, d, p) for t in range(tp)] for p in range(pp)],
        )
        for d in range(dp)
        for c in range(cp)
    ]
    note = "tp from left to right within a stage"
    if vpp > 1:
        note += f"; each stage holds {vpp} model chunks (vpp)"
    if ep > 1:
        note += f"; experts are spread over groups of {ep} ranks (ep)"
    return RankMap([f"stage {p}" for p in range(pp)] if pp > 1 else ["all layers"], rows, note)
