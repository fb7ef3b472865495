# SPDX-License-Identifier: Apache-2.0
"""Faults injected into real runs: a few always, all of them nightly."""

import ast
import os
import signal
from pathlib import Path

import pytest

from tests import programs
from tests.assay import harness
from tests.assay.faults import failures
from tests.assay.faults.actions import signals
from tests.assay.faults.baseline import Baseline
from tests.assay.faults.drawing import choose
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Outcome, Problem, Promise, of_training
from tests.assay.faults.processes import ROOT, Command, Started, Target
from tests.assay.harness import Row
from tests.integration.jobs import python

SEED = 1
CHEAP = ("disk-036", "cache-054", "two-003", "hostile-016", "training-007")
"""Of families, faults that wait for no time-out, cold start or new reference."""
ALWAYS = [
    fault
    for fault in choose(SEED)
    if fault.id in CHEAP
    or (fault.layout == "tp" and fault.action.arguments.get("function") in failures.REPRESENTATIVE)
]


def inject(out: Path, *words: object, timeout: float, cold: bool) -> dict[str, Row]:
    """Run a campaign in a process of its own; its rows by fault.

    Faults of commands that start cold need to know how long such a start takes.
    """
    command = ("-m", "tests.assay", "faults", "--directory", out, *words)
    done = python(*command, cwd=ROOT, timeout=timeout, cold=cold)
    print(done.stdout[-20000:])
    file = out / "rows.jsonl"
    assert file.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return {row.id: row for row in harness.load(file)[1]}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """A few faults of each family, injected."""
    out, ids = tmp_path_factory.mktemp("faults"), [fault.id for fault in ALWAYS]
    return inject(out, "--seed", SEED, "--only", *ids, timeout=1700, cold=False)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", ALWAYS, ids=lambda fault: fault.id)
def test_a_fault(fault: Fault, sample: dict[str, Row]) -> None:
    """The promise holds; what could not be injected here (no mounts) says nothing."""
    row = sample[fault.id]
    if "as promised" not in row.marks:
        pytest.skip("not injected")
    assert row.marks["as promised"], row


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_all_faults(tmp_path: Path) -> None:
    """At least 500 faults, all as promised."""
    rows = inject(tmp_path, "--seed", SEED, timeout=7000, cold=True)
    assert len(rows) == len(choose(SEED))
    broken = [str(row) for row in rows.values() if not row.marks.get("as promised", True)]
    assert not broken, "\n".join(broken)
    assert sum(row.marks["injected"] for row in rows.values()) >= 0.9 * len(rows)


@pytest.mark.parametrize(
    "name", sorted({action.arguments["function"] for action in failures.ACTIONS})
)
def test_functions_that_fail_exist(name: str) -> None:
    """A fault in a function that has another name by now would never happen."""
    file, _, path = name.partition(":")
    if file.startswith("megatron/"):
        return
    tree: ast.AST = ast.parse((ROOT / "megatron_ttrace" / file).read_text())
    for part in path.split("."):
        kinds = (ast.ClassDef, ast.FunctionDef)
        (tree,) = (node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == part)


def test_the_list_is_drawn_by_its_seed() -> None:
    """The same seed draws the same faults, another one others; ids are unique."""
    faults = choose(7)
    assert faults == choose(7)
    assert faults != choose(8)
    assert len({fault.id for fault in faults}) == len(faults) >= 500
    assert {fault.family for fault in faults} == set(Family)
    # tests/integration represents these: test_bad_input.py, test_interrupted.py and test_owned.py.
    others = {Family.FOREIGN, Family.INPUTS, Family.RANKS, Family.SIGNALS}
    assert {fault.family for fault in ALWAYS} == set(Family) - others


def started(folder: Path, program: str, seconds: float) -> Started:
    """Run a few lines of Python as the harness runs a training script."""
    script = folder / "script.py"
    script.write_text(program)
    done = Started(Command(words=(), home=folder, script=script))
    done.wait(seconds)
    return done


