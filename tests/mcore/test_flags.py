# SPDX-License-Identifier: Apache-2.0
"""The flags of a training script, and the settings they become."""

import argparse
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.flags import (
    Keep,
    Settings,
    add_arguments,
    parse_iterations,
    settings_from_args,
    split,
)
from megatron_ttrace.mcore.reference_layout import Layout


def settings(*words):
    """The settings of a command line."""
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    return settings_from_args(parser.parse_args(words))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", (1,)),
        ("7", (7,)),
        ("1-3", (1, 2, 3)),
        ("1-2,5", (1, 2, 5)),
        ("5,1-2", (1, 2, 5)),
        ("2-2", (2,)),
        ("1,1,1-2", (1, 2)),
        (" 1 - 2 , 4 ", (1, 2, 4)),
        ("007", (7,)),
    ],
)
def test_iterations(text, expected):
    """Numbers and ranges, sorted, each once."""
    assert parse_iterations(text) == expected


@pytest.mark.parametrize(
    "text",
    ["", " ", "0", "0-2", "-1", "1-", "-", "2-1", "1,,2", "1,", "a", "1.5", "1-2-3", "1;2", "+1"],
)
def test_what_is_no_list_of_iterations(text):
    """One line with what was given and an example."""
    with pytest.raises(
        TTraceError, match=r"give numbers or ranges from 1, e.g. 1 or 1-2,5"
    ) as error:
        parse_iterations(text)
    assert repr(text) in str(error.value)


@given(st.sets(st.integers(1, 500), min_size=1, max_size=20), st.randoms())
def test_any_way_to_write_a_set_of_iterations(wanted, random):
    """Numbers and ranges in any order mean the same set."""
    parts, numbers = [], sorted(wanted)
    while numbers:
        run = 1
        while run < len(numbers) and numbers[run] == numbers[0] + run and random.random() < 0.8:
            run += 1
        first, last = numbers[0], numbers[run - 1]
        parts.append(str(first) if run == 1 else f"{first}-{last}")
        numbers = numbers[run:]
    random.shuffle(parts)
    assert parse_iterations(",".join(parts)) == tuple(sorted(wanted))


@given(st.text(max_size=12))
def test_any_text_is_iterations_or_a_clear_error(text):
    """Never another exception; never an empty or descending answer."""
    if len(text.replace("-", "")) > 6:
        return  # ranges of billions of iterations are the user's business
    try:
        found = parse_iterations(text)
    except TTraceError:
        return
    assert found
    assert found == tuple(sorted(set(found)))
    assert found[0] >= 1


def test_defaults():
    """What a bare ``--ttrace`` means."""
    assert settings("--ttrace") == Settings(directory=Path("ttrace-out"))


def test_every_flag(tmp_path):
    """All of them at once."""
    found = settings(
        *("--ttrace", "--ttrace-dir", "out", "--ttrace-iterations", "1-2,5"),
        *("--ttrace-reference", str(tmp_path), "--ttrace-reference-args", "--attention-x y"),
        *("--ttrace-save-candidate", "--ttrace-isolate", "--ttrace-exit", "--ttrace-bug", "04a"),
        *("--ttrace-memory-mb", "64", "--ttrace-keep", "failed"),
        *("--ttrace-reference-layout", "tp=2 pp=4"),
        *("--ttrace-device", "cpu", "--ttrace-init", "megatron", "--ttrace-seeds", "3"),
        *("--ttrace-wandb", "--ttrace-role", "reference", "--ttrace-overrides", "o.json"),
    )
    assert found == Settings(
        directory=Path("out"),
        iterations=(1, 2, 5),
        reference=tmp_path,
        reference_args="--attention-x y",
        reference_layout=Layout(tp=2, pp=4),
        save_candidate=True,
        isolate=True,
        exit_after=True,
        bug="04a",
        device="cpu",
        init="megatron",
        seeds=3,
        wandb_online=True,
        memory_mb=64,
        keep=Keep.FAILED,
        role="reference",
        overrides=Path("o.json"),
    )


def test_a_mistyped_flag_of_ours_is_not_left_to_megatron():
    """It would be refused by every rank, after Megatron is imported."""
    ours, theirs = split(["--lr", "1", "--ttrace-isolate"])
    assert (ours.ttrace_isolate, theirs) == (True, ["--lr", "1"])
    with pytest.raises(TTraceError, match="--ttrace-isolat; did you mean --ttrace-isolate"):
        split(["--lr", "1", "--ttrace-isolat=1"])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ttrace-iterations", "0"), "--ttrace-iterations '0'"),
        (("--ttrace-seeds", "0"), "--ttrace-seeds 0: at least 1 replay is needed"),
        (("--ttrace-seeds", "-3"), "at least 1 replay"),
        (("--ttrace-reference-layout", "tp=2 ep=2"), "divided along tp, pp, cp, not ep"),
        (("--ttrace-reference-layout=--",), "--ttrace-reference-layout: give a value"),
        (("--ttrace-reference", "no/such/place"), "no such directory; omit the flag"),
        (("--ttrace-wandb", "--ttrace-no-wandb"), "give one of them"),
        (("--ttrace-save-candidate", "--ttrace-keep", "none"), "--ttrace-keep none: give one"),
    ],
)
def test_values_that_argparse_cannot_judge(words, says):
    """An error of ours, with the flag in it."""
    with pytest.raises(TTraceError, match=says):
        settings(*words)


def test_keeping_all_saves_the_candidate():
    """As the older flag does; neither is the default."""
    assert settings("--ttrace-keep", "all").save_candidate
    assert not settings().save_candidate


def test_a_reference_must_be_a_directory(tmp_path):
    """A file is none."""
    (tmp_path / "file").write_text("")
    with pytest.raises(TTraceError, match="no such directory"):
        settings("--ttrace-reference", str(tmp_path / "file"))


@pytest.mark.parametrize(
    "words",
    [
        ("--ttrace-init", "zeros"),
        ("--ttrace-device", "tpu"),
        ("--ttrace-keep", "some"),
        ("--ttrace-memory-mb", "15"),
        ("--ttrace-seeds", "two"),
        ("--ttrace-role", "spectator"),
    ],
)
def test_values_that_argparse_refuses(words, capsys):
    """The usual message, and exit code 2."""
    with pytest.raises(SystemExit) as left:
        settings(*words)
    assert left.value.code == 2
    assert words[0] in capsys.readouterr().err


def test_help_hides_what_is_internal(capsys):
    """Every public flag has a help text; role and overrides are between us."""
    parser = add_arguments(argparse.ArgumentParser())
    text = parser.format_help()
    assert "--ttrace-iterations" in text
    assert "--ttrace-role" not in text
    assert "--ttrace-overrides" not in text
    group = next(g for g in parser._action_groups if g.title == "ttrace")
    assert all(action.help for action in group._group_actions)


def test_ranges_without_end_are_refused():
    """A slip of the keyboard does not fill the memory."""
    with pytest.raises(TTraceError, match="at most"):
        parse_iterations("1-1000000000")
