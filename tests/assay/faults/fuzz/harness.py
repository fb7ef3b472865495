# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay fuzz``: damaged inputs, each in a process with little time and memory."""

import argparse
import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.cli import command as commands
from tests.assay import harness
from tests.assay.faults.fault import Problem, printed
from tests.assay.harness import Row

SECONDS = 30
BYTES = 2 << 30
_EPILOG = """\
example:
  python -m tests.assay fuzz --count 1000 --seed 1

A seed draws damage to traces, reports, messages, patches, data and flags. None may give a
traceback, hang, take the memory, or be believed.

exit code: 0 if none does, else 2
"""

Attempt = Callable[[random.Random], int]
"""Handles one damaged input; returns an exit code. Raises what the code under test raises."""


class WrongError(Exception):
    """An input was answered that must not be answered so."""


class HangError(BaseException):
    """An input took longer than :data:`SECONDS`."""


def add_parser(subparsers: commands.Subparsers) -> None:
    """Add the ``fuzz`` command."""
    harness.add(
        *(subparsers, "fuzz", _run),
        summary="give every parser damaged inputs",
        epilog=_EPILOG,
        count=100,
        seed="of the damage (default 1)",
    )


def _run(args: argparse.Namespace) -> int:
    from tests.assay.faults.fuzz.targets import build, targets

    attempts = targets(build(args.directory / "run"))
    chosen = {name: attempts[name] for name in harness.chosen(attempts, args.only)}
    handled = functools.partial(handle, args.directory)
    rows = harness.execute(inputs(chosen, args.count, args.seed or 1), handled, args)
    return harness.finish(rows, {"as promised": 1.0})


def command(argv: list[str]) -> int:
    """Run ``ttrace``; an error that is one line counts as exit code 2, all others are raised."""
    from megatron_ttrace.cli.main import build_parser
    from megatron_ttrace.trace.errors import TTraceError

    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            args = build_parser().parse_args(argv)
            code = int(args.run(args))
        except TTraceError as error:
            if "\n" in str(error).strip():
                raise WrongError(f"an error of several lines: {error!r}") from error
            return 2
        except SystemExit as error:
            if error.code != 2:
                raise WrongError(f"exit code {error.code!r}") from error
            return 2
    out.flush()
    if problems := printed(out.buffer.getvalue().decode("utf-8", "replace")):
        raise WrongError(f"on the terminal: {problems}")
    return code


@dataclasses.dataclass(frozen=True)
class Input:
    """One damaged input of a parser; ``id`` draws the damage."""

    id: str
    parser: str
    attempt: Attempt


def inputs(attempts: Mapping[str, Sequence[Attempt]], count: int, seed: int) -> Iterator[Input]:
    """So many damaged inputs of each parser, shared out among the ways to damage it."""
    for parser, ways in attempts.items():
        for number in range(count):
            yield Input(f"{seed} {parser} {number}", parser, ways[number % len(ways)])


def handle(home: Path, case: Input) -> Row:
    """Handle an input in a fork."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        try:
            os.write(writer, json.dumps(_handle(home, case)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, encoding="utf-8") as answer:
        text = answer.read()
    os.waitpid(child, 0)
    problem, note, code = json.loads(text) if text else (Problem.MEMORY, "ended it", None)
    marks = {"as promised": not problem, "refused": code == 2}
    if problem:
        marks[problem] = True
    return Row(case.id, case.parser, marks, note, details={"code": code})


def _handle(home: Path, case: Input) -> tuple[str, str, int | None]:
    # What is written to a relative path must not land among the sources.
    os.chdir(home)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(SECONDS)
    try:
        return "", "", case.attempt(random.Random(case.id))
    except WrongError as error:
        return Problem.WRONG_EQUIVALENT, str(error), None
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        kinds = {HangError: Problem.HANG, MemoryError: Problem.MEMORY}
        problem = kinds.get(type(error), Problem.TRACEBACK)
        return problem, traceback.format_exc()[-1500:], None
    finally:
        signal.alarm(0)
        sys.stdout.flush()


def _too_long(number: int, frame: object) -> None:
    raise HangError
