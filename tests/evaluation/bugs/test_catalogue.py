# SPDX-License-Identifier: Apache-2.0
"""The descriptions of the known bugs, and that they fit the installed Megatron."""

from pathlib import Path

import pytest

from megatron_ttrace.evaluation.bugs import catalogue, patching
from megatron_ttrace.evaluation.bugs.catalogue import Bug, BugLayout
from megatron_ttrace.trace.errors import TTraceError

ROOT = Path(__file__).parents[3]
BUGS = catalogue.load_catalogue()


def test_ids() -> None:
    """Unique, in order and complete; of each the report must name the cause."""
    ids = [bug.id for bug in BUGS]
    assert ids == sorted(set(ids))
    assert {bug_id[:2] for bug_id in ids} == {f"{number:02}" for number in range(1, 15)}
    assert all(bug.expected.cause for bug in BUGS)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_patches_fit(bug: Bug) -> None:
    """Each fragment is there exactly once, and its function is found live; then it is put back."""
    before = patching.apply(bug.patches)
    assert before
    for function, code in before:
        assert function.__code__ is not code
        function.__code__ = code


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_has_a_page(bug: Bug) -> None:
    """Linked from the index, under the same id."""
    page = ROOT / "docs" / "bugs" / f"{bug.id}-{bug.name}.md"
    index = (ROOT / "docs" / "bugs" / "README.md").read_text()
    assert f"({page.name})" in index
    assert page.read_text().startswith(f"# {bug.id} ")


@pytest.mark.parametrize(
    ("arguments", "nproc", "short"),
    [
        ("--tensor-model-parallel-size 2 --sequence-parallel --num-layers 4", 2, "TP 2 SP"),
        ("--num-layers 4", 2, "DP"),
        ("--num-layers 4", 1, "one rank"),
    ],
)
def test_short_layout(arguments: str, nproc: int, short: str) -> None:
    """The usual abbreviations."""
    assert BugLayout(nproc, tuple(arguments.split())).short == short


def test_finds() -> None:
    """By id, by name and by both."""
    bug = BUGS[0]
    assert catalogue.find(BUGS, "01") is bug
    assert catalogue.find(BUGS, bug.name) is bug
    assert catalogue.find(BUGS, "01-tp-embedding-mask") is bug


GOOD = """
title = "t"
upstream = []
confidence = "A"
axis = "TP"
layout = [{nproc = 2, arguments = "--a 'b c'"}]
patch = [{module = "m", fragment = "f", replacement = "r"}]
expected = {module = "*", kind = "output", direction = "forward", verdicts = ["diverged"]}
"""


def test_reads(tmp_path: Path) -> None:
    """Id and name from the file name, words as a shell splits them, defaults."""
    path = tmp_path / "04c-name.toml"
    path.write_text(GOOD)
    bug = catalogue.read_bug(path)
    assert (bug.id, bug.name) == ("04c", "name")
    assert bug.layouts[0].arguments == ("--a", "b c")
    assert bug.layouts[0].models == ("gpt", "llama")


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("bug.toml", GOOD, "NN-name.toml"),
        ("01-a.toml", GOOD.replace('title = "t"', ""), "title: is missing"),
        ("01-a.toml", GOOD.replace("output", "outptu"), "outptu"),
        ("01-a.toml", GOOD.replace("nproc = 2", "nprocs = 2"), "unknown key 'nprocs'"),
        ("01-a.toml", GOOD.replace("nproc = 2", "nproc = 2, extra = 1"), "extra"),
        ("01-a.toml", GOOD + "more = 1\n", "more"),
        ("01-a.toml", "no toml", "toml"),
        ("01-a.toml", GOOD.replace("nproc = 2", 'nproc = 2, data = "odd"'), "odd"),
    ],
)
def test_damaged(tmp_path: Path, name: str, text: str, reason: str) -> None:
    """The message names the file and the mistake."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(TTraceError, match=name) as caught:
        catalogue.read_bug(path)
    assert reason in str(caught.value)
