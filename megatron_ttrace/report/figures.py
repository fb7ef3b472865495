# SPDX-License-Identifier: Apache-2.0
"""Geometry of the HTML report's figures: the template only draws what is computed here.

The figures are made without a script, so they are there in print and in viewers that run none.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from megatron_ttrace.report import table
from megatron_ttrace.report.lines import Arrangement, arrangements
from megatron_ttrace.report.wording import error_text, number, sci
from megatron_ttrace.trace.records import Direction, Kind, Outcome, Verdict
from megatron_ttrace.trace.sanitise import clean

PANELS = (
    Direction.FORWARD,
    Direction.BACKWARD,
    Direction.GRADIENT,
    Direction.UPDATE,
    Direction.START,
)

# Upper bounds of the colour classes, passes first, then failures.
_PASS_BOUNDS = (0.0, 0.1, 0.5, math.inf)
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
# Pixels a cell takes, by number of columns: a whole step should fit on a screen.
_PITCHES = ((80, 14), (120, 12))
_SMALLEST_PITCH = 10
# Pixels between panels, and of a character of a row's label.
GAP = 14
_LETTER = 6.7


def colour_class(verdict: Verdict) -> int:
    """The colour class of a verdict: 0-3 pass, 4-7 fail, then without a number, unchecked."""
    if verdict.verdict is Outcome.UNCHECKED:
        return UNCHECKED
    margin = verdict.margin
    if not verdict.verdict.is_failure:
        value = 0.0 if margin is None else margin
        return next((i for i, bound in enumerate(_PASS_BOUNDS) if value <= bound), 3)
    if margin is None or math.isnan(margin):
        return UNMEASURED
    return next((4 + i for i, bound in enumerate(_FAIL_BOUNDS) if margin <= bound), 7)


@dataclasses.dataclass(frozen=True, slots=True)
class Panel:
    """The heat map of one direction.

    ``cells`` are (class, x, y, size, cell id), ``origins`` the places of culprits.
    """

    direction: str
    width: int
    labels: list[tuple[int, str, str]]
    cells: list[tuple[int, float, float, float, int]]
    origins: list[tuple[int, int]]


@dataclasses.dataclass(frozen=True, slots=True)
class HeatMapFigure:
    """All panels, their common rows, and the cells in the order of their ids.

    ``label`` is the width of the row labels in pixels; ``lines`` how panels go on lines.
    """

    rows: list[tuple[int, str]]
    label: int
    lines: list[Arrangement]
    header: int
    height: int
    pitch: int
    panels: list[Panel]
    cells: list[tuple[int, int, table.Group]]


def short_label(column: table.Column) -> str:
    """A column's label: the module without its parents, and the kind abbreviated."""
    parts = column.tail.split(".")
    size = 2 if parts[-1] in ("weight", "bias") else 1
    name = clean(".".join(parts[-size:]), _LABEL_LIMIT)
    kind = _KIND_LABELS.get(column.kind, column.kind.value)
    return name if not kind or name == kind else f"{name} {kind}"


def heat_map_figure(
    found: table.HeatMap, culprits: Collection[tuple[str, table.Column]] = ()
) -> HeatMapFigure:
    """Place every cell of the heat map; failures are drawn larger, so colour is not alone.

    ``culprits`` are the cells to frame.
    """
    labels = {column: short_label(column) for column in found.columns}
    header = 30 + 6 * max((len(label) for label in labels.values()), default=0)
    pitch = next((p for most, p in _PITCHES if len(labels) <= most), _SMALLEST_PITCH)
    row_of = {layer: row for row, layer in enumerate(found.layers)}
    panels: list[Panel] = []
    cells: list[tuple[int, int, table.Group]] = []
    columns_before = 0
    for direction in PANELS:
        columns = [column for column in found.columns if column.direction is direction]
        if not columns:
            continue
        column_of = {column: position for position, column in enumerate(columns)}
        drawn: list[tuple[int, float, float, float, int]] = []
        framed = []
        for (layer, column), group in found.cells.items():
            position = column_of.get(column)
            if position is None:
                continue
            size = pitch - (1 if group.failures else 4)
            inset = (pitch - size) / 2
            x, y = position * pitch, header + row_of[layer] * pitch
            drawn.append((colour_class(group.worst), x + inset, y + inset, size, len(cells)))
            cells.append((row_of[layer], columns_before + position, group))
            if (layer, column) in culprits:
                framed.append((x, y))
        named = [
            (
                position * pitch + pitch // 2 + 4,
                labels[column],
                clean(f"{column.tail} {column.kind.value}"),
            )
            for column, position in column_of.items()
        ]
        width = max(len(columns) * pitch + 4, 8 * len(direction.value))
        panels.append(Panel(direction.value, width, named, drawn, framed))
        columns_before += len(columns) + 1
    rows = [(header + row * pitch, clean(layer, 40)) for layer, row in row_of.items()]
    label = math.ceil(_LETTER * max((len(text) for _, text in rows), default=0)) + 4
    lines = arrangements([panel.width for panel in panels], label, GAP)
    height = header + len(rows) * pitch + 4
    return HeatMapFigure(rows, label, lines, header, height, pitch, panels, cells)


