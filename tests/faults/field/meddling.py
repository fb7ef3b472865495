# SPDX-License-Identifier: Apache-2.0
"""Signals that nobody expects, and a reference that somebody changes while it is in use."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from tests.faults import baseline, harness
from tests.faults.baseline import Baseline, check
from tests.faults.faults import Family, Fault, Full, Promise, Signal, Target, Where
from tests.faults.field.rows import Row
from tests.faults.harness import Experiment
from tests.faults.judging import of_command
from tests.faults.processes import Started, adopt_orphans, bury, warm


class Harm(enum.StrEnum):
    """What happens to every file of the reference that a check is using."""

    TRUNCATED = "cut in half"
    EMPTIED = "emptied"
    OVERWRITTEN = "overwritten with other bytes"
    REPLACED = "replaced by a FIFO"
    REMOVED = "removed"
    UNREADABLE = "a directory in its place"


@dataclasses.dataclass(frozen=True, slots=True)
class Meddle:
    """What happens after a share of a check's duration, to a candidate with or without a bug."""

    id: str
    harm: Harm
    moment: float
    faulty: bool = True


_SIGNALS = (
    ("rank-bus", Target.RANK1, signal.SIGBUS, 0.5),
    ("rank-quit", Target.RANK0, signal.SIGQUIT, 0.3),
    ("rank-user", Target.RANK1, signal.SIGUSR1, 0.7),
    ("rank-alarm", Target.RANK0, signal.SIGALRM, 0.6),
    ("rank-pipe", Target.RANK1, signal.SIGPIPE, 0.4),
    ("rank-hang-up", Target.RANK0, signal.SIGHUP, 0.8),
    ("reference-bus", Target.REFERENCE, signal.SIGBUS, 0.3),
    ("reference-quit", Target.REFERENCE, signal.SIGQUIT, 0.5),
    ("reference-user", Target.REFERENCE, signal.SIGUSR2, 0.4),
    ("reference-processor-time", Target.REFERENCE, signal.SIGXCPU, 0.6),
)
SIGNALS = tuple(
    Fault(
        f"process-{name}",
        Family.RANKS,
        Signal(target, (number,), moment, fresh=target is Target.REFERENCE),
        Promise(),
        faulty=place % 2 == 0,
    )
    for place, (name, target, number, moment) in enumerate(_SIGNALS)
) + tuple(
    Fault(
        f"process-disk-{kib}-{where.name.lower()}",
        Family.DISK,
        Full(where, kib=kib),
        Promise(),
        faulty=True,
    )
    for kib in (3, 50, 700)
    for where in (Where.DIRECTORY, Where.CACHE)
)
MEDDLES = tuple(
    Meddle(
        f"process-{'faulty' if faulty else 'healthy'}-{harm.name.lower()}-{round(10 * moment)}",
        harm,
        moment,
        faulty,
    )
    for faulty in (True, False)
    for harm, moment in (
        (Harm.TRUNCATED, 0.3),
        (Harm.TRUNCATED, 0.6),
        (Harm.EMPTIED, 0.5),
        (Harm.OVERWRITTEN, 0.4),
        (Harm.OVERWRITTEN, 0.6),
        (Harm.REPLACED, 0.5),
        (Harm.REMOVED, 0.5),
        (Harm.UNREADABLE, 0.4),
    )
)


def _harm(file: Path, harm: Harm) -> None:
    size = file.stat().st_size
    match harm:
        case Harm.TRUNCATED:
            os.truncate(file, size // 2)
        case Harm.EMPTIED:
            os.truncate(file, 0)
        case Harm.OVERWRITTEN:
            with file.open("r+b") as opened:
                opened.seek(size // 2)
                opened.write(os.urandom(size - size // 2))
        case Harm.REPLACED | Harm.REMOVED | Harm.UNREADABLE:
            file.unlink()
            if harm is Harm.REPLACED:
                os.mkfifo(file)
            if harm is Harm.UNREADABLE:
                file.mkdir()


def meddle(fault: Meddle, base: Baseline, home: Path) -> Row:
    """A check; the reference in its cache is changed while it runs."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    cache = home / "cache"
    shutil.copytree(base.folder / "cache", cache)
    started = Started(check(home, cache=cache, faulty=fault.faulty))
    injected = not started.wait(fault.moment * base.cached)
    for file in sorted(cache.rglob("*.safetensors")):
        _harm(file, fault.harm)
    started.wait(120)
    problems = [
        f"{kind}: {said}"
        for kind, said in of_command(started, Promise(), faulty=fault.faulty, report=True)
    ]
    left = bury(5)
    problems += [f"left {left}"] if left else []
    said = f"exit code {started.code}"
    return Row(fault.id, "processes", injected, tuple(problems), said)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all of them, one after the other, and print a line each; 1 if a promise was broken."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args(argv)
    return int(any(row.problems for row in run(args.out.resolve())))


def run(out: Path) -> list[Row]:
    """In this process, which becomes the parent of what it starts."""
    adopt_orphans()
    warm()
    base = baseline.prepare(out / "baseline", {Family.RANKS}, 5.0)
    mounts = harness.own_mounts()
    rows = []
    for fault in SIGNALS:
        row = Experiment(fault, base, out / fault.id, mounts=mounts).run()
        found = tuple(f"{kind}: {said}" for kind, said in row.problems)
        rows.append(Row(row.id, "processes", row.injected, found, f"{row.codes} {row.said[:200]}"))
        print(rows[-1], flush=True)
    for change in MEDDLES:
        rows.append(meddle(change, base, out / change.id))
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    os._exit(main())
