# SPDX-License-Identifier: Apache-2.0
"""The page: right, self-contained, and safe to open."""

import dataclasses
import html.parser
import re
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.nightly import trend
from megatron_ttrace.evaluation.nightly.records import NightPart, State
from tests.evaluation.nightly.synthetic import case, month, night
from tests.report import chromium

HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[31m\u202e"


class Reader(html.parser.HTMLParser):
    """Tags, attributes that load something, and cells of table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.loads: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "onerror")]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data.strip()


def row(reader: Reader, name: str) -> list[str]:
    (found,) = [row for row in reader.rows if row and row[0] == name]
    return found


def test_yesterday_beside_today() -> None:
    """States and margins of both nights in one row; the note is tonight's."""
    reader = Reader(trend.render(month()))
    assert row(reader, "01 tp-embedding-mask [TP 2]")[2:] == [
        *("good", "76.6", "missed", ""),
        *("", "found equivalent"),
    ]
    assert row(reader, "tp2/gpt/fp32")[2:6] == ["good", "0.31", "good", "0.32"]


def test_what_is_wrong_comes_first() -> None:
    """Before the history."""
    text = trend.render(month())
    assert "1 missed" in text
    assert "torch: 2.15.0 -&gt; 2.16.0" in text
    assert text.index("found equivalent") < text.index("History")


def test_mutants_as_yesterday_are_folded() -> None:
    """Twenty that were killed again are one line; the one that was not is seen."""
    nights = month(2)
    assert "20 as yesterday" in trend.render(nights)
    cases = [
        dataclasses.replace(one, state=State.MISSED) if one.name.endswith(":7") else one
        for one in nights[-1].cases
    ]
    text = trend.render([nights[0], dataclasses.replace(nights[1], cases=tuple(cases))])
    assert "19 as yesterday" in text


def test_one_night() -> None:
    """The first night has no yesterday."""
    text = trend.render([night()])
    assert "no night before" in text
    assert row(Reader(text), "01")[2:5] == ["–", "", "good"]


def test_a_case_that_did_not_run_tonight() -> None:
    """A dash in the place of its result."""
    reader = Reader(trend.render([night(case(name="old")), night(case(name="new"))]))
    assert row(reader, "old")[4] == "–"
    assert row(reader, "new")[2] == "–"


def test_nothing_is_loaded_and_nothing_runs() -> None:
    """No scripts, links or images."""
    reader = Reader(trend.render(month()))
    assert not reader.loads
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert "http" not in re.sub(r"http-equiv", "", trend.render(month()))


def test_foreign_text_is_harmless() -> None:
    """Names, notes, versions and options are shown, not obeyed."""
    bad = night(
        case(NightPart.MUTANTS, HOSTILE, State.MISSED, marks=HOSTILE, note=HOSTILE),
        versions={HOSTILE: HOSTILE},
        options={HOSTILE: HOSTILE},
    )
    text = trend.render([night(), bad])
    reader = Reader(text)
    assert not reader.loads
    assert "script" not in reader.tags
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "alert(1)" in text


@pytest.mark.parametrize("margin", [None, 0.0, float("inf"), 1e-30, 3.2e6])
def test_any_margin_can_be_drawn(margin: float | None) -> None:
    """Infinite ones are words; a chart leaves them out."""
    text = trend.render([night(case(margin=margin)), night(case(margin=margin))])
    assert "nan" not in text
    assert not re.search(r'(cx|cy|y1)="[^"]*(inf|nan)', text)


def test_charts() -> None:
    """One point a night, within the picture; none for a score that no night has."""
    charts = trend._charts(month())
    assert [len(chart.points) for chart in charts] == [12, 12, 12, 0, 0, 0, 12]
    for chart in charts:
        assert all(0 <= p.x <= trend.WIDTH and 0 <= p.y <= trend.HEIGHT for p in chart.points)
    weakest = charts[0].points
    assert weakest[0].y > weakest[-1].y, "a larger margin is higher up"


@pytest.mark.skipif(chromium.EXECUTABLE is None, reason="chromium is not installed")
@pytest.mark.slow
def test_in_a_browser(tmp_path: Path) -> None:
    """It is laid out without faults, without requests, and no wider than the window."""
    page = tmp_path / "trend.html"
    trend.write(page, month(30))
    with chromium.Browser(tmp_path / "profile") as browser:
        for width in (1400, 420):
            browser.show(page, width=width)
            assert browser.js("document.documentElement.scrollWidth") <= width
        assert browser.faults == []
        assert [url for url in browser.requests if not url.startswith("file:")] == []
        light = browser.js("getComputedStyle(document.body).backgroundColor")
        browser.call(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": "dark"}],
        )
        assert browser.js("getComputedStyle(document.body).backgroundColor") != light