CURVE_KINDS = (Kind.OUTPUT, Kind.GRAD_INPUT, Kind.MAIN_GRAD, Kind.PARAM_DELTA)
_CURVE_WIDTH, _CURVE_HEIGHT = 560, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 8, 8, 26
_MAX_POINTS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """Error and tolerance of one kind over the depth of the model, on a log scale."""

    title: str
    width: int
    height: int
    plot: tuple[int, int, int, int]
    error: str
    tolerance: str
    points: list[tuple[float, float, bool, int, str]]
    ticks: list[tuple[float, str]]
    bands: list[tuple[float, float, bool, float, str]]


def curves(verdicts: Sequence[Verdict]) -> list[Curve]:
    """One curve for each direction that measured anything."""
    found = []
    for kind in CURVE_KINDS:
        worst: dict[str, tuple[int, Verdict]] = {}
        for position, verdict in enumerate(verdicts):
            if verdict.kind is not kind or verdict.rel_err is None:
                continue
            known = worst.get(verdict.name)
            if known is None or table.severity(verdict) > table.severity(known[1]):
                worst[verdict.name] = (position, verdict)
        curve = _curve(kind, list(worst.values()))
        if curve is not None:
            found.append(curve)
    return found


def _curve(kind: Kind, points: list[tuple[int, Verdict]]) -> Curve | None:
    if kind is Kind.GRAD_INPUT:
        points.reverse()
    layers = {verdict.name: table.layer_of(verdict.name) for _, verdict in points}
    points.sort(key=lambda point: table.depth_key(layers[point[1].name]))
    if len(points) > _MAX_POINTS:
        by_layer = groupby(points, key=lambda point: layers[point[1].name])
        points = [max(group, key=lambda p: table.severity(p[1])) for _, group in by_layer]
    numbers = [
        value
        for _, verdict in points
        for value in (verdict.rel_err, verdict.tolerance)
        if value is not None and math.isfinite(value) and value > 0
    ]
    if not numbers:
        return None
    low = max(math.floor(math.log10(min(numbers))), -20)
    high = min(math.ceil(math.log10(max(numbers))), 20)
    low, high = min(low, 19), max(high, low + 1)
    right, bottom = _CURVE_WIDTH - _RIGHT, _CURVE_HEIGHT - _BOTTOM
    step = (right - _LEFT) / len(points)

    def x_of(position: float) -> float:
        return round(_LEFT + step * position, 1)

    def y_of(value: float) -> float:
        if not math.isfinite(value):
            return _TOP
        level = math.log10(value) if value > 0 else low
        share = (min(max(level, low), high) - low) / (high - low)
        return round(bottom - share * (bottom - _TOP), 1)

    error, tolerance, dots = [], [], []
    for position, (row, verdict) in enumerate(points):
        x = x_of(position + 0.5)
        if verdict.rel_err is not None:
            y = y_of(verdict.rel_err)
            error.append(f"{x},{y}")
            text = (
                f"{clean(verdict.name)} {kind.value}: "
                f"{error_text(verdict.rel_err, verdict.rel_err_eps)}, "
                f"tolerance {sci(verdict.tolerance)}"
            )
            dots.append((x, y, verdict.verdict.is_failure, row, text))
        if verdict.tolerance is not None:
            tolerance.append(f"{x},{y_of(verdict.tolerance)}")
    skip = max(1, math.ceil((high - low) / 6))
    ticks = [(y_of(10.0**level), f"1e{level}") for level in range(low, high + 1, skip)]
    return Curve(
        title=f"{kind.direction.value}: {kind.value}",
        width=_CURVE_WIDTH,
        height=_CURVE_HEIGHT,
        plot=(_LEFT, _TOP, right, bottom),
        error=" ".join(error),
        tolerance=" ".join(tolerance),
        points=dots,
        ticks=ticks,
        bands=_bands([layers[verdict.name] for _, verdict in points], x_of),
    )


