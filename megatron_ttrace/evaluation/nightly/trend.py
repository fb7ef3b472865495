# SPDX-License-Identifier: Apache-2.0
"""``trend.html``: the last two nights and a history, in one file that needs no network access.

Names of mutants, explanations and exceptions are foreign text: ``clean`` makes it harmless, and the
template engine quotes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from importlib import resources
from pathlib import Path

import jinja2
from markupsafe import Markup

from megatron_ttrace.evaluation.nightly import changes
from megatron_ttrace.evaluation.nightly.records import Night, NightCase, NightPart, State
from megatron_ttrace.report import files
from megatron_ttrace.trace.sanitise import NOTE_LIMIT, clean

TITLES = {
    NightPart.BUGS: "Known bugs",
    NightPart.MATRIX: "Healthy configurations",
    NightPart.MUTANTS: "Mutants",
}
_CLASSES = {
    State.GOOD: "good",
    State.MISSED: "missed",
    State.ALARM: "alarm",
    State.BROKEN: "broken",
}
WIDTH, HEIGHT = 520, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 22


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A case in one night; ``state`` is a class of the style sheet."""

    state: str
    words: str
    margin: str
    tip: str


@dataclasses.dataclass(frozen=True, slots=True)
class TrendRow:
    """A case over the nights, the oldest first."""

    name: str
    strip: tuple[Cell, ...]
    yesterday: Cell
    today: Cell
    marks: str
    note: str
    changed: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Section:
    """A part; ``open`` rows are shown, ``quiet`` ones on demand."""

    title: str
    counts: str
    open: tuple[TrendRow, ...]
    quiet: tuple[TrendRow, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """A night in a chart."""

    x: float
    y: float
    tip: str


@dataclasses.dataclass(frozen=True, slots=True)
class Chart:
    """A number over the nights; ``ticks`` are heights and labels, ``line`` is an SVG path."""

    title: str
    now: str
    points: tuple[Point, ...]
    line: str
    ticks: tuple[tuple[float, str], ...]


def write(path: Path, nights: Sequence[Night]) -> None:
    """Write the page atomically; ``nights`` are the oldest first, at least one.

    Raises:
        TTraceError: when the directory cannot be written.
    """
    text = render(nights)
    files.write_atomically(path, [text])


def render(nights: Sequence[Night]) -> str:
    """The page as text."""
    today = nights[-1]
    yesterday = nights[-2] if len(nights) > 1 else None
    good = next((night for night in reversed(nights[:-1]) if night.is_good), None)
    return _template().render(
        css=Markup(_asset("report.css", "megatron_ttrace.report")),  # noqa: S704 - our own file
        more_css=Markup(_asset("trend.css")),  # noqa: S704
        headline=changes.headline(today),
        state="good" if today.is_good else "missed" if today.bad else "broken",
        today=_date(today),
        yesterday=_date(yesterday) if yesterday else "no night before",
        minutes=f"{today.seconds / 60:.1f} min",
        said=[clean(line, NOTE_LIMIT) for line in changes.lines(today, good)],
        # ``said`` compares a bad night with the last good one, which may be yesterday.
        moved=_moved(yesterday, today)
        if yesterday and (today.is_good or yesterday != good)
        else [],
        sections=[_section(part, nights) for part in NightPart if _has(part, nights)],
        charts=[chart for chart in _charts(nights) if chart.points],
        nights=[_summary(night) for night in reversed(nights)],
        versions=[(clean(name), clean(value)) for name, value in today.versions.items()],
        options=[(clean(name), clean(value)) for name, value in today.options.items() if value],
        width=WIDTH,
        height=HEIGHT,
        left=_LEFT,
        right=WIDTH - _RIGHT,
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.from_string(_asset("trend.html.j2"))


def _asset(name: str, package: str = "megatron_ttrace.evaluation.nightly") -> str:
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def _has(part: NightPart, nights: Sequence[Night]) -> bool:
    return any(case.part is part for night in nights for case in night.cases)


def _date(night: Night) -> str:
    return clean(night.began.replace("T", " ")[:16])


def _section(part: NightPart, nights: Sequence[Night]) -> Section:
    """The cases of a part in tonight's order, then those that ran only in earlier nights."""
    found = [{case.name: case for case in night.cases if case.part is part} for night in nights]
    names = list(dict.fromkeys(name for night in reversed(found) for name in night))
    lines = [_line(name, nights, [night.get(name) for night in found]) for name in names]
    # There are many mutants; one that is killed again is not news.
    loud = [
        x for x in lines if part is not NightPart.MUTANTS or x.changed or x.today.state != "good"
    ]
    shown = sorted(loud, key=lambda line: line.today.state in ("good", "absent"))
    tonight = found[-1].values()
    counts = ", ".join(
        f"{number} {state}"
        for state in State
        if (number := sum(case.state is state for case in tonight))
    )
    quiet = tuple(line for line in lines if line not in loud)
    return Section(TITLES[part], counts or "not run", tuple(shown), quiet)


def _line(name: str, nights: Sequence[Night], cases: Sequence[NightCase | None]) -> TrendRow:
    strip = tuple(_cell(night, case) for night, case in zip(nights, cases, strict=True))
    today, yesterday = strip[-1], strip[-2] if len(strip) > 1 else _cell(None, None)
    last = next(case for case in reversed(cases) if case is not None)
    changed = len(strip) > 1 and today.state != yesterday.state
    note = clean(last.note, NOTE_LIMIT)
    return TrendRow(clean(name), strip, yesterday, today, clean(last.marks), note, changed)


def _cell(night: Night | None, case: NightCase | None) -> Cell:
    date = _date(night) if night else ""
    if case is None:
        return Cell("absent", "–", "", f"{date}: not run")
    margin = "" if case.margin is None else _short(case.margin)
    tip = f"{date}: {case.state}{f', margin {margin}' if margin else ''}"
    return Cell(_CLASSES[case.state], case.state.value, margin, tip)


def _short(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"


def _moved(then: Night, now: Night) -> list[tuple[str, str, str]]:
    found = changes.compare(then, now)
    return [
        (clean(name), clean(before or "none"), clean(after or "none"))
        for name, (before, after) in {**found.versions, **found.options}.items()
    ]


def _summary(night: Night) -> tuple[str, str, str, str, str]:
    """Date, class, words, counts, minutes."""
    state = "good" if night.is_good else "missed" if night.bad else "broken"
    counts = "; ".join(
        f"{TITLES[part].lower()} {night.count(part, State.GOOD)} of {total}"
        for part in NightPart
        if (total := sum(case.part is part for case in night.cases))
    )
    return _date(night), state, changes.headline(night), counts, f"{night.seconds / 60:.1f}"


def _charts(nights: Sequence[Night]) -> list[Chart]:
    def margins(night: Night, part: NightPart) -> list[float]:
        found = [case.margin for case in night.cases if case.part is part]
        return [margin for margin in found if margin is not None and math.isfinite(margin)]

    return [
        _chart(
            "Weakest margin of a known bug's culprit (log; below 1 it is missed)",
            nights,
            lambda night: min(margins(night, NightPart.BUGS), default=None),
            log=True,
        ),
        _chart(
            "Worst margin of a healthy configuration (above 1 is an alarm)",
            nights,
            lambda night: max(margins(night, NightPart.MATRIX), default=None),
        ),
        _chart(
            "Mutation score", nights, lambda night: night.scores.get("mutation score"), percent=True
        ),
        _chart("Minutes", nights, lambda night: night.seconds / 60),
    ]


def _chart(
    title: str,
    nights: Sequence[Night],
    value: Callable[[Night], float | None],
    *,
    log: bool = False,
    percent: bool = False,
) -> Chart:
    found = [(number, value(night)) for number, night in enumerate(nights)]
    known = [(number, v) for number, v in found if v is not None and (v > 0 or not log)]
    if not known:
        return Chart(title, "", (), "", ())
    label = (lambda v: f"{v:.1%}") if percent else _short
    scale = math.log10 if log else float
    bottom, top = _range([scale(v) for _, v in known], log=log, percent=percent)
    wide = WIDTH - _LEFT - _RIGHT
    tall = HEIGHT - _TOP - _BOTTOM

    def x(number: int) -> float:
        return round(_LEFT + wide * (number / max(1, len(nights) - 1)), 1)

    def y(v: float) -> float:
        return round(_TOP + tall * (1 - (scale(v) - bottom) / (top - bottom)), 1)

    points = tuple(Point(x(n), y(v), f"{_date(nights[n])}: {label(v)}") for n, v in known)
    steps = [bottom + (top - bottom) * part / 3 for part in range(4)]
    ticks = tuple((y(10**s if log else s), label(10**s if log else s)) for s in steps)
    return Chart(title, label(known[-1][1]), points, _path(points), ticks)


def _range(values: Iterable[float], *, log: bool, percent: bool) -> tuple[float, float]:
    known = list(values)
    low, high = min(known), max(known)
    if percent:
        low, high = min(low, 0.85), 1.0
    elif log:
        low, high = min(low, 0.0), max(high, 1.0)
    else:
        low, high = min(0.0, low), high * 1.1
    return (low, high) if high > low else (low, low + 1.0)


def _path(points: Sequence[Point]) -> str:
    return " ".join(f"{'L' if number else 'M'}{p.x} {p.y}" for number, p in enumerate(points))
