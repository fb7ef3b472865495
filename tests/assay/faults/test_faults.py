# SPDX-License-Identifier: Apache-2.0
"""Faults injected into real runs: a few always, all of them nightly."""

import ast
import dataclasses
import json
import os
import signal
from pathlib import Path

import pytest

from tests import programs
from tests.assay.faults import baseline, campaign, failures
from tests.assay.faults.actions import Signal
from tests.assay.faults.baseline import Baseline
from tests.assay.faults.drawing import choose, representative
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Outcome, Problem, Promise, Row, of_training
from tests.assay.faults.processes import ROOT, Command, Started, Stream, Target
from tests.integration.jobs import python

SEED = 1


def inject(
    out: Path, *words: str, seed: int = SEED, timeout: float, cold: bool = True
) -> dict[str, Row]:
    """Run a campaign in a process of its own; its rows by fault.

    Faults of commands that start cold need to know how long such a start takes.
    """
    command = ["-m", "tests.assay.faults.campaign", "--seed", str(seed), "--out", str(out), *words]
    done = python(*command, cwd=ROOT, timeout=timeout, cold=cold)
    print(done.stdout[-20000:])
    file = out / "results.jsonl"
    assert file.is_file(), done.stdout[-3000:] + done.stderr[-3000:]
    return {row.id: row for row in campaign.read(file)}


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Row]:
    """The representative faults, injected."""
    out = tmp_path_factory.mktemp("faults")
    return inject(out, "--representative", timeout=1700, cold=False)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", representative(SEED), ids=lambda fault: fault.id)
def test_a_fault(fault: Fault, sample: dict[str, Row]) -> None:
    """The promise holds; what could not be injected here (no mounts) says nothing."""
    row = sample[fault.id]
    if not row.injected and not row.problems:
        pytest.skip("not injected")
    assert row.kept, f"{row.what}\n{row.codes}\n{row.problems}"


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_all_faults(tmp_path: Path) -> None:
    """At least 500 faults, all as promised; the table is printed, and kept where asked for."""
    kept = os.environ.get("TTRACE_FAULTS_OUT")
    seed = int(os.environ.get("TTRACE_FAULTS_SEED", SEED))
    rows = inject(Path(kept) if kept else tmp_path, seed=seed, timeout=7000)
    assert len(rows) == len(choose(seed))
    broken = [f"{row.id}: {row.what}: {row.problems}" for row in rows.values() if row.problems]
    assert not broken, "\n".join(broken)
    assert sum(row.injected for row in rows.values()) >= 500


@pytest.mark.parametrize("name", sorted({action.function for action in failures.ACTIONS}))
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
    assert {fault.family for fault in faults} == set(Family) - {Family.DAMAGED}


def test_representative_faults_cover_all_families() -> None:
    """At least one of each, but for those that ``tests/integration`` represents.

    ``test_owned.py`` has secrets and foreign files, ``test_pull_request.py`` changes of a fork,
    ``test_bad_input.py`` wrong input.
    """
    others = {Family.SECRETS, Family.FOREIGN, Family.PULLS, Family.INPUTS}
    assert {fault.family for fault in representative(3)} == set(Family) - others - {Family.DAMAGED}


def test_the_table_counts() -> None:
    """Each row counts once in a column, however many problems it has."""
    row = Row("a", Family.DISK, "", True, (0,), (), "", 1.0)
    problems = ((Problem.WRONG_EQUIVALENT, ""), (Problem.SUMMARY, ""), (Problem.NO_LINE, ""))
    bad = dataclasses.replace(row, problems=problems)
    skipped = dataclasses.replace(row, injected=False)
    disk, everything = campaign.table([row, bad, skipped])
    assert disk == {
        "family": "disks and directories",
        "injected": 2,
        "as promised": 1,
        "wrong equivalent": 1,
        "false alarm": 0,
        "harmed": 0,
        "foreign files": 0,
        "secrets": 0,
        "hangs": 0,
        "orphans": 0,
        "said wrongly": 1,
        "not injected": 1,
    }
    assert everything == disk | {"family": "all"}
    assert campaign.markdown([disk]).count("\n") == 3


