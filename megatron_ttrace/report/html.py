# SPDX-License-Identifier: Apache-2.0
"""``report.html``: a single file that needs no network and no other file.

The page is a template, a style sheet and a script under ``templates/``. The verdicts are embedded
as JSON and rendered lazily, so that ten thousand of them do not slow it down.
"""

import functools
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megatron_ttrace.report import blame, figures, ledger, table, wording
from megatron_ttrace.trace import budget, files
from megatron_ttrace.trace.records import Direction, Kind, Outcome, Summary, Verdict
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean, script_json

MAX_EMBEDDED = 50_000
"""Verdicts embedded in the page; of more, failures and the worst of each cell come first."""

MAX_CULPRITS = 10
MAX_ALIKE = 100
MAX_ROWS = 60
MAX_COLLECTIVES = 200
OPEN_ROWS = 12
_NAME_LIMIT = 240
_LONGEST = 100_000
"""Characters that the template prints at a time: the points of a curve."""
_OF_PARAMETERS = (Kind.PARAM, Kind.MAIN_GRAD, Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ)


def write(path: Path, summary: Summary, verdicts: Sequence[Verdict], run: str = "") -> None:
    """Write the page. Raises ``TTraceError``."""
    files.write_atomically(path, [render(summary, verdicts, run)])


def render(summary: Summary, verdicts: Sequence[Verdict], run: str = "") -> str:
    """The page as text."""
    heat_map = table.heat_map(verdicts)
    number = {id(verdict): position for position, verdict in enumerate(verdicts)}
    failures = [verdict for verdict in verdicts if verdict.verdict.is_failure]
    figure = figures.heat_map_figure(heat_map, _origins(summary, failures, number, heat_map))
    chosen = choose(verdicts, figure, MAX_EMBEDDED)
    rows = table.failing_rows(verdicts, summary.culprits)
    worst = table.worst_of(verdicts)
    margin = table.margin_of(worst) if worst is not None else None
    causes = table.by_cause(summary.culprits)
    data = payload(verdicts, heat_map, figure, chosen) | {
        "residuals": _residuals(summary, verdicts)
    }
    return template().render(
        css=Markup(asset("report.css")),  # noqa: S704 - our own files
        js=Markup(asset("report.js")),  # noqa: S704
        data=Markup(script_json(data)),  # noqa: S704 - escaped
        summary=summary,
        run_id=run,
        worst="" if margin is None else wording.margin_text(margin),
        counts=summary.counts or table.tally(verdicts),
        reasons=table.unchecked_reasons(verdicts),
        notices=[*map(ledger.finding_text, summary.collective_findings), *wording.notices(summary)],
        culprits=[
            (
                group,
                table.folded(group, summary.execution_order),
                number.get(id(group[0].shown_by(failures)), -1),
            )
            for group in causes[:MAX_CULPRITS]
        ],
        more_culprits=max(0, len(causes) - MAX_CULPRITS),
        figure=figure,
        curves=figures.curves(verdicts, heat_map),
        ranks=figures.rank_map(
            summary.config, failures, (rank for c in summary.culprits for rank in c.ranks)
        ),
        layers=rows[:MAX_ROWS],
        more_layers=max(0, len(rows) - MAX_ROWS),
        left_out=len(verdicts) - len(chosen),
        total=len(verdicts),
    )


def environment() -> jinja2.Environment:
    """For templates that print foreign text: it is escaped, and has no control characters."""
    made = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: (
            value if isinstance(value, (Markup, int, float)) else clean(value, _LONGEST)
        ),
    )
    made.filters |= {"clean": clean, "plain": _plain}
    return made


@functools.cache
def template() -> jinja2.Template:
    """Of the page, compiled once."""
    names = {
        "max_alike": MAX_ALIKE,
        "max_collectives": MAX_COLLECTIVES,
        "open_rows": OPEN_ROWS,
        "Outcome": Outcome,
        "Direction": Direction,
        "Kind": Kind,
        "blame": blame,
        "budget": budget,
        "wording": wording,
        "figures": figures,
        "files": files,
        "ledger": ledger,
    }
    return environment().from_string(asset("report.html.j2"), names)


def asset(name: str) -> str:
    """The text of a file in ``templates``."""
    folder = resources.files("megatron_ttrace.report") / "templates"
    return (folder / name).read_text(encoding="utf-8")