@pytest.mark.parametrize(
    ("program", "faulty", "code", "expected"),
    [
        ("", True, 0, {Problem.WRONG_EQUIVALENT}),
        ("raise SystemExit(1)", True, 1, set()),
        ("raise SystemExit(1)", False, 1, {Problem.FALSE_ALARM}),
        ("import sys; print('ttrace: why', file=sys.stderr); sys.exit(2)", True, 2, set()),
        ("raise SystemExit(2)", True, 2, {Problem.NO_LINE}),
        ("raise SystemExit(3)", True, 3, {Problem.EXIT_CODE}),
        ("1 / 0", True, 1, {Problem.TRACEBACK}),
        ("print(chr(27)); raise SystemExit(1)", True, 1, {Problem.CONTROL}),
        ("raise KeyboardInterrupt", True, -2, {Problem.EXIT_CODE, Problem.TRACEBACK}),
        ("import time; time.sleep(60)", False, None, {Problem.HANG}),
    ],
)
def test_what_is_judged(
    program: str, faulty: bool, code: int | None, expected: set[Problem], tmp_path: Path
) -> None:
    """Every broken promise has its name."""
    done = started(tmp_path, program, seconds=20 if code is not None else 0.5)
    assert done.code == code
    action = signals(Target.LAUNCHER, (signal.SIGINT,), 0.5)
    fault = Fault("one", Family.SIGNALS, action, Promise(), faulty)
    experiment = Experiment(fault, Baseline(tmp_path), tmp_path, mounts=False)
    experiment.judge(done, faulty=faulty, report=False)
    experiment.injected = True
    assert {kind for kind, _ in experiment.problems} == expected
    marks = experiment.row().marks
    assert marks == {"injected": True, "as promised": not expected, **dict.fromkeys(expected, True)}
    if code is None:
        os.kill(done.pid, signal.SIGKILL)
        done.wait(20)


ORPHAN = """
import subprocess, sys
from pathlib import Path
from tests.assay.faults.processes import Command, Started, adopt_orphans, bury
adopt_orphans()
folder = Path(sys.argv[1])
script = folder / "script.py"
script.write_text("import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)")
Started(Command(words=(), home=folder, script=script)).wait(20)
print(len(bury(0.3)), len(bury(0)))
"""


def test_an_orphan(tmp_path: Path) -> None:
    """A process that outlives its launcher is found, in whatever session, and ended."""
    done = programs.python("-c", ORPHAN, tmp_path, timeout=600)
    assert done.stdout.split() == ["1", "0"], done.stderr


LOG = "BITS 1 a\nttrace: rank 1 on x, y: z; training goes on, UNCHECKED\n"
ENDS = LOG.replace("training goes on, UNCHECKED", "the job ends")


@pytest.mark.parametrize(
    ("codes", "logs", "outcome", "expected"),
    [
        ([0, 0], [LOG, LOG], Outcome.TRAINS, None),
        ([0, 0], [LOG, "BITS 1 a"], Outcome.TRAINS, Problem.NO_LINE),
        ([0, 0], [LOG, LOG.replace(" a", " b")], Outcome.TRAINS, Problem.HARMED),
        ([0, 0], ["", LOG.replace("z;", "z,")], Outcome.TRAINS, Problem.NO_LINE),
        ([0, 2], [LOG, LOG], Outcome.TRAINS, Problem.HARMED),
        ([0, 0], [LOG, LOG], Outcome.ENDS, Problem.EXIT_CODE),
        ([2, 2], [ENDS, ENDS], Outcome.ENDS, None),
        ([0, -9], ["", ""], Outcome.DIES, Problem.EXIT_CODE),
        ([2, 0], [LOG, LOG], Outcome.EXITS, Problem.EXIT_CODE),
        ([2, 2], ["ttrace ends: rank 1 on x, y: z\n", ""], Outcome.EXITS, None),
    ],
)
def test_how_a_training_is_judged(
    codes: list[int | None], logs: list[str], outcome: Outcome, expected: Problem | None
) -> None:
    """Silence, other numbers, an end that was not promised: each is noticed."""
    problems = of_training(codes, logs, ["BITS 1 a"], outcome, rank=1)
    assert [kind for kind, _ in problems] == ([] if expected is None else [expected])
