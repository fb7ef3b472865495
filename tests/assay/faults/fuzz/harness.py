# SPDX-License-Identifier: Apache-2.0
"""Give a command damaged input and see what it does, in a process with little time and memory."""

import contextlib
import dataclasses
import io
import json
import os
import random
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Problem, printed

SECONDS = 30
BYTES = 2 << 30

Attempt = Callable[[random.Random], int]
"""Handles one damaged input; returns an exit code. Raises what the code under test raises."""


class WrongError(Exception):
    """An input was answered that must not be answered so."""


class HangError(BaseException):
    """An input took longer than :data:`SECONDS`."""


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
    shown = out.buffer.getvalue().decode("utf-8", "replace")  # type: ignore[attr-defined]
    if problems := printed(shown):
        raise WrongError(f"on the terminal: {problems}")
    return code


@dataclasses.dataclass(frozen=True)
class Damaged:
    """One damaged input of a parser; ``seed`` draws the damage."""

    attempt: Attempt
    seed: str

    def inject(self, experiment: Experiment) -> None:
        """Handle it in a fork."""
        x, x.injected = experiment, True
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                os.write(writer, json.dumps(self._handle(x.home)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        with os.fdopen(reader, encoding="utf-8") as answer:
            text = answer.read()
        os.waitpid(child, 0)
        problem, details, code = json.loads(text) if text else (Problem.MEMORY, "ended it", None)
        x.codes.append(code)
        if problem:
            x.problem(Problem(problem), details)

    def _handle(self, home: Path) -> tuple[str, str, int | None]:
        # What is written to a relative path must not land among the sources.
        os.chdir(home)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(SECONDS)
        try:
            return "", "", self.attempt(random.Random(self.seed))
        except WrongError as error:
            return Problem.WRONG_EQUIVALENT, str(error), None
        except HangError:
            return Problem.HANG, traceback.format_exc()[-1500:], None
        except MemoryError:
            return Problem.MEMORY, traceback.format_exc()[-1500:], None
        except BaseException:  # noqa: BLE001 - that is what is looked for
            return Problem.TRACEBACK, traceback.format_exc()[-1500:], None
        finally:
            signal.alarm(0)
            sys.stdout.flush()


def faults(parser: str, attempts: list[Attempt], inputs: int, seed: int) -> list[Fault]:
    """So many damaged inputs of a parser, shared out among the ways to damage it."""
    return [
        Fault(
            f"{parser}-{number:05d}",
            Family.DAMAGED,
            Damaged(attempts[number % len(attempts)], f"{seed} {parser} {number}"),
        )
        for number in range(inputs)
    ]


def _too_long(number: int, frame: object) -> None:
    raise HangError