def _origins(
    summary: Summary,
    failures: Sequence[Verdict],
    number: Mapping[int, int],
    heat_map: table.HeatMap,
) -> list[set[table.Place]]:
    """The cells of each culprit: of the tensor that stands for it, and of its other parameters."""
    known = {
        (verdict.name, verdict.kind): heat_map.places[number[id(verdict)]]
        for verdict in reversed(failures)
    }
    origins = []
    for culprit in summary.culprits[:MAX_ALIKE]:
        shown = culprit.shown_by(failures)
        if shown is not None:
            module = shown.name.rpartition(".")[0] if shown.kind in _OF_PARAMETERS else shown.name
            origins.append(
                {
                    place
                    for (name, kind), place in known.items()
                    if kind is shown.kind
                    and (name == shown.name or (name.rpartition(".")[0] == module != shown.name))
                }
            )
    return origins


def choose(verdicts: Sequence[Verdict], figure: figures.HeatMapFigure, limit: int) -> list[int]:
    """Positions of the verdicts that are embedded in the page, in execution order."""
    worst = {id(group.worst) for _, _, group in figure.cells}
    by_need = sorted(
        range(len(verdicts)),
        key=lambda p: (id(verdicts[p]) not in worst, not verdicts[p].verdict.is_failure),
    )
    return sorted(by_need[:limit])


def payload(
    verdicts: Sequence[Verdict],
    heat_map: table.HeatMap,
    figure: figures.HeatMapFigure,
    chosen: Sequence[int],
) -> dict[str, Any]:
    """The verdicts as columns, texts and enumerations by number, and the cells they belong to."""
    strings: dict[tuple[str, int], int] = {}

    def text(value: str, limit: int = NOTE_LIMIT) -> int:
        return strings.setdefault((value, limit), len(strings))

    kinds = {kind: position for position, kind in enumerate(Kind)}
    outcomes = {outcome: position for position, outcome in enumerate(Outcome)}
    directions = {direction: position for position, direction in enumerate(Direction)}
    cell_of = {place: number for number, place in enumerate(figure.places)}
    picked = [verdicts[position] for position in chosen]
    data = {
        "kinds": [kind.value for kind in Kind],
        "directions": [direction.value for direction in Direction],
        "outcomes": [outcome.value for outcome in Outcome],
        "failures": [outcome.is_failure for outcome in Outcome],
        "number": list(chosen),
        "iteration": [v.iteration for v in picked],
        "microbatch": [v.microbatch for v in picked],
        "kind": [kinds[v.kind] for v in picked],
        "direction": [directions[v.direction] for v in picked],
        "name": [text(v.name, _NAME_LIMIT) for v in picked],
        "index": [v.index for v in picked],
        "outcome": [outcomes[v.verdict] for v in picked],
        "colour": [figures.colour_class(v) for v in picked],
        "luck": [int(v.is_luck) for v in picked],
        "rel_err": [_short(v.rel_err) for v in picked],
        "rel_err_eps": [_short(v.rel_err_eps) for v in picked],
        "tolerance": [_short(v.tolerance) for v in picked],
        "margin": [_short(v.margin) for v in picked],
        "ranks": [text(wording.ranks_text(v.ranks, 60)) for v in picked],
        "placement": [text(str(v.placement)) for v in picked],
        "shape": [text("×".join(map(str, v.shape)) or "scalar", 120) for v in picked],
        "note": [text(v.note) for v in picked],
        "cell": [cell_of[heat_map.places[position]] for position in chosen],
        "cells": [
            [row, column, group.total, group.failures, group.unchecked]
            for row, column, group in figure.cells
        ],
    }
    return data | {"strings": [clean(value, limit) for value, limit in strings]}


def _residuals(summary: Summary, verdicts: Sequence[Verdict]) -> dict[int, Any]:
    """What the errors of failed tensors look like, by the number of their verdict."""
    known = {residual.key: residual for residual in summary.residuals}
    return {
        position: {
            "total": residual.total,
            "exact": residual.exact,
            "lowest": residual.lowest,
            "counts": residual.counts,
            "worst": [
                [
                    list(element.index),
                    _short(element.reference),
                    _short(element.candidate),
                    element.rank,
                ]
                for element in residual.worst
            ],
            "boxes": [[rank, clean(text, 120)] for rank, text in residual.boxes],
        }
        for position, verdict in enumerate(verdicts)
        if known and (residual := known.get(verdict.key)) is not None
    }


def _short(value: float | None) -> float | str | None:
    """Four digits are enough to read; JSON has no infinities."""
    if value is None:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _plain(value: Any) -> str:
    """A value of a configuration without the brackets and quotes of JSON."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)
