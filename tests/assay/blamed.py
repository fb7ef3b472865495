# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay blame``: is the known bug blamed among harmless changes?"""

import argparse
import concurrent.futures
import dataclasses
import importlib.util
import json
import multiprocessing
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from megatron_ttrace.cli import command
from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.bugs.catalogue import Bug, load_catalogue
from megatron_ttrace.evaluation.bugs.suite import Variant
from megatron_ttrace.jobs import edited, flags, hunks, overlay
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.settings import Settings, checking, split
from megatron_ttrace.saved import api, blame
from megatron_ttrace.trace.blamed import Blaming
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.executed import Edit, Edits, Execution
from tests.assay import harmless

_OURS = "megatron_ttrace."
_WORDS = 60
_NAMED = (Blaming.PROVEN, Blaming.REMOVED, Blaming.ALONE)

_EPILOG = """\
examples:
  python -m tests.assay blame
  python -m tests.assay blame --harmless 200 --seed 2 01 08

Each known bug of Megatron's is put into a copy of the installed Megatron together with harmless
changes, two thirds of them in functions that run in the culprit; ttrace blame has to name hunks of
the bug, and nothing else. One JSON object per row goes to DIR/rows.jsonl. (Bugs of
TransformerEngine's emulation are not changes to Megatron.)

exit code: 0 if all were blamed exactly, else 2
"""


def add_parser(subparsers: command.Subparsers) -> argparse.ArgumentParser:
    """Add the ``blame`` command."""
    parser = command.add(
        subparsers,
        "blame",
        run,
        summary="count how many known bugs are blamed among harmless changes",
        epilog=_EPILOG,
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="known bugs (default: all)")
    parser.add_argument("--harmless", type=flags.integer(0, 1000), default=60, metavar="N")
    parser.add_argument("--seed", type=flags.integer(least=0), default=1)
    command.add_directory(parser, "ttrace-out/blame")
    return parser


def run(args: argparse.Namespace) -> int:
    """Blame each bug, and print a table."""
    rows = []
    args.directory.mkdir(parents=True, exist_ok=True)
    with (args.directory / "rows.jsonl").open("a") as out:
        for bug in load_catalogue():
            if args.ids and bug.id not in args.ids:
                continue
            if any(patch.module.startswith(_OURS) for patch in bug.patches):
                continue
            row = _row(bug, args.directory.resolve(), args.harmless, args.seed)
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(
                f"{row['id']:<4} {row['name']:<28} {row['result']:<10} exact {row['exact']!s:<6}"
                f"{row['hunks']:>4} hunks {row['checks']:>3} checks {row['seconds']:>6.1f} s",
                flush=True,
            )
    exact = sum(row["exact"] for row in rows)
    print(f"{exact} of {len(rows)} blamed exactly")
    return ExitCode.EQUIVALENT if exact == len(rows) else ExitCode.COULD_NOT_CHECK


