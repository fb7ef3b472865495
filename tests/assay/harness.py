# SPDX-License-Identifier: Apache-2.0
"""What all campaigns share: faults are injected one by one, and every answer is judged.

A campaign lists its cases (what is injected, where, and which answer is right) and turns each into
a :class:`Row`. The checker sees neither: it gets the job alone. :func:`execute` runs the cases and
keeps their rows, :func:`finish` prints the table and compares shares with bars.
"""

import argparse
import concurrent.futures
import dataclasses
import fnmatch
import functools
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import megatron_ttrace
from megatron_ttrace.cli import command
from megatron_ttrace.evaluation import suites
from megatron_ttrace.jobs import flags
from megatron_ttrace.mcore.sources import megatron_folder
from megatron_ttrace.trace.errors import ExitCode, TTraceError

FALSE_ALARM = "false alarm"
"""The column of healthy jobs that diverge."""
_FILE = "rows.jsonl"
_MOST = 1 << 40


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault, or a healthy job, and how the answer about it is judged.

    Attributes:
        id: of the case; unique in its campaign.
        group: line of the table.
        marks: by column of the table, whether it counts there. A column that does not apply is
            absent: the share of a column is that of the rows that have it.
        note: what was answered, in words.
        seconds: it took.
        details: values that only this campaign records.
    """

    id: str
    group: str
    marks: Mapping[str, bool]
    note: str = ""
    seconds: float = 0.0
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        marks = (name if counts else f"not {name}" for name, counts in self.marks.items())
        return f"{self.id}: {', '.join(marks)}; {self.note[:400]} ({self.seconds:.1f} s)"


def columns(rows: Iterable[Row]) -> list[str]:
    """The columns of these rows, in the order in which they appear."""
    return list(dict.fromkeys(column for row in rows for column in row.marks))


def shares(rows: Sequence[Row]) -> dict[str, float]:
    """By column, the share of the rows that count there among those that have it."""
    marks = {
        column: [r.marks[column] for r in rows if column in r.marks] for column in columns(rows)
    }
    return {column: sum(values) / len(values) for column, values in marks.items()}


def table(rows: Sequence[Row]) -> str:
    """A line for each group and one for all: how many count, of how many that have the column."""
    names = columns(rows)
    groups = sorted({row.group for row in rows})
    lines = [["", "cases", *names]]
    for group in [*groups, "all"] if len(groups) > 1 else groups:
        members = [row for row in rows if group in (row.group, "all")]
        cells = [group, str(len(members))]
        for name in names:
            marks = [row.marks[name] for row in members if name in row.marks]
            counts = f"{sum(marks)}" if all(marks) else f"{sum(marks)} of {len(marks)}"
            cells.append(counts if marks else "")
        lines.append(cells)
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in padded)


def chosen(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    """The names that match any of the shell patterns; all without a pattern.

    Raises:
        TTraceError: when there is none.
    """
    matching = [name for name in names if not patterns or matches(name, patterns)]
    if not matching:
        raise TTraceError(f"nothing matches {' '.join(patterns)}")
    return matching


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a name matches any of the shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def add(
    subparsers: command.Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    summary: str,
    epilog: str,
    count: int = 0,
    seed: str = "",
    only: bool = True,
    directory: str = "",
) -> argparse.ArgumentParser:
    """Add a command with the options of a campaign.

    Args:
        subparsers: of ``python -m tests.assay``, or of a command.
        name: of the command.
        run: runs it and returns the exit code.
        summary: its line in the list of commands.
        epilog: the end of its ``--help``.
        count: default of ``--count``; 0 without this option.
        seed: what ``--seed`` says of its default; empty without this option.
        only: whether it has ``--only``.
        directory: default of ``--directory``; otherwise it has the name of the command.
    """
    parser = command.add(subparsers, name, run, summary=summary, epilog=epilog)
    if count:
        integer = flags.integer(1, _MOST)
        parser.add_argument("--count", type=integer, default=count, metavar="N")
    if seed:
        integer = flags.integer(0, _MOST)
        is_required = seed == "required"
        parser.add_argument("--seed", type=integer, required=is_required, metavar="N", help=seed)
    if only:
        parser.add_argument(
            "--only", nargs="+", action="extend", default=[], metavar="PATTERN", help="of names"
        )
    parser.add_argument(
        "--continue", dest="continues", action="store_true", help=f"keep the rows of DIR/{_FILE}"
    )
    parser.add_argument(
        "--directory",
        type=lambda text: Path(text).resolve(),
        default=directory or f"ttrace-out/{name}",
        metavar="DIR",
        help="working directory (default %(default)s)",
    )
    return parser


class Case(Protocol):
    """What is injected, where, and which answer is right."""

    @property
    def id(self) -> str:
        """The name of its row."""


def execute[C: Case](
    cases: Iterable[C],
    attempt: Callable[[C], Row | None],
    args: argparse.Namespace,
    *,
    enough: Callable[[list[Row]], bool] = lambda rows: False,
    jobs: int = 0,
    begin: Callable[[], None] | None = None,
) -> list[Row]:
    """Run the cases; each row is printed and kept as it comes.

    Args:
        cases: to run; without end if ``enough`` ends them.
        attempt: runs one; ``None`` if the case turns out to be none.
        args: of the command, with ``directory`` and ``continues``.
        enough: whether the rows so far are all that is wanted.
        jobs: number of forks that run cases; 0: this process does.
        begin: called first in each fork.
    """
    args.directory.mkdir(parents=True, exist_ok=True)
    file, say = args.directory / _FILE, command.progress()
    kept = {row.id: row for row in (_kept(file) if args.continues else [])}
    rows: list[Row] = []
    with file.open("w", encoding="utf-8", buffering=1) as output:
        output.write(json.dumps({"code": code()}) + "\n")
        output.writelines(_line(row) for row in kept.values())
        for row in _results(cases, functools.partial(_timed, attempt), kept, jobs, begin):
            if row is not None:
                rows.append(row)
                output.write("" if row.id in kept else _line(row))
                say(f"{len(rows)} {row}")
            if enough(rows):
                break
    return rows


def _line(row: Row) -> str:
    return json.dumps(dataclasses.asdict(row)) + "\n"


def _timed[C](attempt: Callable[[C], Row | None], case: C) -> Row | None:
    began = time.monotonic()
    row = attempt(case)
    return row and dataclasses.replace(row, seconds=round(time.monotonic() - began, 1))


def _results[C: Case](
    cases: Iterable[C],
    attempt: Callable[[C], Row | None],
    kept: Mapping[str, Row],
    jobs: int,
    begin: Callable[[], None] | None,
) -> Iterator[Row | None]:
    if not jobs:
        yield from (kept.get(case.id) or attempt(case) for case in cases)
        return
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, begin) as pool:
        futures = [pool.submit(attempt, case) for case in cases if case.id not in kept]
        yield from kept.values()
        yield from (future.result() for future in concurrent.futures.as_completed(futures))


def finish(
    rows: Sequence[Row],
    bars: Mapping[str, float],
    *,
    wanted: Mapping[str, float] | None = None,
    more: str = "",
) -> ExitCode:
    """Print the table and what is wrong: 0 if all bars are met, 1 after a false alarm, else 2.

    Args:
        rows: of the campaign.
        bars: by column, the least share.
        wanted: more of these, which are printed alone.
        more: lines to print below the table.
    """
    print(table(rows), more, sep="\n")
    for row in rows:
        if row.marks.get(FALSE_ALARM) or not all(row.marks.get(column, True) for column in bars):
            print(f"- {row}")
    reached = shares(rows)
    for column, bar in {**bars, **(wanted or {})}.items():
        print(f"{column}: {reached.get(column, 1.0):.1%}, wanted {bar:.0%}")
    met = bool(rows) and all(reached.get(column, 1.0) >= bar for column, bar in bars.items())
    return suites.exit_code(alarm=any(row.marks.get(FALSE_ALARM) for row in rows), met=met)


def load(file: Path) -> tuple[str, list[Row]]:
    """The digest of the code that wrote a file of rows, and its rows.

    Raises:
        TTraceError: when there is no such file, or it is damaged.
    """
    try:
        header, *lines = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        return header["code"], [Row(**line) for line in lines]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise TTraceError(f"{file}: not a file of rows ({error})") from error


def _kept(file: Path) -> list[Row]:
    if not file.exists():
        return []
    digest, rows = load(file)
    if digest != code():
        raise TTraceError(f"{file} was written by other code: remove it, or choose a --directory")
    return rows


def code() -> str:
    """A digest of everything that answers depend on: this package, its assay, and Megatron."""
    folders = [Path(megatron_ttrace.__file__).parent, Path(__file__).parent]
    folders.append(Path(megatron_folder(), "core"))
    digest = hashlib.sha256()
    for path in (path for folder in folders for path in sorted(folder.rglob("*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
