# SPDX-License-Identifier: Apache-2.0
"""Hostile names reach every sink harmlessly."""

import dataclasses
import io
import json
import re
import unicodedata
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from megatron_ttrace.report import html, junit, terminal
from megatron_ttrace.trace.collectives import LedgerFault, RanHere
from megatron_ttrace.trace.records import Exactness, Outcome
from megatron_ttrace.trace.sanitise import clean, for_encoding, script_json, shorten
from tests.report.synthetic_report import COUNT, ROW, culprit_of, make_summary, make_verdict

HOSTILE = [
    "\x1b[31mred\x1b[0m",
    "\x1b]8;;http://evil\x07link",
    "[bold]markup[/bold] [link=http://evil]x[/]",
    "</script><script>alert(1)</script>",
    "<!--<script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}{% raw %}",
    "a\nb\r\nc\td\x00\x7f\x85",
    "\u202egnp.exe",
    "\u2028\u2029\ufeff",
    "\ud800lone",
    "e" + "\u0301" * 500,
    "x" * 10_000,
    "漢字" * 40,
    "]]>&amp;<![CDATA[",
    "",
    "NaN",
    "decoder.layers.99999999999999999999999.mlp",
]
anything = st.one_of(
    st.sampled_from(HOSTILE),
    st.text(st.characters(codec=None), max_size=300),
    st.text("[]/<>&'\"{}%\x1b\n\\.:-", max_size=60),
)
relaxed = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def check_with(*texts: tuple[str, str]):
    """A failed check that puts these names and notes everywhere a text can be."""
    bad = [
        make_verdict(name, verdict=Outcome.DIVERGED, rel_err=0.3, note=note, placement=note)
        for name, note in texts
    ]
    unchecked = [make_verdict(name, verdict=Outcome.UNCHECKED, note=note) for name, note in texts]
    verdicts = [make_verdict(), *bad, *unchecked]
    summary = make_summary(verdicts, tuple(culprit_of(one, one.note, one.note) for one in bad))
    rows = (
        dataclasses.replace(ROW, reduction=note, group=name, dtype=note, module=name, where=note)
        for name, note in texts
    )
    findings = (
        dataclasses.replace(
            COUNT, fault=fault, group=name, ran=(RanHere((0,), 1, name, note),), dtype=note
        )
        for name, note in texts
        for fault in LedgerFault
    )
    summary = dataclasses.replace(
        summary,
        notices=tuple(note for _, note in texts),
        exactness=Exactness(7, 2, texts[0][0]),
        config=summary.config | dict(texts),
        timings={name: 1.0 for name, _ in texts},
        versions=dict(texts),
        collectives=tuple(rows),
        collective_findings=tuple(findings),
    )
    return summary, verdicts


def terminal_text(summary, verdicts, *, encoding: str = "utf-8", **options) -> str:
    """What a person sees."""
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="")
    terminal.render(summary, verdicts, Console(file=file, **options), Path("out"))
    file.flush()
    return raw.getvalue().decode(encoding)


@given(text=anything, limit=st.integers(1, 50))
@relaxed
def test_clean_is_printable_and_short(text: str, limit: int) -> None:
    """No control, format or surrogate character survives."""
    cleaned = clean(text, limit)
    assert len(cleaned) <= limit
    assert not {unicodedata.category(c) for c in cleaned} & {"Cc", "Cf", "Cs", "Zl", "Zp", "Co"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("decoder.layers.0.mlp", "decoder.layers.0.mlp"),
        ("a\x1b[0m", "a\\x1b[0m"),
        ("a\u202eb", "a\\u202eb"),
        ("ε μ 漢", "ε μ 漢"),
    ],
)
def test_clean_shows_what_was_there(text: str, expected: str) -> None:
    """Escapes are visible; honest names are untouched."""
    assert clean(text) == expected


def test_shorten_keeps_both_ends() -> None:
    """Canonical names differ at both ends."""
    assert shorten("decoder.layers.17.mlp.linear_fc1", 17) == "decoder.…near_fc1"


def test_for_encoding_falls_back_to_ascii() -> None:
    """A log in Latin-1 or ASCII raises nothing."""
    assert for_encoding("26.4ε 3×", "ascii") == "26.4eps 3x"
    assert for_encoding("26.4ε", "utf-8") == "26.4ε"
    assert for_encoding("é漢", "ascii") == "\\xe9\\u6f22"


@given(name=anything, note=anything)
@relaxed
def test_terminal_is_harmless(name: str, note: str) -> None:
    """Piped output has no control characters but line ends, and no line beyond 80 columns."""
    text = terminal_text(*check_with((name, note)))
    assert not [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs") and c != "\n"]
    assert max(cell_len(line) for line in text.splitlines()) <= 80


@given(name=anything)
@relaxed
def test_terminal_colours_are_its_own(name: str) -> None:
    """On a terminal the only escapes are colours, whatever a name asks for."""
    text = terminal_text(*check_with((name, name)), force_terminal=True, color_system="standard")
    rest = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in rest
    assert "\x1b]8" not in text


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_terminal_in_ascii(name: str) -> None:
    """A log that cannot hold ε still gets the report."""
    assert "culprit" in terminal_text(*check_with((name, name)), encoding="ascii")


class Page(HTMLParser):
    """Collects elements, attributes and the embedded data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""
        self.texts: list[str] = []
        self._in = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in = "data" if ("id", "data") in attrs else tag

    def handle_endtag(self, tag: str) -> None:
        self._in = ""

    def handle_data(self, data: str) -> None:
        if self._in == "data":
            self.data += data
        elif self._in not in ("script", "style"):
            self.texts.append(data)


def parse(text: str) -> Page:
    """The page as a browser sees it."""
    page = Page()
    page.feed(text)
    page.close()
    return page


@given(name=anything, note=anything)
@relaxed
def test_html_has_no_foreign_element(name: str, note: str) -> None:
    """The elements of the page do not depend on the names; names arrive as text."""
    text = html.render(*check_with((name, note)))
    text.encode("utf-8")
    page = parse(text)
    tags = [tag for tag, _ in page.tags]
    assert tags.count("script") == 2
    assert "img" not in tags
    assert not [a for _, attrs in page.tags for a in attrs if a.startswith("on")]
    assert not re.search("[\x00-\x08\x0b-\x1f\u2028\u2029\u202e]", text)
    data = json.loads(page.data)
    assert clean(name, 240) in data["strings"]


@given(name=anything, note=anything)
@relaxed
def test_junit_is_legal_xml(name: str, note: str) -> None:
    """A parser accepts the file, and the name is in it."""
    suite = ET.fromstring(junit.render(*check_with((name, note))))
    assert int(suite.get("failures", "")) == len(suite.findall(".//failure")) >= 1
    assert any(clean(name) in (f.get("message") or "") for f in suite.iter("failure"))


def test_script_json_cannot_end_the_script() -> None:
    """Every character that HTML or old JavaScript gives a meaning is escaped."""
    text = script_json({"a": "</script><!-- & \u2028\u2029\ud800"})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text)["a"] == "</script><!-- & \u2028\u2029\ud800"