def _row(bug: Bug, directory: Path, count: int, seed: int) -> dict[str, Any]:
    home = directory / bug.id
    shutil.rmtree(home, ignore_errors=True)
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None
    assert spec.origin is not None
    good, changed, bad = home / "good", home / "changed", home / "bad"
    skipped = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(Path(spec.origin).parents[1], good / "megatron", ignore=skipped)
    layout = bug.layouts[0]
    variant = Variant(model=layout.models[0])
    words = (
        *variant.arguments,
        *_data(layout.data, directory),
        *layout.arguments,
    )
    ours, theirs = split(
        [*layout.flags, "--ttrace-device", "cpu"], Settings(directory=home / "blame")
    )
    assert not theirs
    os.environ["PYTHONPATH"] = os.pathsep.join([str(bad), *filter(None, sys.path[:1])])
    trial = blame.Trial(
        interpreter=sys.executable,
        arguments=words,
        ranks=layout.nproc,
        settings=dataclasses.replace(ours, wandb=False),
        environment=dict(os.environ),
    )
    shutil.copytree(good, bad)
    _patch(bad, bug)
    preferred = _ran(bad, trial)
    inside = preferred[0]
    shutil.copytree(good, changed)
    kept = [patch.fragment for patch in bug.patches]
    done = harmless.plant(changed, count, seed, preferred, kept)
    shutil.rmtree(bad)
    shutil.copytree(changed, bad)
    _patch(bad, bug)
    # A harmless change that is next to the fault is in one hunk with it.
    fault = {_key(one) for one in _splices(bad, good)} - {
        _key(one) for one in _splices(changed, good)
    }
    tree = overlay.Tree.of(launch_dir() / "pretrain_gpt.py")
    assert tree.packages == bad / "megatron", tree
    began = time.monotonic()
    row: dict[str, Any] = {"id": bug.id, "name": bug.name, "harmless": len(done), "seed": seed}
    row["in culprit"] = sum(
        any(one.startswith(f"{site.file}:{site.function}:") for site in inside) for one in done
    )
    try:
        report = blame.blame(
            tree,
            overlay.difference(tree, str(good)),
            trial,
            lambda line: print(f"  [{time.monotonic() - began:5.0f} s] {line}", file=sys.stderr),
        )
    except TTraceError as error:
        failed = {"result": "error", "reason": str(error), "exact": False, "hunks": 0, "checks": 0}
        return {**row, **failed, "seconds": time.monotonic() - began}
    found = report.summary.blame
    if found is None:
        missed = {"result": "equivalent", "exact": False, "hunks": 0, "checks": 1}
        return {**row, **missed, "seconds": time.monotonic() - began}
    blamed = {
        (one.file, one.removed, one.added) for change in found.changes for one in change.hunks
    }
    for folder in (good, changed, bad):
        shutil.rmtree(folder)
    return {
        **row,
        "result": found.result.value,
        "exact": found.result in _NAMED and bool(blamed) and blamed <= fault,
        "blamed": len(blamed),
        "fault": len(fault),
        "changes": [[f"{h.file}:{h.line} {h.function}" for h in c.hunks] for c in found.changes],
        "hunks": found.hunks,
        "idle": found.idle,
        "checks": found.checks,
        "seconds": round(found.seconds, 1),
        "reason": found.reason,
    }


def _data(kind: suites.Data, directory: Path) -> tuple[str, ...]:
    """The arguments of a job's data, which Megatron writes: in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return tuple(pool.submit(suites.data_arguments, kind, directory, _WORDS).result())


def _patch(root: Path, bug: Bug) -> None:
    for patch in bug.patches:
        file = root / (patch.module.replace(".", "/") + ".py")
        if not file.is_file():
            file = file.with_suffix("") / "__init__.py"
        text = file.read_text()
        assert text.count(patch.fragment) == 1
        file.write_text(text.replace(patch.fragment, patch.replacement))


def _ran(root: Path, trial: blame.Trial) -> list[set[harmless.Site]]:
    """Functions that run in a culprit of the job with the bug alone, and those elsewhere."""
    edits = Edits("", tuple(Edit(one.file, one.function, 1) for one in harmless.sites(root)))
    directory = trial.settings.directory.with_name("ran")
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(edits.to_json()))
    settings = dataclasses.replace(trial.settings, directory=directory)
    code, why = apart.ttrace(
        trial.interpreter,
        checking(
            launch_dir() / "pretrain_gpt.py", trial.arguments, trial.ranks, settings, "--once"
        ),
        {**trial.environment, edited.GIVEN: str(file), edited.ROOT: str(root)},
        quiet=True,
    )
    if code != ExitCode.DIVERGED:
        raise TTraceError(f"the bug alone: exit code {code}: {why}")
    changed = api.load_report(directory).summary.changed_code
    functions = changed.functions if changed else ()
    return [
        {harmless.Site(one.file, one.function) for one in functions if one.ran is where}
        for where in (Execution.IN_CULPRIT, Execution.ELSEWHERE)
    ]


def _splices(bad: Path, good: Path) -> list[hunks.Splice]:
    tree = overlay.Tree(bad, Path(), bad / "none.py", is_checkout=False)
    found = overlay.difference(tree, str(good))
    return hunks.difference(found.good, found.bad)


def _key(splice: hunks.Splice) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    return splice.file, splice.removed, splice.added
