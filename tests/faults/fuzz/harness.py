# SPDX-License-Identifier: Apache-2.0
"""Give a command damaged input and watch what it does.

Inputs of a batch are handled in a forked process, whose address space is limited: an input that
takes the memory of the machine takes only that of its batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
import unicodedata
from collections import Counter
from collections.abc import Callable
from pathlib import Path

SECONDS = 30
BYTES = 2 << 30

Attempt = Callable[[random.Random], int]
"""Handles one damaged input; returns an exit code. Raises what the code under test raises."""


class WrongError(Exception):
    """An input was answered that must not be answered so."""


class HangError(BaseException):
    """An input took longer than :data:`SECONDS`."""


@dataclasses.dataclass
class Tally:
    """What became of the inputs of one parser."""

    parser: str
    inputs: int = 0
    refused: int = 0
    tracebacks: int = 0
    hangs: int = 0
    memory: int = 0
    wrong: int = 0
    examples: dict[str, str] = dataclasses.field(default_factory=dict)
    places: Counter[str] = dataclasses.field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Whether nothing went wrong."""
        return not (self.tracebacks or self.hangs or self.memory or self.wrong)

    def add(self, other: Tally) -> None:
        """Count another's inputs as this one's."""
        for name in ("inputs", "refused", "tracebacks", "hangs", "memory", "wrong", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.places += other.places
        self.examples = {**other.examples, **self.examples}

    def __str__(self) -> str:
        return (
            f"{self.parser:<12} {self.inputs:>7} {self.refused:>8} {self.tracebacks:>10} "
            f"{self.hangs:>6} {self.memory:>7} {self.wrong:>6} {self.seconds:>8.1f}"
        )


HEADING = (
    f"{'parser':<12} {'inputs':>7} {'refused':>8} {'tracebacks':>10} "
    f"{'hangs':>6} {'memory':>7} {'wrong':>6} {'seconds':>8}"
)


def command(argv: list[str]) -> int:
    """Run ``ttrace``; an error that is one line counts as exit code 2, all others are raised."""
    from megatron_ttrace.__main__ import build_parser
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
    controls = {c for c in shown if unicodedata.category(c) in ("Cc", "Cf") and c != "\n"}
    if controls:
        raise WrongError(f"control characters on the terminal: {controls!r}")
    return code


def run(parser: str, attempt: Attempt, inputs: int, *, seed: int, batch: int = 200) -> Tally:
    """Try ``inputs`` damaged inputs of one parser."""
    tally = Tally(parser)
    began = time.monotonic()
    for start in range(0, inputs, batch):
        _batch(tally, attempt, range(start, min(inputs, start + batch)), seed)
    tally.seconds = time.monotonic() - began
    return tally


def _batch(tally: Tally, attempt: Attempt, numbers: range, seed: int) -> None:
    """A forked process for some inputs, and another for the rest when one of them ends it."""
    left = numbers
    while left:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            try:
                _work(attempt, left, seed, tally.parser, writer)
            finally:
                os._exit(0)
        os.close(writer)
        done = 0
        with os.fdopen(reader, encoding="utf-8") as lines:
            for line in lines:
                done += 1
                _count(tally, **json.loads(line))
        os.waitpid(child, 0)
        if done < len(left):
            _count(tally, fate="memory", place="process", text=f"input {left[done]} ended it")
            done += 1
        left = left[done:]


def _count(tally: Tally, fate: str, place: str, text: str) -> None:
    tally.inputs += 1
    if fate == "fine":
        return
    setattr(tally, fate, getattr(tally, fate) + 1)
    if fate != "refused":
        tally.places[place] += 1
        tally.examples.setdefault(place, text)


def _work(attempt: Attempt, numbers: range, seed: int, parser: str, writer: int) -> None:
    # What is written to a relative path must not land among the sources.
    os.chdir(tempfile.mkdtemp(prefix="ttrace-fuzz-"))
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + BYTES,) * 2)
    signal.signal(signal.SIGALRM, _too_long)
    with os.fdopen(writer, "w", encoding="utf-8") as file:
        for number in numbers:
            found = _one(attempt, random.Random(f"{seed} {parser} {number}"), number)
            file.write(json.dumps(found) + "\n")
            file.flush()


def _one(attempt: Attempt, dice: random.Random, number: int) -> dict[str, str]:
    signal.alarm(SECONDS)
    try:
        code = attempt(dice)
    except WrongError as error:
        return {"fate": "wrong", "place": str(error)[:80], "text": f"input {number}: {error}"}
    except HangError:
        return {"fate": "hangs", "place": _place(sys.exc_info()[2]), "text": f"input {number}"}
    except MemoryError:
        return {"fate": "memory", "place": _place(sys.exc_info()[2]), "text": f"input {number}"}
    except BaseException as error:  # noqa: BLE001 - that is what is looked for
        text = "".join(traceback.format_exception(error)[-6:])[-1500:]
        place = f"{type(error).__name__} at {_place(error.__traceback__)}"
        return {"fate": "tracebacks", "place": place, "text": f"input {number}: {text}"}
    finally:
        signal.alarm(0)
    return {"fate": "refused" if code == 2 else "fine", "place": "", "text": ""}


def _place(found: object) -> str:
    """The innermost line of the package."""
    frames = [
        f"{Path(frame.filename).parent.name}/{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(found)  # type: ignore[arg-type]
        if "megatron_ttrace" in frame.filename
    ]
    return frames[-1] if frames else "elsewhere"


def _too_long(number: int, frame: object) -> None:
    raise HangError


def _address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()
