# SPDX-License-Identifier: Apache-2.0
"""Run the campaign, or a part of it, and write its table.

Run::

    python -m tests.assay.faults.campaign --seed 1 --jobs 2 --out DIR
    python -m tests.assay.faults.campaign --seed 1 --out DIR --only disk-003 signals-010

Under ``DIR``: ``results.jsonl`` (a line per fault), ``table.md``, ``table.json``, and the working
directory of every fault that broke a promise. The exit code is 0 when all promises were kept.
"""

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path

from tests.assay.faults import baseline
from tests.assay.faults.drawing import choose, representative
from tests.assay.faults.experiment import Experiment, own_mounts
from tests.assay.faults.fault import Family, Fault, Problem, Row
from tests.assay.faults.processes import ROOT, adopt_orphans, die_with_parent, warm

COLUMNS = {
    "wrong equivalent": (Problem.WRONG_EQUIVALENT,),
    "false alarm": (Problem.FALSE_ALARM,),
    "harmed": (Problem.HARMED, Problem.RERUN),
    "foreign files": (Problem.FOREIGN,),
    "secrets": (Problem.SECRET,),
    "hangs": (Problem.HANG, Problem.MEMORY),
    "orphans": (Problem.ORPHAN,),
    "said wrongly": (
        *(Problem.EXIT_CODE, Problem.NO_LINE, Problem.REASON),
        *(Problem.TRACEBACK, Problem.CONTROL, Problem.SUMMARY),
    ),
}


def table(rows: Sequence[Row]) -> list[dict[str, str | int]]:
    """One line per family, and one for all."""
    lines = []
    for family in [*Family, None]:
        mine = [row for row in rows if family in (None, row.family)]
        if not mine:
            continue
        injected = [row for row in mine if row.injected]
        line: dict[str, str | int] = {
            "family": family or "all",
            "injected": len(injected),
            "as promised": sum(row.kept for row in mine),
        }
        for name, problems in COLUMNS.items():
            line[name] = sum(any(kind in problems for kind, _ in row.problems) for row in mine)
        line["not injected"] = len(mine) - len(injected)
        lines.append(line)
    return lines


def markdown(lines: Sequence[dict[str, str | int]]) -> str:
    """The table for a document."""
    names = list(lines[0]) if lines else []
    text = [f"| {' | '.join(names)} |", f"|{'|'.join('---' for _ in names)}|"]
    text += [f"| {' | '.join(str(line[name]) for name in names)} |" for line in lines]
    return "\n".join(text) + "\n"


def read(file: Path) -> list[Row]:
    """The rows of a ``results.jsonl``."""
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines():
        data = json.loads(line)
        data["family"] = Family(data["family"])
        data["codes"] = tuple(data["codes"])
        data["problems"] = tuple((Problem(kind), said) for kind, said in data["problems"])
        rows.append(Row(**data))
    return rows


def run(faults: Sequence[Fault], out: Path, jobs: int) -> list[Row]:
    """Inject faults, ``jobs`` at a time."""
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    results.write_text("", encoding="utf-8")
    began = time.monotonic()
    print("importing Megatron", flush=True)
    warm()
    base = baseline.prepare(
        out / "baseline",
        {fault.family for fault in faults},
        {fault.layout for fault in faults} - {""},
        time.monotonic() - began,
    )
    print(
        f"a check takes {base.fresh:.1f} s, {base.cached:.1f} s with its reference cached; "
        f"{time.monotonic() - began:.0f} s until here",
        flush=True,
    )
    # Numbers of faults, each taken by the worker that reads it.
    reading, writing = os.pipe()
    os.write(writing, b"".join(number.to_bytes(4, "big") for number in range(len(faults))))
    os.close(writing)
    workers = []
    for _ in range(jobs):
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            _work(faults, base, out, reading)
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)
    return read(results)


def _work(faults: Sequence[Fault], base: baseline.Baseline, out: Path, reading: int) -> None:
    """A worker: takes faults until none is left. Never returns."""
    try:
        die_with_parent()
        adopt_orphans()
        mounts = own_mounts()
        while order := os.read(reading, 4):
            fault = faults[int.from_bytes(order, "big")]
            row = Experiment(fault, base, out / fault.id, mounts=mounts).run()
            text = json.dumps(dataclasses.asdict(row)) + "\n"
            with (out / "results.jsonl").open("a", encoding="utf-8") as results:
                results.write(text)
            print(_line(row, f"{order[2] * 256 + order[3] + 1}/{len(faults)}"), flush=True)
    except BaseException:  # noqa: BLE001 - a fork must end here, whatever happened
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _line(row: Row, position: str) -> str:
    problems = "; ".join(f"{kind}: {said!r}" for kind, said in row.problems)
    state = "kept" if row.kept else problems or "not injected"
    return f"{position} {row.id} {row.seconds:.1f} s {list(row.codes)} {state[:500]}"


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description="Inject faults into real runs.")
    parser.add_argument("--seed", type=int, default=1, help="which faults are drawn")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    parser.add_argument("--out", type=Path, required=True, help="directory for everything")
    parser.add_argument("--only", nargs="*", help="ids or beginnings of ids")
    parser.add_argument("--every", type=int, default=1, help="every N-th fault only")
    parser.add_argument("--representative", action="store_true", help="a few of each family")
    args = parser.parse_args(argv)
    faults = representative(args.seed) if args.representative else choose(args.seed)
    if args.only:
        faults = [fault for fault in faults if fault.id.startswith(tuple(args.only))]
    faults = faults[:: args.every]
    # Every process of the campaign imports this checkout, whatever is installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.monotonic()
    try:
        rows = run(faults, args.out.resolve(), args.jobs)
    except baseline.NoBaselineError as error:
        print(f"no fault was injected: without one, {error}", file=sys.stderr)
        return 2
    lines = table(rows)
    (args.out / "table.md").write_text(markdown(lines), encoding="utf-8")
    about = {"seed": args.seed, "seconds": round(time.monotonic() - began), "families": lines}
    (args.out / "table.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    print(markdown(lines), f"{len(rows)} of {len(faults)} faults", f"in {about['seconds']} s")
    return 0 if len(rows) == len(faults) and not list(_broken(rows)) else 1


def _broken(rows: Iterable[Row]) -> Iterable[Row]:
    return (row for row in rows if row.problems)


if __name__ == "__main__":
    ending = main()
    sys.stdout.flush()
    # Without the farewells of all that was imported.
    os._exit(ending)