def started(folder: Path, program: str, *, seconds: float = 20, **more: object) -> Started:
    """Run a few lines of Python as the harness runs a training script."""
    script = folder / "script.py"
    script.write_text(program)
    done = Started(Command(words=(), home=folder, script=script, **more))  # type: ignore[arg-type]
    done.wait(seconds)
    return done


def problems_of(done: Started, folder: Path, *, faulty: bool, promise: Promise) -> set[Problem]:
    """What the harness says of a command that ended."""
    action = Signal(Target.LAUNCHER, (signal.SIGINT,), 0.5)
    fault = Fault("one", Family.SIGNALS, action, promise, faulty)
    one = Experiment(fault, Baseline(folder), folder, mounts=False)
    one.judge(done, faulty=faulty, report=False)
    return {kind for kind, _ in one.problems}


@pytest.mark.parametrize(
    ("program", "code", "expected"),
    [
        ("", 0, {Problem.WRONG_EQUIVALENT}),
        ("raise SystemExit(1)", 1, set()),
        ("import sys; sys.exit('ttrace: no')", 1, set()),
        ("import sys; print('ttrace: why', file=sys.stderr); sys.exit(2)", 2, set()),
        ("raise SystemExit(2)", 2, {Problem.NO_LINE}),
        ("raise SystemExit(3)", 3, {Problem.EXIT_CODE}),
        ("1 / 0", 1, {Problem.TRACEBACK}),
        ("print(chr(27)); raise SystemExit(1)", 1, {Problem.CONTROL}),
        ("raise KeyboardInterrupt", -2, {Problem.EXIT_CODE, Problem.TRACEBACK}),
    ],
)
def test_what_is_judged(program: str, code: int, expected: set[Problem], tmp_path: Path) -> None:
    """Every broken promise has its name."""
    done = started(tmp_path, program)
    assert done.code == code
    assert problems_of(done, tmp_path, faulty=True, promise=Promise()) == expected


def test_a_healthy_candidate_that_diverges(tmp_path: Path) -> None:
    """Exit code 1 is as wrong for a healthy candidate as 0 for a faulty one."""
    done = started(tmp_path, "raise SystemExit(1)")
    found = problems_of(done, tmp_path, faulty=False, promise=Promise())
    assert found == {Problem.FALSE_ALARM}


def test_a_hang(tmp_path: Path) -> None:
    """What does not end is said to hang."""
    done = started(tmp_path, "import time; time.sleep(60)", seconds=0.5)
    assert problems_of(done, tmp_path, faulty=False, promise=Promise()) == {Problem.HANG}
    os.kill(done.pid, signal.SIGKILL)
    done.wait(20)


def test_streams(tmp_path: Path) -> None:
    """A full output is an error of its own, as with any Python program."""
    assert started(tmp_path, "print('x')", stdout=Stream.FULL).code == 120
    assert started(tmp_path, "print('x')", stdout=Stream.CLOSED).code == 0


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


def test_rows_come_back(tmp_path: Path) -> None:
    """What is written can be read."""
    row = Row("a", Family.TWO, "what", True, (0, None), ((Problem.HANG, "x"),), "said", 1.5)
    file = tmp_path / "results.jsonl"
    file.write_text(json.dumps(dataclasses.asdict(row)) + "\n")
    assert campaign.read(file) == [row]


def test_the_job_is_small() -> None:
    """Two ranks: fewer have nobody to wait for, more have no core to run on."""
    assert baseline.NPROC == 2


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
    ],
)
def test_how_a_training_is_judged(
    codes: list[int | None], logs: list[str], outcome: Outcome, expected: Problem | None
) -> None:
    """Silence, other numbers, an end that was not promised: each is noticed."""
    problems = of_training(codes, logs, ["BITS 1 a"], outcome, rank=1)
    assert [kind for kind, _ in problems] == ([] if expected is None else [expected])
