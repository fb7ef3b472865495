# SPDX-License-Identifier: Apache-2.0
"""``report.html``: one file that explains a check, with no network and no other file.

The page is a template, a style sheet and a script under ``templates/``; the verdicts travel as JSON
inside it and are rendered lazily, so that ten thousand of them do not slow it down.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from megatron_ttrace.report import figures, files, table, wording
from megatron_ttrace.trace.records import Direction, Kind, Outcome, Summary, Verdict
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean, script_json

MAX_EMBEDDED = 50_000
"""Verdicts that travel in the page; beyond, failures and the worst of each cell go first."""

MAX_CULPRITS = 10
MAX_ALIKE = 100
MAX_ROWS = 60
OPEN_ROWS = 12
_NAME_LIMIT = 240


def write(path: Path, summary: Summary, verdicts: Sequence[Verdict], run: str = "") -> None:
    """Write the page atomically.

    Raises:
        TTraceError: when the directory cannot be written.
    """
    text = render(summary, verdicts, run)
    files.write_atomically(Path(path), lambda file: files.put(file, text))


def render(summary: Summary, verdicts: Sequence[Verdict], run: str = "") -> str:
    """The page as text."""
    found = table.heat_map(verdicts)
    figure = figures.heat_map_figure(found, _origins(summary, verdicts))
    chosen = choose(verdicts, figure, MAX_EMBEDDED)
    rows = [row for row in table.layer_rows(verdicts) if row.group.failures]
    return _template().render(
        css=Markup(_asset("report.css")),  # noqa: S704 - our own files
        js=Markup(_asset("report.js")),  # noqa: S704
        data=Markup(  # noqa: S704 - escaped
            script_json(payload(verdicts, figure, chosen) | _residuals(summary, verdicts))
        ),
        summary=summary,
        run_id=run or (summary.run.id if summary.run else ""),
        headline=wording.RESULT_SENTENCES[summary.verdict],
        worst=_worst_margin(verdicts),
        layout_text=wording.layout_text(summary.config),
        counts=_counts(summary, verdicts),
        reasons=[(wording.reason_text(r), n) for r, n in table.unchecked_reasons(verdicts)],
        exactness=wording.exactness_text(summary.exactness) if summary.exactness else "",
        inexact=bool(summary.exactness and summary.exactness.lost),
        notices=wording.notices(summary),
        culprits=_culprits(summary, verdicts),
        more_culprits=max(0, len(table.by_cause(summary.culprits)) - MAX_CULPRITS),
        figure=figure,
        legend=figures.LEGEND,
        curves=figures.curves(verdicts),
        layout=figures.layout_figure(
            summary.config, verdicts, (r for c in summary.culprits for r in c.ranks)
        ),
        layers=[_layer(row) for row in rows[:MAX_ROWS]],
        open_rows=OPEN_ROWS,
        more_layers=max(0, len(rows) - MAX_ROWS),
        run=wording.run_pairs(summary.run),
        config=_pairs(summary.config),
        versions=_pairs(summary.versions),
        timings=[(clean(k), f"{v:.2f} s") for k, v in summary.timings.items()],
        left_out=len(verdicts) - len(chosen),
        total=len(verdicts),
        verdicts_file=files.VERDICTS,
        outcomes=[outcome.value for outcome in Outcome],
        directions=[direction.value for direction in Direction],
        kinds=[kind.value for kind in Kind],
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("report.html.j2"))


def _asset(name: str) -> str:
    folder = resources.files("megatron_ttrace.report") / "templates"
    return (folder / name).read_text(encoding="utf-8")


def choose(verdicts: Sequence[Verdict], figure: figures.HeatMapFigure, limit: int) -> list[int]:
    """Positions of the verdicts that travel in the page, in execution order."""
    if len(verdicts) <= limit:
        return list(range(len(verdicts)))
    worst = {id(group.worst) for _, _, group in figure.cells}
    by_need = sorted(
        range(len(verdicts)),
        key=lambda p: (id(verdicts[p]) not in worst, not verdicts[p].verdict.is_failure),
    )
    return sorted(by_need[:limit])


class _Strings:
    """Texts of the payload, each once and made harmless once."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._known: dict[tuple[str, int], int] = {}

    def add(self, text: str, limit: int) -> int:
        found = self._known.get((text, limit))
        if found is None:
            found = self._known[(text, limit)] = len(self.texts)
            self.texts.append(clean(text, limit))
        return found


def payload(
    verdicts: Sequence[Verdict], figure: figures.HeatMapFigure, chosen: Sequence[int]
) -> dict[str, Any]:
    """The verdicts as columns, texts by number, and the cells they belong to."""
    strings = _Strings()
    kinds = {kind: position for position, kind in enumerate(Kind)}
    outcomes = {outcome: position for position, outcome in enumerate(Outcome)}
    picked = [verdicts[position] for position in chosen]
    directions = {direction: position for position, direction in enumerate(Direction)}
    return {
        "strings": strings.texts,
        "kinds": [kind.value for kind in Kind],
        "directions": [direction.value for direction in Direction],
        "outcomes": [outcome.value for outcome in Outcome],
        "failures": [outcome.is_failure for outcome in Outcome],
        "number": list(chosen),
        "iteration": [v.iteration for v in picked],
        "microbatch": [v.microbatch for v in picked],
        "kind": [kinds[v.kind] for v in picked],
        "direction": [directions[v.direction] for v in picked],
        "name": [strings.add(v.name, _NAME_LIMIT) for v in picked],
        "index": [v.index for v in picked],
        "outcome": [outcomes[v.verdict] for v in picked],
        "colour": [figures.colour_class(v) for v in picked],
        "luck": [int(v.is_luck) for v in picked],
        "rel_err": [_short(v.rel_err) for v in picked],
        "rel_err_eps": [_short(v.rel_err_eps) for v in picked],
        "tolerance": [_short(v.tolerance) for v in picked],
        "margin": [_short(v.margin) for v in picked],
        "ranks": [strings.add(wording.ranks_text(v.ranks, 60), NOTE_LIMIT) for v in picked],
        "placement": [strings.add(str(v.placement), NOTE_LIMIT) for v in picked],
        "shape": [strings.add("×".join(map(str, v.shape)) or "scalar", 120) for v in picked],
        "note": [strings.add(v.note, NOTE_LIMIT) for v in picked],
        "cell": _cell_numbers(picked, figure),
        "cells": [
            [row, column, group.total, group.failures, group.unchecked]
            for row, column, group in figure.cells
        ],
        "layers": [label for _, label in figure.rows],
    }


