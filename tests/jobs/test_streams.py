# SPDX-License-Identifier: Apache-2.0
"""The state of standard output and error never changes an exit code; our errors are one line."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.jobs.commands.commands import PROGRAM

TTRACE = f"{sys.executable} -m megatron_ttrace"
PRINTS = "print('x' * 99 + '\\n' * 9999); print('told', file=sys.stderr)"


def shell(line: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a shell command under ``pipefail``."""
    return programs.run("bash", "-o", "pipefail", "-c", line, cwd=cwd, timeout=600, **more)


def talks(tmp_path: Path, body: str) -> str:
    """The command line of a command that runs this code, and answers "diverged" or does worse."""
    (tmp_path / "talks.py").write_text(PROGRAM.replace("{body}", f"{body}\n        return 1"))
    return f"{sys.executable} talks.py"


@pytest.mark.parametrize(
    ("redirection", "errors"),
    [
        ("| head -1", "told\n"),
        (">&-", "told\n"),
        ("2>&-", ""),
        (">&- 2>&- <&-", ""),
        ("> /dev/null 2> /dev/full", ""),
        (
            "> /dev/full",
            "ttrace: WARNING: standard output is lost: No space left on device\ntold\n",
        ),
        ("2> >(true)", ""),
    ],
)
def test_the_answer_stands(tmp_path: Path, redirection: str, errors: str) -> None:
    """The exit code is the answer, whether or not the output is read."""
    done = shell(f"{talks(tmp_path, PRINTS)} {redirection}", tmp_path)
    assert done.returncode == 1
    assert sorted(done.stderr.splitlines()) == sorted(errors.splitlines())


def test_a_closed_stream_is_not_taken_by_a_file(tmp_path: Path) -> None:
    """A file that a command opens must not become its standard output."""
    body = "f = open('victim', 'w'); import os; os.write(1, b'stray'); f.close()"
    assert shell(f"{talks(tmp_path, body)} >&-", tmp_path).returncode == 1
    assert (tmp_path / "victim").read_text() == ""


EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
moment, sys.argv, seen = int(sys.argv[1]), ["ttrace", "doctor"], []
def imports(event, arguments):
    if event == "import" and "megatron_ttrace" in sys.modules:
        seen.append(arguments[0])
        if len(seen) == moment:
            os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(imports)
from megatron_ttrace.cli.main import main
main()
"""


@pytest.mark.parametrize("moment", [*range(2, 20), *range(20, 200, 20), 400, 800])
def test_an_early_interrupt(moment: int) -> None:
    """While modules are imported, ours or torch, after the first line of the package."""
    done = programs.python("-c", EARLY, moment)
    ends = ((-signal.SIGINT, ""), (130, "ttrace: interrupted\n"))
    assert (done.returncode, done.stderr) in ends


@pytest.mark.parametrize("words", ["--help", "check --help", "--version", "bugs list --json"])
def test_help_into_a_pipe(tmp_path: Path, words: str) -> None:
    """The reader closes the pipe early."""
    done = shell(f"{TTRACE} {words} | true", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    """A character that the encoding lacks is escaped."""
    body = "print('2 ε')"
    done = shell(talks(tmp_path, body), tmp_path, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stdout) == (1, "2 \\u03b5\n")


def test_nothing_printed_controls_a_terminal(tmp_path: Path) -> None:
    """Escapes are shown, on both streams and from any command; colours, tabs and lines stay."""
    body = (
        "print('\\x1b[2J\\x9b1m\\u202e\\r\\x1b]0;t\\x07\\x1b[8m\\ta\\x1b[1;31mred\\x1b[0m\\n.'); "
        "print('\\x1b[2J', file=sys.stderr)"
    )
    done = shell(talks(tmp_path, body), tmp_path)
    assert done.stdout == (
        "\\x1b[2J\\x9b1m\\u202e\\r\\x1b]0;t\\x07\\x1b[8m\ta\x1b[1;31mred\x1b[0m\n.\n"
    )
    assert done.stderr == "\\x1b[2J\n"


HINT = "(set TTRACE_DEBUG=1 for the traceback)"


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("1 / 0", f"internal error: ZeroDivisionError: division by zero {HINT}"),
        (
            "raise PermissionError(1, 'kill')",
            f"internal error: PermissionError: [Errno 1] kill {HINT}",
        ),
        ("sys.exit(1)", f"internal error: SystemExit: 1 {HINT}"),
        ("sys.exit(0)", f"internal error: SystemExit: 0 {HINT}"),
        ("raise ValueError('\x1b[31mred')", f"internal error: ValueError: \\x1b[31mred {HINT}"),
        # Neither a full disk nor a full memory is called an internal error.
        (
            "raise MemoryError",
            "no memory is left: is there a limit (ulimit -v, a container's)?",
        ),
        ("raise OSError(28, 'x', 'logs')", "logs cannot be used (No space left on device)"),
        ("raise OSError(28, 'x')", "a file cannot be used (No space left on device)"),
        ("raise PermissionError(13, 'x', 'a')", "a cannot be used (Permission denied)"),
    ],
)
def test_an_error(tmp_path: Path, body: str, line: str) -> None:
    """One line without control characters, never exit code 1."""
    done = shell(talks(tmp_path, body), tmp_path)
    assert (done.returncode, done.stderr) == (2, f"ttrace: {line}\n")


def test_a_traceback_on_request(tmp_path: Path) -> None:
    done = shell(talks(tmp_path, "1 / 0"), tmp_path, TTRACE_DEBUG="1")
    assert done.returncode == 2
    assert "Traceback" in done.stderr


def test_a_damaged_installation(tmp_path: Path) -> None:
    """A command that cannot be imported ends with exit code 2."""
    (tmp_path / "rich.py").write_text("raise ImportError('no rich')")
    line = f'{sys.executable} -c \'import sys; sys.path.insert(0, ".")\n'
    line += "from megatron_ttrace.cli.main import main\nsys.exit(main())' report x"
    done = shell(line, tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "ttrace: internal error: ImportError: no rich" in done.stderr
