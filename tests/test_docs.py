# SPDX-License-Identifier: Apache-2.0
"""The documents are complete, and their links work."""

import argparse
import re
from pathlib import Path

import pytest

from megatron_ttrace.__main__ import build_parser
from megatron_ttrace.mcore import flags
from tests import documents
from tests.integration.jobs import ROOT

DOCUMENTS = [
    "README.md",
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")),
]


@pytest.mark.parametrize("path", DOCUMENTS)
def test_links(path: str) -> None:
    """Every relative link and picture names a file of this repository."""
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", (ROOT / path).read_text())
    assert not [link for link in links if not ((ROOT / path).parent / link).exists()]


def test_every_document_is_in_the_index() -> None:
    """Every document is listed in the index."""
    index = (ROOT / "docs" / "README.md").read_text()
    own = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert not [name for name in sorted(own) if f"({name})" not in index]


def test_every_flag_is_documented() -> None:
    """All flags but the internal ones, with their values."""
    text = (ROOT / "docs" / "flags-and-files.md").read_text()
    parser = flags.add_arguments(argparse.ArgumentParser(add_help=False))
    public = [
        option
        for action in parser._actions
        for option in action.option_strings
        if action.help is not argparse.SUPPRESS
    ]
    assert len(public) > 10
    assert not [option for option in public if not re.search(rf"`{option}[ `]", text)]


def test_every_command_is_documented() -> None:
    """The README's table lists all commands."""
    text = (ROOT / "README.md").read_text()
    (commands,) = (
        action.choices
        for action in build_parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    assert commands
    assert not [name for name in commands if not re.search(rf"`ttrace {name}\b", text)]


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
