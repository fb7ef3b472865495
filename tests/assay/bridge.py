# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay bridge``: jobs of Megatron-Bridge, healthy and with faults."""

import argparse
import dataclasses
import functools
import shutil
import tomllib
from collections import Counter
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from megatron_ttrace.cli import command
from megatron_ttrace.evaluation import suites
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.files import load_report
from megatron_ttrace.trace.records import Outcome
from tests.assay import harness
from tests.assay.harness import FALSE_ALARM, Row
from tests.assay.planted.mistakes import PLANTED
from tests.bridge import data
from tests.integration import jobs

SCRIPTS = jobs.ROOT / "tests" / "bridge"
_TABLE = Path(__file__).with_suffix(".toml")
_EPILOG = """\
examples:
  python -m tests.assay bridge healthy --only 'sft*'
  python -m tests.assay bridge faults

healthy: all jobs of tests/assay/bridge.toml must be equivalent; where it says so they are refused,
or diverge because of a fault in Megatron-Bridge (docs/findings.md).
faults: known bugs of Megatron, and mistakes in Megatron-Bridge's own code
(tests/assay/planted/bridge.py), must be found in the right module.

exit code: 0 as promised; 1 a healthy job diverges; 2 else
"""


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``bridge`` command."""
    summary = "check jobs of Megatron-Bridge, healthy and with faults"
    parser = command.add(subparsers, "bridge", _run, summary=summary, epilog=_EPILOG)
    actions = parser.add_subparsers(required=True, metavar="healthy|faults")
    for name in ("healthy", "faults"):
        action = harness.add(
            *(actions, name, _run),
            summary=f"{name} jobs",
            epilog=_EPILOG,
            directory="ttrace-out/bridge",
        )
        action.set_defaults(table=name)


@dataclasses.dataclass(frozen=True)
class Case:
    """A job of Megatron-Bridge, what is wrong with it, and the right answer.

    Attributes:
        id: of its row in the table.
        job: words of ``tests/bridge/job.py``.
        ranks: number of them.
        start: words of the job that saves the checkpoint this one begins with; empty without.
        refused: whether it must be refused.
        finding: number of the one (docs/findings.md) because of which it diverges; 0 without.
        bug: a known bug of ``ttrace eval bugs`` that it has, or
        planted: a mistake of ``tests/assay/planted/bridge.py``.
        module, kind: of the first culprit, if a fault must be found; the module is a pattern.
    """

    id: str
    job: tuple[str, ...]
    ranks: int = 2
    start: tuple[str, ...] = ()
    refused: bool = False
    finding: int = 0
    bug: str = ""
    planted: str = ""
    module: str = ""
    kind: str = ""

    @property
    def promised(self) -> str:
        """The verdict that is right."""
        is_wrong = self.finding or self.module
        return "refused" if self.refused else "diverged" if is_wrong else "equivalent"


@functools.cache
def cases() -> Mapping[str, Mapping[str, Case]]:
    """``healthy`` and ``faults``, by their names."""
    tables = tomllib.loads(_TABLE.read_text(encoding="utf-8"))

    def spelled(text: str) -> tuple[str, ...]:
        words = (tables["words"].get(word, word) for word in text.split())
        return tuple(" ".join(words).split())

    healthy = {
        name: Case(
            id=name,
            **{**row, "job": spelled(row["job"]), "start": spelled(row.get("start", ""))},
        )
        for name, row in tables["healthy"].items()
    }
    faults = {
        name: dataclasses.replace(healthy[row.pop("job")], id=name, **row)
        for name, row in tables["faults"].items()
    }
    return {"healthy": healthy, "faults": faults}


def _run(args: argparse.Namespace) -> int:
    from megatron_ttrace.cpu import bridge

    if not bridge.installed():
        raise TTraceError(
            "Megatron-Bridge is not installed: export PYTHONPATH=$(launch/bootstrap.sh bridge)"
        )
    table = cases()[args.table]
    chosen = [table[name] for name in harness.chosen(table, args.only)]
    rows = harness.execute(chosen, lambda case: attempt(case, args.directory / case.id), args)
    return harness.finish(rows, {"as promised": 1.0, "right module": 1.0})


def attempt(case: Case, directory: Path) -> Row:
    """``ttrace check`` of a job, in a directory that is emptied first.

    Raises:
        TTraceError: when the job that saves a checkpoint fails.
    """
    directory = directory.resolve()
    shutil.rmtree(directory, ignore_errors=True)
    data.write(directory / "data")
    # What `datasets` prepares stays below the directory.
    variables = {"HF_HOME": str(directory / "hub"), "HF_HUB_OFFLINE": "1"}
    words = [*case.job]
    if case.start:
        _save(case, directory, variables)
        words.append(f"checkpoint.pretrained_checkpoint={directory / 'start'}")
    if case.planted:
        variables[PLANTED] = case.planted
    flags = ("--ttrace-bug", case.bug) if case.bug else ()
    script = SCRIPTS / ("planted.py" if case.planted else "job.py")
    check = ("check", "--quiet", "--nproc-per-node", case.ranks, *flags)
    done = jobs.ttrace(*check, "--", script, *words, cwd=directory, **variables)
    if done.returncode not in (0, 1):
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        is_refused = case.refused and done.returncode == 2 and len(lines) == 1
        note = " | ".join([f"exit code {done.returncode}", *lines[-3:]])
        return Row(case.id, case.promised, {"as promised": is_refused}, note)
    summary, verdicts = load_report(directory / "ttrace-out")
    marks = {"as promised": summary.verdict == case.promised}
    if summary.verdict == "diverged" and case.promised == "equivalent":
        marks[FALSE_ALARM] = True
    if case.module:
        first = summary.culprits[0] if summary.culprits else None
        marks["right module"] = first is not None and (
            fnmatchcase(first.name, case.module) and first.kind == case.kind
        )
    counts = Counter(verdict.verdict for verdict in verdicts)
    margin = max(map(suites.margin_of, verdicts), default=0.0)
    details = {"tensors": counts.total(), "unchecked": counts[Outcome.UNCHECKED], "margin": margin}
    culprits = [f"{c.name} {c.kind}: {c.cause or 'no cause'}" for c in summary.culprits[:3]]
    counted = f"{counts.total()} tensors, {details['unchecked']} unchecked, margin {margin:.3g}"
    note = "; ".join([summary.verdict, counted, *culprits])
    return Row(case.id, case.promised, marks, note, details=details)


def _save(case: Case, directory: Path, variables: Mapping[str, str]) -> None:
    words = [*case.start, f"checkpoint.save={directory / 'start'}", "checkpoint.save_interval=2"]
    scripts = (SCRIPTS / "train.py", SCRIPTS / "job.py")
    done = jobs.torchrun(2, *scripts, *words, cwd=directory, **variables)
    if done.returncode:
        raise TTraceError(f"{case.id}: no checkpoint: {(done.stdout + done.stderr)[-2000:]}")
