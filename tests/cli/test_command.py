# SPDX-License-Identifier: Apache-2.0
"""The command line as a whole: what a newcomer sees, and what is said of a typing error."""

import shlex
import subprocess
import sysconfig
import time
from pathlib import Path

import pytest

from megatron_ttrace.cli import command, recipes
from megatron_ttrace.cli.main import OVERVIEW, _named, build_parser, main
from megatron_ttrace.evaluation.recipes.collect import Recipe, SmallJob
from megatron_ttrace.trace import shared
from tests import programs

ROOT = Path(__file__).resolve().parents[2]


def test_without_arguments_four_commands_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """On a few lines of at most 80 columns; nothing was checked, so it is no success."""
    assert main([]) == 2
    out = capsys.readouterr().out
    assert out == OVERVIEW
    lines = [line.split()[1] for line in out.splitlines() if line.startswith("  ttrace")]
    assert lines == ["check", "diff", "report", "doctor"]
    assert max(map(len, out.splitlines())) <= 80


@pytest.mark.parametrize("name", ["bugs", "matrix", "nightly"])
def test_commands_that_moved_have_their_old_names(name: str) -> None:
    """``ttrace bugs`` is ``ttrace eval bugs``, and the list of commands does not repeat it."""
    parser = build_parser()
    (listed,) = (action for action in parser._actions if action.dest == "command")
    (moved,) = (action for action in listed.choices["eval"]._actions if action.choices)
    assert listed.choices[name] is moved.choices[name]
    assert f"\n    {name} " not in parser.format_help()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("chek", "there is no 'chek'; did you mean check? (see ttrace --help)"),
        ("eval bgs", "'matrix', 'nightly'); did you mean bugs? (see ttrace eval --help)"),
        ("bugs rn", "did you mean run? (see ttrace eval bugs --help)"),
        ("xyzzy", "there is no 'xyzzy' (see ttrace --help)"),
        ("report DIR --htlm x", "--htlm; did you mean --html"),
        ("report DIR --jnuit=x", "--jnuit; did you mean --junit"),
        ("check --ttrace-plai -- a.py", "unrecognized arguments: --ttrace-plai (see"),
        ("check --ttrace-iteration 2 -- a.py", "did you mean --ttrace-iterations? (see"),
        ("check --nproc_per_node 2 -- a.py", "did you mean --nproc-per-node?"),
        ("check --ttrace-device cpuu -- a.py", "(choose from 'auto', 'cpu'); did you mean cpu?"),
        ("doctor more", "unrecognized arguments: 1 more than this command has (see ttrace doctor"),
        ("hunt --minutes soon", "--minutes: 'soon': give a number"),
        ("shrink --max-ranks=-- -- a.py", "--max-ranks: give a value"),
        ("check --against=-- -- a.py", "--against: give a value"),
        ("resume --into=-- -- a.py", "--into: give a value"),
        ("clean nowhere", "nowhere: no such directory"),
        ("clean --cache", "TTRACE_CACHE is not set"),
        ("eval bugs run", "name the bugs"),
        ("eval bugs run --all 01", "name the bugs"),
        ("eval bugs run 99", "99: unknown; known: 01"),
        ("eval bugs run 01 05 --model llama", "bug 05 has no layout for --model llama"),
        ("eval matrix", "give name patterns"),
        ("eval matrix --all tp2/gpt/fp32", "give name patterns"),
        ("eval matrix tp2/gpt/fp32 typo*", "no configuration matches typo*"),
        ('eval matrix --all --ttrace-flags "--ttrace-isolate', "--ttrace-flags: "),
        ("eval matrix --all --seeds 1,", "'1,': give numbers from 0"),
        ("eval matrix --all --seeds 1,-1", "'1,-1': give numbers from 0"),
        ("eval nightly --quick --no-bugs --no-matrix", "nothing is left to run"),
        ("eval nightly --no-bugs --bug 11", "--bug: not allowed with argument --no-bugs"),
        ("eval nightly --recipes no/such", "--recipes no/such: no such directory"),
        ("eval nightly --bug 999", "999: unknown; known: 01"),
        ("eval nightly --matrix typo*", "no configuration matches typo*"),
        ("eval nightly --minutes 0", "--minutes 0"),
        ("eval nightly --bugs-flags '--bf16", "--bugs-flags: "),
        ("eval nightly --directory file/x", "not writable"),
        ("recipes --dry-run", "give either a checkout"),
        ("recipes absent", "absent: no such directory"),
        ("clean --older-than -1", "--older-than: '-1': give a number from 0"),
        ("hunt -- absent.py --num-layers 2", "absent.py: no such script"),
        ("hunt -- python", "no training script"),
        ("check", "no script given"),
        ("check -- absent.py", "absent.py: no such script"),
        ("compare a b --allow-unchecked=nan", "'nan': give a number from 0"),
        (
            f"hunt -- torchrun --nproc-per-node 3 {ROOT}/launch/pretrain_gpt.py "
            "--tensor-model-parallel-size 2",
            "cannot be divided",
        ),
    ],
)
def test_bad_input(
    words: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line with what is wrong, or may have been meant, and exit code 2."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TTRACE_CACHE", raising=False)
    (tmp_path / "file").touch()
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    "words",
    [
        "--token CANARY",
        "--token CANARY check -- train.py",
        "check --token=CANARY -- train.py",
        "check --json=CANARY -- train.py",
        "report DIR --json CANARY",
        "check -- torchrun --nproc CANARY train.py",
        "check -- torchrun --nproc=CANARY train.py",
        "check -- env -STOKEN=CANARY train.py",
        "check -- TOKEN+=CANARY train.py",
        "check -- bash -c 'torchrun train.py\n--token CANARY'",
        'check -- bash -c "torchrun train.py --token CANARY $(id)"',
        "check 'TOKEN=CANARY ls -l CANARY'",
        "check 'torchrun train.py --token CANARY; ls'",
        "check 'torchrun train.py --token \"CANARY'",
        "check 'torchrun train.py --token >(CANARY) -a'",
        "check 'torchrun train.py --token {CANARY,b}'",
        "check 'torchrun train.py --token ${CANARY:-1}' -a",
        "check --nproc-per-node 0 -- train.py --token CANARY",
        "shrink -- a.py CANARY --bf16",
    ],
)
def test_errors_do_not_show_values(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Of flags that are not known, of variables, and words that no option takes."""
    assert main(shlex.split(words)) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("ttrace: ")
    assert "CANARY" not in printed.out + printed.err


@pytest.mark.parametrize(
    "words",
    [
        "bisect HEAD^ HEAD -- x.py --bf16",
        "ci . --base HEAD^",
        "eval nightly --quick",
        "hunt",
        "recipes .",
    ],
)
def test_two_in_one_directory(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second is refused: it would replace the worktrees and results of the first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").touch()
    for step in ("init -q", "add .", "commit -qm a", "commit -qm b --allow-empty"):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a", *step.split()], check=True
        )
    name, *more = shlex.split(words)
    recipe = Recipe("a", (SmallJob("x.py", (), 1, ()),))
    monkeypatch.setattr(recipes, "_collect", lambda args: [recipe])
    with shared.alone(tmp_path / "out"):
        at = 1 if name == "eval" else 0
        place = ["--directory", str(tmp_path / "out")]
        assert main([name, *more[:at], *place, *more[at:]]) == 2
    assert "is in use by another" in capsys.readouterr().err


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


def test_progress_is_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    """What a line quotes of a job's error stays one line, without control characters."""
    command.progress()("it died: a\x1b[2J\n::error::b")
    assert capsys.readouterr().err == "[  0.0 s] it died: a\\x1b[2J ::error::b\n"


def _run(code: str, *words: object) -> str:
    """What a new process prints; it imports this package, wherever another one is installed."""
    return programs.python("-c", code, *words, code=0).stdout


_FIRST_LINE = """
import sys, time
from megatron_ttrace.cli.main import main
from megatron_ttrace.cli import command
heavy = {"torch", "numpy", "megatron", "rich", "jinja2", "safetensors", "wandb"}
class Done(BaseException): pass
def progress(began=None):
    def say(line):
        print(line, sorted(heavy & set(sys.modules)), time.monotonic() - began < 60)
        raise Done
    return say
command.progress = progress
try:
    main()
except Done:
    pass
"""


def test_the_first_line_of_a_check_needs_no_heavy_import(tmp_path: Path) -> None:
    """What is imported before it costs about 0.2 s; torch alone would cost more than a second."""
    script = tmp_path / "train.py"
    script.write_text("")
    words = ["check", "--ttrace-dir", tmp_path / "out", "--", script, "--lr", "1"]
    out = _run(_FIRST_LINE, *words)
    assert out == f"checking {script}: importing torch and Megatron [] True\n"


def test_help_needs_no_heavy_import() -> None:
    """All commands are listed without what they need to run."""
    code = (
        "import sys\nfrom megatron_ttrace.cli.main import build_parser\nbuild_parser()\n"
        "print({'torch', 'numpy', 'rich', 'jinja2', 'megatron', 'wandb'} & set(sys.modules))"
    )
    assert _run(code) == "set()\n"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("check -- a.py", "check"),
        ("eval bugs run", "bugs"),
        ("bugs list", "bugs"),
        ("eval check", ""),
        ("rivals", ""),
        ("--help", ""),
        ("eval", ""),
        ("", ""),
    ],
)
def test_only_the_command_that_runs_is_imported(words: str, named: str) -> None:
    """Its parser is the same as among all commands; a name that is unknown needs them all."""
    assert _named(words.split()) == named
    (some,) = (
        action for action in build_parser(words.split())._actions if action.dest == "command"
    )
    (all_,) = (action for action in build_parser()._actions if action.dest == "command")
    assert isinstance(some.choices, dict)
    assert isinstance(all_.choices, dict)
    for name in [named] if named else all_.choices:
        assert some.choices[name].format_help() == all_.choices[name].format_help()


def test_the_time_of_a_process_is_the_shell_s() -> None:
    """Counted from its start, imports included."""
    code = (
        "import time; time.sleep(0.5)\nfrom megatron_ttrace.cli.command import process_began\n"
        "print(time.monotonic() - process_began())"
    )
    began = time.monotonic()
    assert 0.5 <= float(_run(code)) <= time.monotonic() - began + 0.02
