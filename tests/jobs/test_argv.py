# SPDX-License-Identifier: Apache-2.0
"""Our flags on a command line, and what a script sees of it."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs import argv
from megatron_ttrace.jobs.settings import CHECK, FLAGS

OURS = [
    [CHECK.name],
    *([flag.name] if flag.is_switch else [flag.name, "-value"] for flag in FLAGS.values()),
    ["--ttrace-dir=--x"],
    ["--ttrace-mistyped"],
]
THEIRS = [["--lr", "1"], ["model.lr=3"], ["--save"], ["-x", "--"], ["tt"]]


@given(st.lists(st.sampled_from([*OURS[:-1], *THEIRS])))
def test_words_are_separated(groups):
    """Each flag of ours takes its value along; all others keep their order."""
    ours, theirs = argv.separated([word for group in groups for word in group])
    assert ours == [word for group in groups if group in OURS for word in group]
    assert theirs == [word for group in groups if group in THEIRS for word in group]


@pytest.fixture
def command_line(monkeypatch):
    monkeypatch.setattr(argv, "_taken", [])
    monkeypatch.setattr(argv, "_script", [])
    monkeypatch.setattr(argv, "_given", [])
    monkeypatch.setattr(sys, "argv", ["train.py", "--ttrace-seeds", "2", "--lr", "1", "--ttrace"])


@pytest.mark.usefixtures("command_line")
def test_a_script_sees_its_own_words():
    argv.take()
    assert sys.argv == ["train.py", "--lr", "1"]
    assert argv.words() == ["--lr", "1", "--ttrace-seeds", "2", "--ttrace"]
    sys.argv[0] = "inner.py"  # as runpy.run_path does for a script that this one runs
    assert argv.script() == "train.py"
    assert argv.ours() == ["--ttrace-seeds", "2", "--ttrace"]


@pytest.mark.usefixtures("command_line")
def test_a_script_that_runs_another_one_after_enabling():
    argv.remember()
    sys.argv[0] = "inner.py"
    argv.remember()
    assert argv.script() == "train.py"


@pytest.mark.usefixtures("command_line")
def test_words_that_a_script_takes_for_itself(monkeypatch):
    """A reference run is started with all; those that Megatron's parser gets are no others."""
    words = ["--scale", "2", "--lr", "2", "--fast"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--ttrace"])
    argv.remember()
    assert argv.kept() == []
    sys.argv[1:] = ["--lr", "2"]
    assert argv.kept() == ["--fast", "2", "--scale"]
    sys.argv = ["inner.py", "--bf16"]
    assert argv.given() == words
    assert len(argv.kept()) == len(words)
    assert argv.ours() == ["--ttrace"]


@pytest.mark.usefixtures("command_line")
def test_megatrons_parser_sees_all():
    """Also when the script has changed what there is."""
    argv.take()
    sys.argv.append("--save=x")
    with argv.put_back():
        assert sys.argv[1:] == ["--lr", "1", "--save=x", "--ttrace-seeds", "2", "--ttrace"]
    assert sys.argv[1:] == ["--lr", "1", "--save=x"]


@pytest.mark.usefixtures("command_line")
def test_nothing_was_taken():
    """A script that was started without our launcher."""
    assert argv.ours() == ["--ttrace-seeds", "2", "--ttrace"]
    assert argv.theirs() == ["--lr", "1"]
    argv.add(["--ttrace-exit"])
    assert argv.ours()[0] == "--ttrace-exit"
