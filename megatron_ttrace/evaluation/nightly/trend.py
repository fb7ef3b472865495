# SPDX-License-Identifier: Apache-2.0
"""``trend.html``: the last two nights and a history, in one file that needs no network access.

Names of mutants, explanations and exceptions are foreign text: the template's filters ``name`` and
``note`` make it harmless, and the template engine quotes it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
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
    NightPart.PLANTED: "Planted errors",
    NightPart.MUTANTS: "Mutants",
}
_SHARES = {
    "silent mutants killed": "Mutants that neither crash nor hang: killed",
    "right module": "Mutants: of those killed by the check, right module",
    "cause told": "Mutants: of those killed by the check, cause told",
    "cause true": "Mutants: of the causes that are told, true",
}
WIDTH, HEIGHT = 520, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 12, 22


@dataclasses.dataclass(frozen=True, slots=True)
class TrendRow:
    """A case over the nights, the oldest first; ``None`` for a night without it."""

    name: str
    cases: tuple[NightCase | None, ...]

    @property
    def today(self) -> NightCase | None:
        """Tonight's."""
        return self.cases[-1]

    @property
    def yesterday(self) -> NightCase | None:
        """That of the night before."""
        return self.cases[-2] if len(self.cases) > 1 else None

    @property
    def latest(self) -> NightCase:
        """That of the last night with it."""
        return next(case for case in reversed(self.cases) if case is not None)

    @property
    def changed(self) -> bool:
        """Whether tonight's result differs from that of the night before."""
        states = [case.state if case else None for case in (self.today, self.yesterday)]
        return len(self.cases) > 1 and states[0] is not states[1]

    @property
    def good(self) -> bool:
        """Whether tonight's result is good."""
        return self.today is not None and self.today.state is State.GOOD


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
    """A number over the nights; ``ticks`` are heights and labels."""

    title: str
    now: str
    points: tuple[Point, ...]
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
    # ``said`` compares a bad night with the last good one, which may be yesterday.
    compares = yesterday is not None and (today.is_good or yesterday != good)
    return _template().render(
        css=Markup(_asset("report.css", "megatron_ttrace.report")),  # noqa: S704 - our own file
        more_css=Markup(_asset("trend.css")),  # noqa: S704
        headline=changes.headline,
        today=today,
        yesterday=yesterday,
        said=changes.lines(today, good),
        moved=changes.compare(yesterday, today).moved if yesterday and compares else {},
        sections=[section for part in NightPart if (section := _section(part, nights))],
        charts=[chart for chart in _charts(nights) if chart.points],
        nights=nights,
        titles=TITLES,
        states=State,
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
    environment.filters |= {
        "name": clean,
        "note": functools.partial(clean, limit=NOTE_LIMIT),
        "date": _date,
        "short": _short,
    }
    return environment.from_string(_asset("trend.html.j2"))


def _asset(name: str, package: str = "megatron_ttrace.evaluation.nightly") -> str:
    return (resources.files(package) / "templates" / name).read_text(encoding="utf-8")


def _date(night: Night) -> str:
    return clean(night.began.replace("T", " ")[:16])


def _section(part: NightPart, nights: Sequence[Night]) -> Section | None:
    """The cases of a part in tonight's order, then those that ran only in earlier nights."""
    found = [{case.name: case for case in night.cases if case.part is part} for night in nights]
    names = dict.fromkeys(name for night in reversed(found) for name in night)
    rows = [TrendRow(name, tuple(night.get(name) for night in found)) for name in names]
    # There are many mutants; one that is killed again is not news.
    loud = [row for row in rows if part is not NightPart.MUTANTS or row.changed or not row.good]
    shown = sorted(loud, key=lambda row: row.today is None or row.good)
    numbers = [f"{n} {state}" for state in State if (n := nights[-1].count(part, state))]
    quiet = tuple(row for row in rows if row not in loud)
    counts = ", ".join(numbers) or "not run"
    return Section(TITLES[part], counts, tuple(shown), quiet) if rows else None


def _short(value: float | None) -> str:
    return "" if value is None else "∞" if math.isinf(value) else f"{value:.3g}"


def _charts(nights: Sequence[Night]) -> list[Chart]:
    def margins(night: Night, part: NightPart) -> list[float]:
        found = [case.margin for case in night.cases if case.part is part]
        return [margin for margin in found if margin is not None and math.isfinite(margin)]

    def share(name: str) -> Callable[[Night], float | None]:
        return lambda night: night.scores.get(name)

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
        *(_chart(title, nights, share(name), percent=True) for name, title in _SHARES.items()),
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
        return Chart(title, "", (), ())
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
    return Chart(title, label(known[-1][1]), points, ticks)


def _range(values: Sequence[float], *, log: bool, percent: bool) -> tuple[float, float]:
    low, high = min(values), max(values)
    if percent:
        low, high = min(low, 0.85), 1.0
    elif log:
        low, high = min(low, 0.0), max(high, 1.0)
    else:
        low, high = min(0.0, low), high * 1.1
    return (low, high) if high > low else (low, low + 1.0)
