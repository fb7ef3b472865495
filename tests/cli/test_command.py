# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: what a newcomer sees, and what is said of a typing error."""

import sysconfig
from pathlib import Path

import pytest

from megatron_ttrace.__main__ import OVERVIEW, build_parser, main
from megatron_ttrace.cli import command


def test_without_arguments_four_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """On a few lines of at most 80 columns; nothing was checked, so it is no success."""
    assert main([]) == 2
    said = capsys.readouterr().out
    assert said == OVERVIEW
    lines = [line.split()[1] for line in said.splitlines() if line.startswith("  ttrace")]
    assert lines == ["check", "diff", "report", "doctor"]
    assert max(map(len, said.splitlines())) <= 80


@pytest.mark.parametrize("name", ["bugs", "matrix", "mutants", "nightly", "plant", "growth"])
def test_commands_that_moved_have_their_old_names(name: str) -> None:
    """``ttrace bugs`` is ``ttrace eval bugs``, and the list of commands does not repeat it."""
    parser = build_parser()
    (listed,) = (action for action in parser._actions if action.dest == "command")
    (moved,) = (action for action in listed.choices["eval"]._actions if action.choices)
    assert listed.choices[name] is moved.choices[name]
    assert moved.choices["rivals"] is moved.choices["baselines"]
    assert f"\n    {name} " not in parser.format_help()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("chek", "there is no 'chek'; did you mean check? (see ttrace --help)"),
        ("eval bgs", "'bgs'; did you mean bugs? (see ttrace eval --help)"),
        ("bugs rn", "did you mean run? (see ttrace eval bugs --help)"),
        ("xyzzy", "there is no 'xyzzy' (see ttrace --help)"),
        ("report DIR --htlm x", "--htlm x; did you mean --html"),
        ("report DIR --jnuit=x", "--jnuit=x; did you mean --junit"),
        ("check --nproc_per_node 2 -- a.py", "did you mean --nproc-per-node?"),
        ("check --ttrace-device cpuu -- a.py", "(choose from 'auto', 'cpu'); did you mean cpu?"),
        ("doctor more", "unrecognized arguments: more (see ttrace doctor --help)"),
    ],
)
def test_typing_errors(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with what may have been meant, and exit code 2."""
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_command_works_in_the_shell_it_is_shown_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``ttrace`` alone only if the shell finds this very one."""
    scripts = tmp_path / ".venv" / "bin"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(scripts))
    monkeypatch.setenv("PATH", "/none")
    assert command.typed(["ttrace", "x"]) == ["ttrace", "x"]
    (scripts / "ttrace").write_text("#!/bin/sh\n")
    (scripts / "ttrace").chmod(0o755)
    assert command.typed(["ttrace", "x"]) == [str(scripts / "ttrace"), "x"]
    monkeypatch.chdir(tmp_path)
    assert command.typed(["ttrace", "x"]) == [".venv/bin/ttrace", "x"]
    monkeypatch.setenv("PATH", str(scripts))
    assert command.typed(["ttrace", "x"]) == ["ttrace", "x"]
    assert command.typed([]) == []
