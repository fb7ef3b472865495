# SPDX-License-Identifier: Apache-2.0
"""The terminal report, and every other format beside it: the answer first, nothing hidden."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from megatron_ttrace.report import html, table, terminal
from megatron_ttrace.trace.outcomes import NotExercised, Unexercised
from megatron_ttrace.trace.records import Code, Direction, Run
from tests.diagnose.judged_by_hand import localise
from tests.report.expected import (
    CHECKS,
    FILES,
    FOLDER,
    UNEXERCISED,
    Check,
    deep,
    healthy,
    norms_not_reduced,
    published,
    rendered,
    text_of,
)


@pytest.mark.parametrize(("name", "ending"), FILES)
def test_as_expected(name: str, ending: str) -> None:
    """Word for word; tests/report/expected.py writes the files."""
    assert rendered(name, ending) == (FOLDER / f"{name}.{ending}").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("width", [24, 63, 64, 80, 120, None])
def test_width(width: int | None, name: str) -> None:
    """No line is wider than the page, except by what is to be copied: names, paths, words.

    A log is 80 columns wide and plain: no colour, no box drawing, the answer on its first line.
    """
    options = {"width": width, "force_terminal": True, "color_system": None} if width else {}
    check = CHECKS[name]()
    text = text_of(check, **options)
    for line in text.splitlines():
        assert len(line) <= (width or 80) or max(map(len, line.split())) > (width or 80) - 12, line
    assert text.startswith("ttrace  ")
    assert check[0].verdict.value in text.splitlines()[0]
    assert not set("\x1b│┃━─┏└…{}") & set(text.replace("(layers ...)", ""))
    assert "None" not in text


def test_formats_agree() -> None:
    """What the page and the terminal say of one culprit in all layers of a deep model."""
    check = deep()
    assert [len(group) for group in table.by_cause(check[0].culprits)] == [33]
    page = html.render(*check)
    assert page.count('<article class="culprit') == 1
    assert "decoder.layers.*.input_layernorm (in all 16 layers)" in page
    page = html.render(*healthy(not_exercised=UNEXERCISED))
    assert page.count("not exercised: ") == len(UNEXERCISED)


def test_unknown_causes_are_folded_over_layers() -> None:
    """The same module of several layers is one line, two modules are two."""
    culprits = localise(norms_not_reduced(8))
    assert [len(group) for group in table.by_cause(culprits)] == [8, 8, 1]
    names = table.folded(table.by_cause(culprits[2:])[0], ["decoder.layers.0.input_layernorm"])
    assert names == ["decoder.layers.*.input_layernorm (in 7 of 8 layers: 1-7)"]


def test_several_jobs_of_one_command() -> None:
    """What a report has said of all of them, the next one leaves out."""
    check, said = healthy(not_exercised=UNEXERCISED), set[str]()
    first, second = (text_of(check, Path(folder), said=said) for folder in "12")
    assert ("notice" in first, "notice" in second) == (True, False)
    assert ("layout" in first, "layout" in second) == (True, True)


def test_paths_can_be_copied(diverged: Check, tmp_path: Path) -> None:
    """However long: each in one piece, on a line that it ends."""
    folder = tmp_path / ("long-name" * 12)
    published(diverged, folder)
    lines = text_of(diverged, folder).splitlines()
    for name in ("report.html", "verdicts.jsonl", "summary.json"):
        assert any(line.endswith(f" {folder}/{name}") for line in lines)
    code = Code(version="1", path=f"/{'p' * 100}/megatron", commit="", dirty=False)
    texts = dict.fromkeys(("script", "script_sha256", "host", "user", "date"), "x")
    run = Run(id="0" * 16, command=(), megatron=code, ttrace=code, environment={}, seed=0, **texts)
    lines = text_of((dataclasses.replace(diverged[0], run=run), diverged[1])).splitlines()
    assert f"           /{'p' * 100}/megatron" in lines
    (tmp_path / "logs").mkdir()
    assert f"see logs   {tmp_path}/logs\n" in text_of(CHECKS["no-answer"](), tmp_path)


def test_a_command_can_be_copied(diverged: Check) -> None:
    """Where the job is known, the whole command is there; a shell reads it as it was meant."""
    words = ["ttrace", "check", "--nproc-per-node", "2", "--", "a script.py", "--x=$HOME", "-1"]
    assert shlex.split(" ".join(terminal.shell_lines(["x" * 2000], 80))) == ["x" * 2000]
    words += [word for number in range(12) for word in (f"--a-flag-{number}", "value")]
    text = text_of(diverged, Path("out"), words)
    assert max(map(len, text.splitlines())) <= 80
    command = text[text.index("ttrace check") :]
    assert shlex.split(command.replace("\\\n", "")) == words
    text = text_of(diverged, Path("a b"), words * 10)
    assert "the same with --ttrace-isolate --ttrace-dir 'a b-isolated'" in text


def test_nothing_is_suggested_that_would_be_refused(diverged: Check) -> None:
    """Two runs with modules isolated cannot be compared; nor does it help where none is wrong."""
    summary, verdicts = diverged
    both = dataclasses.replace(summary, config={**summary.config, "against": {}})
    culprits = [dataclasses.replace(c, direction=Direction.UPDATE) for c in summary.culprits]
    for other in (both, dataclasses.replace(summary, culprits=tuple(culprits))):
        text = text_of((other, verdicts))
        assert "open report.html" in text
        assert "--ttrace-isolate" not in text


@pytest.mark.parametrize("feature", Unexercised)
def test_what_was_not_exercised(feature: Unexercised) -> None:
    """Each in words, in 80 columns, without a place for a number left open."""
    names = tuple(f"decoder.layers.{layer}.mlp.router" for layer in range(7))
    text = text_of(healthy(not_exercised=(NotExercised(feature, 1234, 5000, names),)))
    assert "notice     not exercised: " in text
    assert max(map(len, text.splitlines())) <= 80
    assert not set("{}") & set(text)
    assert "None" not in text


def test_a_number_just_below_its_limit() -> None:
    """Rounding does not make them equal."""
    norm = NotExercised(Unexercised.CLIP, 0.99995, 1.0)
    assert "(norm 0.99995 never exceeded 1)" in text_of(healthy(not_exercised=(norm,)))
