# SPDX-License-Identifier: Apache-2.0
"""``ttrace`` and ``python -m megatron_ttrace``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

# Nothing else here: until ``main`` runs, Ctrl-C ends the process without a word.
from megatron_ttrace.jobs import streams
from megatron_ttrace.jobs.processes import signals

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

COMMANDS = (
    "check shrink recipes compare record diff blame bisect hunt ci resume checkpoint report clean "
    "doctor patch data demo"
).split()
"""Modules beside this one (``command.add_module``); parsing imports neither torch nor Megatron."""
EVALUATION = "bugs matrix nightly".split()
"""The same, of ``ttrace eval``; without ``eval`` they are found too, but not listed."""
OVERVIEW = """\
ttrace checks that a Megatron training job computes what one device would.

  ttrace check -- COMMAND   check a job; COMMAND is what starts it
  ttrace diff A B           compare any two runs: layouts, versions, settings
  ttrace report DIR         show the report of a finished check again
  ttrace doctor             show what is installed and where checks will run

`ttrace --help` lists all commands; `ttrace COMMAND --help` has examples.
"""
_EPILOG = (
    "exit codes: 0 equivalent, 1 diverged, 2 could not check; 128 + N if signal N ended "
    "the command (130: Ctrl-C, 143: SIGTERM)"
)


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The command line; only the one command that ``words`` begin with, if they name one.

    Other commands need not be imported then.
    """
    from megatron_ttrace.cli import command
    from megatron_ttrace.trace.version import __version__

    parser: argparse.ArgumentParser = command.Parser(
        prog="ttrace",
        description="Check that a Megatron run is numerically equivalent to a single-device run.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"ttrace {__version__}")
    parser.set_defaults(run=_overview)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    named = _named(words)
    for name in COMMANDS:
        if named in ("", name):
            command.add_module(subparsers, name)
    actions = command.add_evaluation(subparsers)
    for name in EVALUATION:
        if named in ("", name):
            command.add_module(actions, name)
    subparsers._name_parser_map.update(actions._name_parser_map)
    return parser


def _named(words: Sequence[str]) -> str:
    """The command that a command line names; empty if it names none."""
    if words[:1] == ["eval"]:
        return words[1] if words[1:] and words[1] in EVALUATION else ""
    return words[0] if words and words[0] in (*COMMANDS, *EVALUATION) else ""


def _overview(_: argparse.Namespace) -> int:
    """Of ``ttrace`` alone. Nothing was checked, so the exit code is not 0."""
    print(OVERVIEW, end="")
    return 2


def main(
    argv: Sequence[str] | None = None,
    build: Callable[[Sequence[str]], argparse.ArgumentParser] | None = None,
) -> int:
    """Run a command and return its exit code.

    ``argv`` are its words. ``None``: this process is the command, whose arguments, signals and
    standard streams are handled. ``build`` makes the parser of a command line, as
    :func:`build_parser` does.
    """
    build = build or build_parser
    if argv is not None:
        return _guarded(argv, build)
    signals.install()
    streams.steady()
    if "TTRACE_END_FILE" in os.environ:
        from megatron_ttrace.trace import ends

        ends.begin()
    code = _guarded(None, build)
    _leave(code)
    return code


def _leave(code: int) -> None:
    """End this process without the seconds that an interpreter needs to unload torch.

    A signal that arrives in that time would not be handled.
    """
    import atexit
    import threading

    main_thread = threading.main_thread()
    if any(not thread.daemon and thread is not main_thread for thread in threading.enumerate()):
        return
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _file_error(error: BaseException) -> str:
    """What prevents writing a file, such as a full disk; empty for other errors."""
    import errno

    no_room = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
    if not isinstance(error, OSError) or error.errno is None:
        return ""
    name = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else ""
    # Without a file's name, a refusal may be of a signal or a socket.
    if error.errno in no_room or (name and error.errno in (errno.EACCES, errno.EPERM, errno.EIO)):
        return f"{name or 'a file'} cannot be used ({os.strerror(error.errno)})"
    return ""


def _guarded(
    argv: Sequence[str] | None, build: Callable[[Sequence[str]], argparse.ArgumentParser]
) -> int:
    """Run a command; every other end than its own answer is one line, and never exit code 1."""
    import time

    from megatron_ttrace.trace.errors import ExitCode, TTraceError, one_line

    parsing = True
    try:
        from megatron_ttrace.cli import command
        from megatron_ttrace.jobs.commands import disclosure

        words = sys.argv[1:] if argv is None else list(argv)
        parser = build(words)
        disclosure.withhold(["ttrace", *words], known=dict(command.options(parser)))
        args = parser.parse_args(words)
        # As the shell counts, if this process is nothing else.
        args.began = command.process_began() if argv is None else time.monotonic()
        parsing = False
        with signals.orderly():
            code = int(args.run(args))
    except TTraceError as error:
        if not signals.received():
            _tell(str(error))
            return int(ExitCode.COULD_NOT_CHECK)
    except KeyboardInterrupt as stopped:
        if not isinstance(stopped, signals.Stopped):
            _tell("interrupted")
            return 128 + 2
    except (Exception, SystemExit) as error:
        if parsing and isinstance(error, SystemExit):
            raise  # argparse has printed an error, or the help
        if not signals.received():
            internal = f"internal error: {one_line(error)} (set TTRACE_DEBUG=1 for the traceback)"
            if isinstance(error, MemoryError):
                internal = "no memory is left: is there a limit (ulimit -v, a container's)?"
            _tell(_file_error(error) or internal)
            return int(ExitCode.COULD_NOT_CHECK)
    else:
        if not signals.received():
            return code
    # Whatever the signal led to: the signal ended the command.
    stopped_by = signals.Stopped(signals.received())
    _tell(str(stopped_by))
    return stopped_by.exit_code


def _tell(text: str) -> None:
    """Print an error to standard error; with its traceback only if requested."""
    import traceback

    from megatron_ttrace.trace.errors import DEBUG

    if os.environ.get(DEBUG):
        traceback.print_exc()
    lines = text.splitlines()
    try:
        from megatron_ttrace.trace import ends
        from megatron_ttrace.trace.sanitise import NOTE_LIMIT, log_line, shorten

        ends.write(ends.EndRecord(code=2, at=0, message=text))
        # Some errors quote the last lines of a log, which is foreign text.
        lines = [shorten(log_line(line), NOTE_LIMIT) for line in lines]
    except Exception:  # noqa: BLE001 - the error may be that this cannot be imported
        lines = [ascii(line)[1:-1] for line in lines]
    print("ttrace:", "\n".join(lines), file=sys.stderr, flush=True)
