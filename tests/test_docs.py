# SPDX-License-Identifier: Apache-2.0
"""The documents are complete, and their links work."""

import argparse
import re
import tomllib
from pathlib import Path

import pytest

from megatron_ttrace.cli import demo
from megatron_ttrace.cli.main import build_parser
from megatron_ttrace.mcore.versions import MAIN, MAIN_COMMIT, SUPPORTED
from megatron_ttrace.report import wording
from megatron_ttrace.trace.records import Direction, Outcome, Result
from tests import documents, flags_document
from tests.integration.jobs import ROOT

DOCUMENTS = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]
MOST_WORDS = 36_000


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links(path: str) -> None:
    """Every relative link and picture names a file of this repository."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", (ROOT / path).read_text())
    assert not [link for link in links if not ((ROOT / path).parent / link).exists()]


def test_length() -> None:
    """README and documents stay short enough to be read, counted as ``wc -w`` does."""
    words = {path: len((ROOT / path).read_text(encoding="utf-8").split()) for path in DOCUMENTS}
    assert sum(words.values()) <= MOST_WORDS, f"a page that grows needs one that shrinks: {words}"


def test_the_changelog() -> None:
    """It says what is new for users: a correction of something new has no line."""
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split()) <= 1_500


def test_lines() -> None:
    """Outside of tables and headings, lines have at most 120 characters."""
    long = [
        f"{path}: {line}"
        for path in [*DOCUMENTS, "CHANGELOG.md"]
        for line in (ROOT / path).read_text(encoding="utf-8").splitlines()
        if len(line) > 120 and not line.startswith(("|", "#"))
    ]
    assert not long


def test_every_document_is_in_the_index() -> None:
    """Every document is listed in the index."""
    index = (ROOT / "docs" / "README.md").read_text()
    own = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not [name for name in sorted(own) if f"({name})" not in index]


def test_the_table_of_flags() -> None:
    """It is what their declaration makes it: python -m tests.flags_document."""
    text = flags_document.PATH.read_text(encoding="utf-8")
    assert flags_document.page(text) == text
    assert flags_document.render().count("\n| `--ttrace-") > 15
    assert "--ttrace-role" not in text


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser by name, without their aliases."""
    (action,) = (one for one in parser._actions if isinstance(one, argparse._SubParsersAction))
    return {one.prog.split()[-1]: one for one in action.choices.values()}


def test_every_command_is_documented() -> None:
    """The table lists all commands."""
    text = (ROOT / "docs" / "commands.md").read_text()
    commands = commands_of(build_parser())
    ours = commands_of(commands["eval"])
    names = [name for name in commands if name not in ours] + [f"eval {name}" for name in ours]
    assert len(ours) >= 3
    assert not [name for name in names if not re.search(rf"`ttrace {name}\b", text)]


def test_the_support_matrix() -> None:
    """What the README calls supported and tested is what is required, known and pinned."""
    rows = dict(
        re.findall(r"^\| (\S+) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    )
    pins = (ROOT / "requirements" / "constraints.txt").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"torch=={re.findall(r'[|] ([0-9.]+) ', rows['PyTorch'])[0]}\n" in pins
    assert f"torch>={rows['PyTorch'].split()[0]}" in project["dependencies"]
    assert rows["megatron-core"].startswith(", ".join(SUPPORTED))
    assert f"{MAIN} (main, commit {MAIN_COMMIT})" in rows["megatron-core"]
    assert f">={rows['Python'].split(',')[0]}" == project["requires-python"]
    pythons = [line.rsplit(" ", 1)[-1] for line in project["classifiers"] if ":: 3." in line]
    assert rows["Python"].startswith(", ".join(pythons))


def test_the_glossary_has_the_words_of_reports() -> None:
    """All verdicts, axes, and directions."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    words = [*map(str, Outcome), *map(str, Result), *wording.AXES]
    assert not [word for word in words if f"`{word}`" not in text]
    assert not [word for word in map(str, Direction) if not re.search(rf"\b{word}\b", text)]


def test_statements_of_the_readme() -> None:
    """What it says of the demo, the patch and GPUs is so."""
    text = (ROOT / "README.md").read_text()
    assert demo._RANKS == 4
    assert "checks a four-rank job twice" in text
    added = [
        sum(line.startswith("+") for line in path.read_text().splitlines()) - 1
        for path in (ROOT / "patches" / "megatron-lm").glob("core_v*.patch")
    ]
    assert set(added) == {4}
    assert "adds the four lines" in text
    page = (ROOT / "docs" / "gpu.md").read_text()
    table = page.partition("| on a GPU |")[2].partition("<!-- end -->")[0].splitlines()[2:]
    assert table
    tried = [line for line in table if "**not yet tried**" not in line]
    assert ("nothing has been tried on a GPU yet" in text) == (not tried)


_NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e-?\d+)?")
TUTORIAL = documents.blocks("docs/tutorial.md")


def test_nothing_of_the_tutorial_is_left_out() -> None:
    """Every block of commands is run."""
    assert len(TUTORIAL) >= 5
    assert not [block.text for block in TUTORIAL if block.unmarked or block.excuse]


@pytest.mark.timeout(900)
def test_the_tutorial(tmp_path: Path) -> None:
    """Its commands run one after the other and print the output shown."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    printed = "\n".join(documents.check(block, tmp_path) for block in TUTORIAL)
    said = " ".join(printed.split())
    for line in re.findall(r"^(?:culprit|direction|reason|cause|tensors) +.*$", text, re.MULTILINE):
        assert " ".join(line.split()) in said
    (shown,), (ran, *_) = (
        re.findall(r"^error +(.*)$", one, re.MULTILINE) for one in (text, printed)
    )
    numbers = [[float(number) for number in _NUMBER.findall(line)] for line in (shown, ran)]
    # Rounding, and with it the tolerance, is another on another machine.
    assert numbers[0] == pytest.approx(numbers[1], rel=0.3)
    failing = [
        sum(map(int, re.findall(r"(\d+) (?:diverged|replica_conflict)", line)))
        for line in re.findall(r"^tensors .*$", text, re.MULTILINE)
    ]
    assert failing[:2] == [122, 10]
    assert f"- {failing[0]} tensors fail" in text
    assert "\nTen tensors still fail" in text
    error, _, tolerance, _ = numbers[0]
    assert f"wrong by {error} %. Rounding explains {100 * tolerance:.5f} %" in text