def _bands(
    layers: Sequence[str], x_of: Callable[[float], float]
) -> list[tuple[float, float, bool, float, str]]:
    """Alternating background, one band a layer, with a label and its place where there is room."""
    bands = []
    start = 0
    free_from = 0.0
    for position, (layer, members) in enumerate(groupby(layers)):
        size = len(list(members))
        left, right = x_of(start), x_of(start + size)
        label = clean(layer.rsplit(".", 1)[-1].replace("final_layernorm", "norm"), 12)
        half = 3.0 * len(label)
        centre = min((left + right) / 2, _CURVE_WIDTH - half)
        if centre - half < free_from:
            label = ""
        else:
            free_from = centre + half + 4
        bands.append((left, round(right - left, 1), position % 2 == 1, round(centre, 1), label))
        start += size
    return bands


MAX_RANKS = 256


@dataclasses.dataclass(frozen=True, slots=True)
class RankBox:
    """One rank of the diagram."""

    rank: int
    x: int
    y: int
    state: str
    title: str


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """The process mesh: pipeline stages side by side, replicas below each other."""

    width: int
    height: int
    boxes: list[RankBox]
    stages: list[tuple[int, int, str]]
    rows: list[tuple[int, str]]
    note: str


def layout_figure(
    config: Mapping[str, Any], verdicts: Iterable[Verdict], culprit_ranks: Iterable[int]
) -> Layout | None:
    """The ranks in Megatron's default order (tp, then cp, dp, pp), failing ones marked."""
    sizes = {axis: number(config.get(axis)) or 1 for axis in ("tp", "cp", "dp", "pp", "vpp", "ep")}
    tp, cp, dp, pp = (sizes[axis] for axis in ("tp", "cp", "dp", "pp"))
    world = number(config.get("world_size")) or tp * cp * dp * pp
    if min(tp, cp, dp, pp, world) < 1 or world > MAX_RANKS or world == 1:
        return None
    if tp * cp * pp * dp != world:
        if "dp" in config or world % (tp * cp * pp):
            return None
        dp = world // (tp * cp * pp)
    culprits = set(culprit_ranks)
    failing = {rank for v in verdicts if v.verdict.is_failure for rank in v.ranks}
    box_width, box_height, gap, left, top = 44, 26, 18, 60, 24
    stage_width = tp * (box_width + 3) + gap
    boxes = []
    for rank in range(world):
        t, c = rank % tp, rank // tp % cp
        d, p = rank // (tp * cp) % dp, rank // (tp * cp * dp)
        state = "culprit" if rank in culprits else "failing" if rank in failing else "fine"
        words = {
            "culprit": "the culprit is seen here",
            "failing": "named by failures",
            "fine": "no failure names it",
        }[state]
        boxes.append(
            RankBox(
                rank,
                left + p * stage_width + t * (box_width + 3),
                top + (d * cp + c) * (box_height + 4),
                state,
                f"rank {rank}: tp {t}, cp {c}, dp {d}, pp {p}; {words}",
            )
        )
    stages = [
        (left + p * stage_width, tp * (box_width + 3) - 3, f"stage {p}" if pp > 1 else "all layers")
        for p in range(pp)
    ]
    rows = [
        (top + (d * cp + c) * (box_height + 4), _row_label(d, dp, c, cp))
        for d in range(dp)
        for c in range(cp)
    ]
    note = "tp runs to the right within a stage"
    if sizes["vpp"] > 1:
        note += f"; every stage holds {sizes['vpp']} model chunks (vpp)"
    if sizes["ep"] > 1:
        note += f"; experts are spread over groups of {sizes['ep']} ranks (ep)"
    return Layout(
        left + pp * stage_width - gap + 4,
        top + dp * cp * (box_height + 4) + 4,
        boxes,
        stages,
        rows,
        note,
    )


def _row_label(d: int, dp: int, c: int, cp: int) -> str:
    parts = ([f"dp {d}"] if dp > 1 else []) + ([f"cp {c}"] if cp > 1 else [])
    return " ".join(parts)
