# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay blame``: is the known bug blamed among harmless changes?"""

import argparse
import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import os
import shutil
import sys
from pathlib import Path

from megatron_ttrace.cli import command
from megatron_ttrace.evaluation import suites
from megatron_ttrace.evaluation.bugs.catalogue import Bug, load_catalogue
from megatron_ttrace.evaluation.bugs.suite import Variant
from megatron_ttrace.jobs import edited, flags, hunks, overlay
from megatron_ttrace.jobs.processes import apart
from megatron_ttrace.jobs.resources import launch_dir
from megatron_ttrace.jobs.settings import Settings, checking, split
from megatron_ttrace.mcore.sources import megatron_folder
from megatron_ttrace.saved import api, blame
from megatron_ttrace.trace.blamed import Blaming
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.executed import Edit, Edits, Execution
from tests.assay import harmless, harness
from tests.assay.harness import Row

_OURS = "megatron_ttrace."
_VOCABULARY = 60
_NAMED = (Blaming.PROVEN, Blaming.REMOVED, Blaming.ALONE)
_EPILOG = """\
examples:
  python -m tests.assay blame
  python -m tests.assay blame --harmless 200 --seed 2 --only 01 08

Each known bug of Megatron's is put into a copy of the installed Megatron together with harmless
changes, two thirds of them in functions that run in the culprit; ttrace blame has to name hunks of
the bug, and nothing else. (Bugs of TransformerEngine's emulation are not changes to Megatron.)

exit code: 0 if all were blamed exactly, else 2
"""


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``blame`` command."""
    parser = harness.add(
        *(subparsers, "blame", _run),
        summary="count how many known bugs are blamed among harmless changes",
        epilog=_EPILOG,
        seed="of the harmless changes (default 1)",
    )
    parser.add_argument("--harmless", type=flags.integer(0, 1000), default=60, metavar="N")


def _run(args: argparse.Namespace) -> int:
    """Blame each bug, and print a table."""
    bugs = {
        bug.id: bug
        for bug in load_catalogue()
        if not any(patch.module.startswith(_OURS) for patch in bug.patches)
    }
    chosen = [bugs[id] for id in harness.chosen(bugs, args.only)]
    attempt = functools.partial(_attempt, args.directory, args.harmless, args.seed or 1)
    return harness.finish(harness.execute(chosen, attempt, args), {"exact": 1.0})


def _attempt(directory: Path, count: int, seed: int, bug: Bug) -> Row:
    home = directory / bug.id
    shutil.rmtree(home, ignore_errors=True)
    good, changed, bad = home / "good", home / "changed", home / "bad"
    skipped = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(megatron_folder(), good / "megatron", ignore=skipped)
    shutil.copytree(good, bad)
    _patch(bad, bug)
    trial = _trial(bug, directory, bad)
    preferred = _ran(bad, trial)
    shutil.copytree(good, changed)
    kept = [patch.fragment for patch in bug.patches]
    done = harmless.plant(changed, count, seed, preferred, kept)
    shutil.rmtree(bad)
    shutil.copytree(changed, bad)
    _patch(bad, bug)
    # A harmless change that is next to the fault is in one hunk with it.
    fault = _hunks(bad, good) - _hunks(changed, good)
    tree = overlay.Tree.of(launch_dir() / "pretrain_gpt.py")
    assert tree.packages == bad / "megatron", tree
    in_culprit = sum(any(text.startswith(f"{site}:") for site in preferred[0]) for text in done)
    details = {"harmless": len(done), "in the culprit": in_culprit}
    say = command.progress()
    try:
        answer = blame.blame(tree, overlay.difference(tree, str(good)), trial, say).summary.blame
    except TTraceError as error:
        return Row(bug.id, bug.name, {"exact": False}, str(error), details=details)
    if answer is None:
        return Row(bug.id, bug.name, {"exact": False}, "equivalent", details=details)
    named = [hunk for change in answer.changes for hunk in change.hunks]
    blamed = {(hunk.file, hunk.removed, hunk.added) for hunk in named}
    for folder in (good, changed, bad):
        shutil.rmtree(folder)
    exact = answer.result in _NAMED and bool(blamed) and blamed <= fault
    details["changes"] = [f"{hunk.file}:{hunk.line} {hunk.function}" for hunk in named]
    note = (
        f"{answer.result}: {len(blamed)} of the fault's {len(fault)} hunks among {answer.hunks}, "
        f"{answer.checks} checks; {answer.reason}"
    )
    return Row(bug.id, bug.name, {"exact": exact}, note, details=details)


def _trial(bug: Bug, directory: Path, bad: Path) -> blame.Trial:
    """The job of a bug, which imports Megatron from ``bad``."""
    layout = bug.layouts[0]
    words = (
        *Variant(model=layout.models[0]).arguments,
        *_data(layout.data, directory),
        *layout.arguments,
    )
    place = Settings(directory=bad.with_name("blame"))
    settings, others = split([*layout.flags, "--ttrace-device", "cpu"], place)
    assert not others
    os.environ["PYTHONPATH"] = os.pathsep.join([str(bad), *filter(None, sys.path[:1])])
    return blame.Trial(
        interpreter=sys.executable,
        arguments=words,
        ranks=layout.nproc,
        settings=dataclasses.replace(settings, wandb=False),
        environment=dict(os.environ),
    )


def _data(kind: suites.Data, directory: Path) -> tuple[str, ...]:
    """The arguments of a job's data, which Megatron writes: in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
        return tuple(pool.submit(suites.data_arguments, kind, directory, _VOCABULARY).result())


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
    sites = harmless.sites(root)
    edits = Edits("", tuple(Edit(site.file, site.function, 1) for site in sites))
    directory = trial.settings.directory.with_name("ran")
    file = directory.with_suffix(".json")
    file.write_text(json.dumps(edits.to_json()))
    settings = dataclasses.replace(trial.settings, directory=directory)
    script = launch_dir() / "pretrain_gpt.py"
    code, why = apart.ttrace(
        trial.interpreter,
        checking(script, trial.arguments, trial.ranks, settings, "--once"),
        {**trial.environment, edited.GIVEN: str(file), edited.ROOT: str(root)},
        quiet=True,
    )
    if code != ExitCode.DIVERGED:
        raise TTraceError(f"the bug alone: exit code {code}: {why}")
    changed = api.load_report(directory).summary.changed_code
    functions = changed.functions if changed else ()
    return [
        {harmless.Site(f.file, f.function) for f in functions if f.ran is where}
        for where in (Execution.IN_CULPRIT, Execution.ELSEWHERE)
    ]


def _hunks(bad: Path, good: Path) -> set[tuple[str, tuple[str, ...], tuple[str, ...]]]:
    tree = overlay.Tree(bad, Path(), bad / "none.py", is_checkout=False)
    difference = overlay.difference(tree, str(good))
    splices = hunks.difference(difference.good, difference.bad)
    return {(splice.file, splice.removed, splice.added) for splice in splices}
