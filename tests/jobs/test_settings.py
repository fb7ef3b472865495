# SPDX-License-Identifier: Apache-2.0
"""Settings, and what is derived from their declaration."""

import argparse
import dataclasses
import shlex
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.settings import (
    FLAGS,
    Keep,
    Settings,
    add_arguments,
    checking,
    settings_of,
    split,
)
from megatron_ttrace.trace.errors import TTraceError


def settings(*words):
    """The settings of a command line."""
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    parsed = settings_of(parser.parse_args(words))
    parsed.require_valid()
    return parsed


def test_a_mistyped_flag_of_ours_is_not_left_to_megatron():
    """It would be refused by every rank, after Megatron is imported."""
    ours, theirs = split(["--lr", "1", "--ttrace-isolate"])
    assert (ours.isolate, theirs) == (True, ["--lr", "1"])
    with pytest.raises(TTraceError, match="--ttrace-isolat; did you mean --ttrace-isolate"):
        split(["--lr", "1", "--ttrace-isolat=1"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ttrace-iterations", "0"), "--ttrace-iterations '0'"),
        (("--ttrace-seeds", "0"), "--ttrace-seeds 0: give 1 to 1000 replays"),
        (("--ttrace-seeds", "-3"), "--ttrace-seeds -3: give"),
        (("--ttrace-reference-layout", "tp=2 dp=2"), "divided along tp, pp, cp, ep, not dp"),
        (("--ttrace-reference-layout=--",), "--ttrace-reference-layout: give a value"),
        (("--ttrace-reference-args", "--a 'b"), "--ttrace-reference-args .*: close the quote"),
        (("--ttrace-reference", "no/such/place"), "no such directory; omit the flag"),
        (("--ttrace-reference", __file__), "no such directory; omit the flag"),
        (("--ttrace-wandb", "--ttrace-no-wandb"), "give one of them"),
        (("--ttrace-save-candidate", "--ttrace-keep", "none"), "--ttrace-keep none: give one"),
    ],
)
def test_values_that_argparse_cannot_judge(words, says):
    """An error of ours, with the flag in it."""
    with pytest.raises(TTraceError, match=says):
        settings(*words)


@pytest.mark.parametrize("word", ["init=zeros", "memory-mb=15", "seeds=two"])
def test_values_that_argparse_refuses(word, capsys):
    """The usual message, and exit code 2."""
    with pytest.raises(SystemExit) as exited:
        settings(f"--ttrace-{word}")
    assert exited.value.code == 2
    assert f"--ttrace-{word.partition('=')[0]}" in capsys.readouterr().err


def test_help_hides_what_is_internal(capsys):
    """Every public flag has a help text; role and overrides are between us."""
    parser = add_arguments(argparse.ArgumentParser())
    text = parser.format_help()
    assert "--ttrace-iterations" in text
    assert "--ttrace-role" not in text
    assert "--ttrace-overrides" not in text
    group = next(g for g in parser._action_groups if g.title == "ttrace")
    assert all(action.help for action in group._group_actions)


ANY = {
    "directory": st.text(string.ascii_letters + "-/. ", min_size=1, max_size=9).map(Path),
    "iterations": st.sets(st.integers(1, 30), min_size=1).map(
        lambda numbers: tuple(sorted(numbers))
    ),
    "reference": st.sampled_from([None, Path("/")]),
    "reference_args": st.lists(st.text(string.printable, max_size=9)).map(shlex.join),
    "reference_layout": st.sampled_from([None, Layout(tp=2), Layout(tp=2, pp=4)]),
    "small": st.sampled_from([None, Path(__file__)]),
    "bug": st.sampled_from([None, "04a", "--x"]),
    "device": st.sampled_from(["auto", "cpu"]),
    "init": st.sampled_from(["reveal", "megatron"]),
    "seeds": st.sampled_from([None, 1, 1000]),
    "timeout": st.floats(1e-9, 1e7),
    "allow_unchecked": st.floats(0, 1),
    "memory_mb": st.integers(16, 99999),
    "keep": st.sampled_from(Keep),
    "role": st.sampled_from(["candidate", "reference"]),
    "overrides": st.sampled_from([None, Path("-o.json")]),
}


@given(st.fixed_dictionaries({n: ANY.get(n, st.booleans()) for n in FLAGS}))
def test_words_give_the_settings_back(values):
    """Whatever differs from a default is in the words, whose parser returns the same settings."""
    asked = Settings(**values)
    try:
        asked.require_valid()
    except TTraceError:
        return
    parsed, theirs = split(asked.words())
    assert not theirs
    assert dataclasses.replace(parsed, directory=asked.directory) == asked
    assert parsed.directory.resolve() == asked.directory.resolve()


def test_words_are_what_differs_from_the_defaults():
    """The directory comes first and always."""
    assert Settings().words() == ["--ttrace-dir", "ttrace-out"]
    asked = Settings(iterations=(1, 2, 5), seeds=3, wandb=False)
    assert asked.words()[2:] == [
        "--ttrace-iterations=1-2,5",
        "--ttrace-seeds=3",
        "--ttrace-no-wandb",
    ]


def test_flags_of_the_script_override_the_command_s():
    """What neither gives keeps its default; Megatron's namespace holds what was given alone."""
    base = Settings(directory=Path("a"), seeds=2)
    parsed, theirs = split(["--lr", "1", "--ttrace-seeds", "3"], base)
    assert (parsed, theirs) == (dataclasses.replace(base, seeds=3), ["--lr", "1"])
    namespace = add_arguments(argparse.ArgumentParser()).parse_args(["--ttrace-keep", "all"])
    assert vars(namespace) == {"ttrace": False, "ttrace_keep": "all"}


def test_the_command_that_checks():
    """Without settings, those of the user's shell; with them, in words."""
    assert checking("a.py", ["-x"], 2) == ["check", "--nproc-per-node", "2", "--", "a.py", "-x"]
    words = checking("a.py", (), 1, Settings(directory=Path("-d")), "--json", command="record")
    assert words == "record --nproc-per-node 1 --ttrace-dir ./-d --json -- a.py".split()