def _origins(summary: Summary, verdicts: Sequence[Verdict]) -> set[tuple[str, table.Column]]:
    """The cells of the tensors that show the culprits."""
    failures = [verdict for verdict in verdicts if verdict.verdict.is_failure]
    shown = (culprit.shown_by(failures) for culprit in summary.culprits[:MAX_ALIKE])
    return {table.place_of(one) for one in shown if one is not None}


def _residuals(summary: Summary, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """What the errors of failed tensors look like, by the number of their verdict."""
    known = {residual.key: residual for residual in summary.residuals}
    return {
        "residuals": {
            position: {
                "total": residual.total,
                "exact": residual.exact,
                "lowest": residual.lowest,
                "counts": residual.counts,
                "worst": [
                    [list(one.index), _short(one.reference), _short(one.candidate), one.rank]
                    for one in residual.worst
                ],
                "boxes": [[rank, clean(text, 120)] for rank, text in residual.boxes],
            }
            for position, verdict in enumerate(verdicts)
            if known and (residual := known.get(verdict.key)) is not None
        }
    }


def _cell_numbers(verdicts: Sequence[Verdict], figure: figures.HeatMapFigure) -> list[int]:
    """The cell id of every verdict; experts share one."""
    cells = enumerate(figure.cells)
    number_of = {table.place_of(group.worst): number for number, (_, _, group) in cells}
    return [number_of[place] for place in table.places_of(verdicts)]


def _short(value: float | None) -> float | str | None:
    """Four digits are plenty to read; JSON has no infinities."""
    if value is None:
        return None
    return float(f"{value:.4g}") if math.isfinite(value) else str(value)


def _worst_margin(verdicts: Sequence[Verdict]) -> str:
    worst = table.worst_of(verdicts)
    margin = table.margin_of(worst) if worst is not None else None
    return wording.margin_text(margin) if margin is not None else ""


def _counts(summary: Summary, verdicts: Sequence[Verdict]) -> list[tuple[str, int, str]]:
    counts = summary.counts or table.tally(verdicts)
    shown = []
    for outcome in Outcome:
        number = counts.get(outcome.value, 0)
        if number or outcome is Outcome.PASS:
            tone = "bad" if outcome.is_failure else "ok" if outcome is Outcome.PASS else "grey"
            shown.append((outcome.value, number, tone))
    return shown


def _culprits(summary: Summary, verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    number = {id(verdict): position for position, verdict in enumerate(verdicts)}
    failures = [verdict for verdict in verdicts if verdict.verdict.is_failure]
    groups = [
        (group[0], group[0].shown_by(failures), group[1:])
        for group in table.by_cause(summary.culprits)[:MAX_CULPRITS]
    ]
    return [
        {
            "name": clean(c.name, _NAME_LIMIT),
            "direction": c.direction.value,
            "what": f"{c.kind.value}.{c.index} {wording.OUTCOME_WORDS[c.verdict]}",
            "ranks": wording.on_ranks(c.ranks),
            "when": wording.when_text(c.iteration, c.microbatch),
            "error": wording.error_text(c.rel_err, c.rel_err_eps),
            "tolerance": wording.sci(c.tolerance),
            "margin": wording.margin_text(c.margin),
            "story": [
                ("Evidence", clean(c.reason, NOTE_LIMIT) or "-"),
                *((label.capitalize(), text) for label, text in wording.cause_pairs(c)),
            ],
            "row": -1 if shown is None else number[id(shown)],
            "likewise": [clean(other.name, _NAME_LIMIT) for other in alike[:MAX_ALIKE]],
            "more": max(0, len(alike) - MAX_ALIKE),
        }
        for c, shown, alike in groups
    ]


def _layer(row: table.LayerRow) -> dict[str, Any]:
    worst = row.group.worst
    return {
        "layer": clean(row.layer, 60),
        "direction": row.direction.value,
        "tensor": clean(f"{table.tail_of(worst.name)} {worst.kind.value}.{worst.index}"),
        "verdict": worst.verdict.value,
        "error": wording.error_text(worst.rel_err, worst.rel_err_eps),
        "tolerance": wording.sci(worst.tolerance),
        "margin": wording.margin_text(worst.margin),
        "colour": figures.colour_class(worst),
        "failed": f"{row.group.failures} of {row.group.total}",
        "ranks": wording.ranks_text(worst.ranks),
    }


def _pairs(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [(clean(key, 60), clean(_plain(value), 400) or "-") for key, value in values.items()]


def _plain(value: Any) -> str:
    """A value of a configuration without the brackets and quotes of JSON."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    return value if isinstance(value, str) else json.dumps(value, default=str)
