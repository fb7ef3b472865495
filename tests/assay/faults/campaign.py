# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay faults``: faults around real checks, and what is promised anyway."""

import argparse
import functools
import os
import time

from megatron_ttrace.cli import command
from megatron_ttrace.trace.errors import TTraceError
from tests.assay import harness
from tests.assay.faults import actions, baseline
from tests.assay.faults.drawing import choose
from tests.assay.faults.experiment import Experiment, own_mounts
from tests.assay.faults.fault import Fault
from tests.assay.faults.processes import ROOT, adopt_orphans, die_with_parent, warm
from tests.assay.harness import Row

BARS = {"as promised": 1.0}
_EPILOG = """\
examples:
  python -m tests.assay faults --seed 7 --only 'signals-*' 'disk-*'
  python -m tests.assay faults --only disk-003 signals-010

A seed draws signals, killed ranks, full disks, damaged traces, a second run at once, and hostile
names; bad input, directories of other users and mistakes in Megatron are the same for every seed.
Every fault must end with the right verdict, or with exit code 2 and one line. The working directory
of every fault that broke a promise is kept.

exit code: 0 if all was as promised, else 2
"""


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``faults`` command."""
    parser = harness.add(
        *(subparsers, "faults", _run),
        summary="inject faults around real checks: signals, disks, damaged files, hostile names",
        epilog=_EPILOG,
        seed="which faults are drawn (default 1)",
    )
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="faults at a time")


def _run(args: argparse.Namespace) -> int:
    seed = 1 if args.seed is None else args.seed
    faults = {fault.id: fault for fault in choose(seed)}
    chosen = [faults[name] for name in harness.chosen(faults, args.only)]
    # Every process of the campaign imports this checkout, whatever is installed.
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.monotonic()
    warm()
    start = time.monotonic() - began
    try:
        base = baseline.prepare(
            args.directory / "baseline", chosen, start, other=any(map(actions.uses_other, chosen))
        )
    except baseline.NoBaselineError as error:
        raise TTraceError(f"no fault was injected: without one, {error}") from error
    attempt = functools.partial(_attempt, base)
    rows = harness.execute(chosen, attempt, args, jobs=args.jobs, begin=_begin)
    return harness.finish(rows, BARS)


def _begin() -> None:
    die_with_parent()
    adopt_orphans()


def _attempt(base: baseline.Baseline, fault: Fault) -> Row:
    home = base.folder.with_name(fault.id)
    return Experiment(fault, base, home, mounts=own_mounts()).run()
