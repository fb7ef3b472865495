# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay checkpoints``: faults of saving and loading, and healthy restarts."""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ttrace.cli import command
from megatron_ttrace.trace.errors import ExitCode, TTraceError

if TYPE_CHECKING:
    from tests.assay.checkpoints.answers import Answer
    from tests.assay.checkpoints.faults import Planted
    from tests.assay.checkpoints.jobs import Job
    from tests.assay.checkpoints.plain import Proof, Workshop

BARS = {"found": 0.95, "right": 0.95, "side": 0.9}
"""Shares that must be reached: of the faults, and of those that are found."""
_COUNT, _MOST_DRAWN = 20, 10
_EPILOG = """\
examples:
  python -m tests.assay checkpoints run --count 20 --seed 7
  python -m tests.assay checkpoints healthy --only 'zero*'

run: a seed draws faults of saving and loading (tests/assay/planted), jobs and layouts.
Runs without the checker prove that each fault is real; the others are counted and left out. Then
'ttrace resume' must find it, name the state that was changed, and say whether saving or loading
did it. Faults of loading are also given to 'ttrace check --load'.
healthy: 'ttrace resume' of all pairs in tests/assay/checkpoints/jobs.toml must be equivalent.

exit code: 0 the bars are met, or no healthy restart diverges; 1 a healthy restart diverges; 2 else
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``checkpoints`` command."""
    parser = command.add(
        subparsers,
        "checkpoints",
        _run,
        summary="plant faults of saving and loading and count how many are found",
        epilog=_EPILOG,
    )
    actions = parser.add_subparsers(required=True, metavar="run|prove|healthy")
    running, proving, healthy = (
        command.add(actions, name, run, summary=summary, epilog=_EPILOG)
        for name, run, summary in (
            ("run", _run, "prove a sample of faults, and have the checker find them"),
            ("prove", _prove, "only prove a sample of faults, without the checker"),
            ("healthy", _healthy, "restart healthy jobs in other layouts"),
        )
    )
    for action in (running, proving):
        action.add_argument(
            "--count", type=int, default=_COUNT, metavar="N", help="number of real faults"
        )
        action.add_argument("--seed", type=int, required=True, metavar="N", help="of the sample")
    for action in (running, healthy):
        action.add_argument("--json", type=Path, metavar="FILE", help="write all rows to FILE")
        action.add_argument(
            "--only", action="append", default=[], metavar="PATTERN", help="of names; repeatable"
        )
    healthy.add_argument(
        "--plain", action="store_true", help="without the checker: does Megatron accept the pairs?"
    )
    healthy.add_argument(
        "--check", action="store_true", help="'ttrace check --load' instead of 'ttrace resume'"
    )
    for action in (running, proving, healthy):
        command.add_directory(action, "ttrace-out/checkpoints")
    return parser


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault and the answers about it.

    Attributes:
        planted: the fault.
        proof: that it is real.
        resumed: by ``ttrace resume``.
        checked: by ``ttrace check --load``; of faults of loading.
    """

    planted: Planted
    proof: Proof
    resumed: Answer
    checked: Answer | None

    def right(self, answer: Answer) -> bool:
        """Whether the first difference that is named is of what was changed."""
        from tests.assay.checkpoints.answers import is_right

        return bool(answer.named) and is_right(answer.named[0], self.proof.truth)

    @property
    def side(self) -> bool:
        """Whether the right half is blamed."""
        named = self.resumed.named
        return bool(named) and named[0].side == self.planted.fault.side.value

    def to_json(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "name": self.planted.name,
            "layout": str(self.planted.into),
            "truth": self.proof.truth,
            "trains": self.proof.trains,
            "right": self.right(self.resumed),
            "side": self.side,
            "resumed": dataclasses.asdict(self.resumed),
            "checked": self.checked and dataclasses.asdict(self.checked),
            "checked_right": self.checked and self.right(self.checked),
        }


def _proved(args: argparse.Namespace) -> tuple[list[tuple[Planted, Proof]], dict[str, list[str]]]:
    """The first real faults of the sample, and the names of the others by reason."""
    from tests.assay.checkpoints.faults import sample
    from tests.assay.checkpoints.plain import Proof, Workshop

    if args.count < 1:
        raise TTraceError(f"--count {args.count}: at least 1 fault is needed")
    workshop = Workshop(args.directory / "plain")
    file = args.directory / f"proofs-{args.seed}.json"
    known: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    real: list[tuple[Planted, Proof]] = []
    others: dict[str, list[str]] = {"refused by Megatron": [], "change nothing": []}
    say = command.progress()
    for number, planted in enumerate(sample(args.seed)):
        if len(real) == args.count or number == args.count * _MOST_DRAWN:
            break
        if planted.name in known:
            proof = Proof.of(known[planted.name])
        else:
            proof = workshop.prove(planted)
            known[planted.name] = dataclasses.asdict(proof)
            file.write_text(json.dumps(known, indent=1), encoding="utf-8")
        if proof.is_real:
            real.append((planted, proof))
        else:
            others["refused by Megatron" if proof.loud else "change nothing"].append(planted.name)
        say(f"{planted.name}: {'real' if proof.is_real else 'left out'}")
    return real, others


def _prove(args: argparse.Namespace) -> int:
    real, others = _proved(args)
    for planted, proof in real:
        print(f"{planted.name}  {proof.truth[0]}{' ...' if len(proof.truth) > 1 else ''}")
    _left_out(others)
    return ExitCode.EQUIVALENT if len(real) == args.count else ExitCode.COULD_NOT_CHECK


def _left_out(others: dict[str, list[str]]) -> None:
    for why, names in others.items():
        print(f"{why}: {len(names)}")
        for name in names:
            print(f"  {name}")


def _run(args: argparse.Namespace) -> int:
    from tests.assay.checkpoints import answers
    from tests.assay.checkpoints.plain import Workshop

    real, others = _proved(args)
    workshop, say = Workshop(args.directory / "plain"), command.progress()
    rows = []
    for planted, proof in real:
        if args.only and not any(fnmatch.fnmatch(planted.name, one) for one in args.only):
            continue
        folder = args.directory / planted.name
        fault, job = planted.fault, planted.job
        resumed = answers.resume(folder / "resume", job, [planted.into], fault.order)
        checked = None
        if fault.side == "load":
            workshop.saved(job)
            checkpoint = (workshop.folder(job) / "ck").resolve()
            checked = answers.check(folder / "check", job, planted.into, checkpoint, fault.order)
        row = Row(planted, proof, resumed, checked)
        rows.append(row)
        say(f"{len(rows)}/{len(real)} {_line(row)}")
        if args.json:
            _write(args, rows, others)
    print(*map(_line, rows), sep="\n")
    _left_out(others)
    shares = _shares(rows)
    print("  ".join(f"{name} {share:.0%}" for name, share in shares.items()))
    met = bool(rows) and all(shares[name] >= bar for name, bar in BARS.items())
    return ExitCode.EQUIVALENT if met else ExitCode.COULD_NOT_CHECK


def _write(args: argparse.Namespace, rows: Sequence[Row], others: dict[str, list[str]]) -> None:
    content = {
        "seed": args.seed,
        "shares": _shares(rows),
        "left_out": others,
        "rows": [row.to_json() for row in rows],
    }
    args.json.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _shares(rows: Sequence[Row]) -> dict[str, float]:
    """Of ``ttrace resume``; those about causes are shares of what was found."""
    found = [row for row in rows if row.resumed.is_found]
    checked = [row for row in rows if row.checked is not None]
    return {
        "found": _share([row.resumed.is_found for row in rows]),
        "right": _share([row.right(row.resumed) for row in found]),
        "side": _share([row.side for row in found]),
        "found by check": _share([row.checked.is_found for row in checked if row.checked]),
        "right by check": _share(
            [row.right(row.checked) for row in checked if row.checked and row.checked.is_found]
        ),
    }


def _share(values: Sequence[bool]) -> float:
    return sum(values) / len(values) if values else 1.0


def _line(row: Row) -> str:
    answer = row.resumed
    first = answer.named[0] if answer.named else None
    told = f"{first.state} {first.name} ({first.side or 'side unknown'})" if first else ""
    marks = [
        "found" if answer.is_found else f"MISSED ({answer.verdict[:60]})",
        "" if not answer.is_found else "right" if row.right(answer) else "WRONG TENSOR",
        "" if not answer.is_found else "side" if row.side else "WRONG SIDE",
    ]
    if row.checked is not None:
        how = "right" if row.right(row.checked) else "wrong tensor"
        marks.append(f"check: {row.checked.verdict[:40]} {how if row.checked.named else ''}")
    return f"{row.planted.name}  {' '.join(filter(None, marks))}  {told}"


def _healthy(args: argparse.Namespace) -> int:
    from tests.assay.checkpoints import answers
    from tests.assay.checkpoints.jobs import jobs
    from tests.assay.checkpoints.plain import Workshop

    chosen = [
        job
        for job in jobs().values()
        if not args.only or any(fnmatch.fnmatch(job.name, one) for one in args.only)
    ]
    if not chosen:
        raise TTraceError(f"no job matches {' '.join(args.only)}")
    rows: list[dict[str, Any]] = []
    row: dict[str, Any]
    for job in chosen:
        began = time.monotonic()
        workshop = Workshop(args.directory / "plain")
        if args.check:
            row = _checked(args.directory, workshop, job)
        elif args.plain:
            runs = {str(layout): workshop.resumed(job, layout) for layout in job.into}
            verdicts = {into: "refused" if run.code else "loaded" for into, run in runs.items()}
            row = {"job": job.name, "verdict": ", ".join(sorted(set(verdicts.values())))}
        else:
            answer = answers.resume(args.directory / job.name, job, job.into)
            row = {"job": job.name, **dataclasses.asdict(answer)}
        row |= {"pairs": len(job.into), "took": round(time.monotonic() - began, 1)}
        rows.append(row)
        print(f"{job.name:<20} {row['pairs']} {row['verdict']:<14} {row['took']} s", flush=True)
        for named in row.get("named", [])[:3]:
            print(f"    {named['state']} {named['name']} ({named['side']})")
        if args.json:
            args.json.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    alarms = sum(row["verdict"] == "diverged" for row in rows)
    good = sum(row["pairs"] for row in rows if row["verdict"] in ("equivalent", "loaded"))
    print(f"{sum(row['pairs'] for row in rows)} pairs, {good} in jobs without any difference")
    if alarms:
        return ExitCode.DIVERGED
    every = all(row["verdict"] in ("equivalent", "loaded") for row in rows)
    return ExitCode.EQUIVALENT if every else ExitCode.COULD_NOT_CHECK


def _checked(directory: Path, workshop: Workshop, job: Job) -> dict[str, Any]:
    """The worst answer of ``ttrace check --load`` in all layouts of a job."""
    from tests.assay.checkpoints import answers

    workshop.saved(job)
    checkpoint = (workshop.folder(job) / "ck").resolve()
    found = [
        answers.check(directory / f"check-{job.name}-{number}", job, layout, checkpoint, "")
        for number, layout in enumerate(job.into)
    ]
    worst = next((one for one in found if one.verdict != "equivalent"), found[0])
    return {"job": job.name, **dataclasses.asdict(worst)}
