# SPDX-License-Identifier: Apache-2.0
"""Running the parts, each in its own process; and the command, whole, on a tiny selection."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from megatron_ttrace.evaluation.nightly import run as runner
from megatron_ttrace.evaluation.nightly.records import NightPart, State
from megatron_ttrace.evaluation.nightly.run import Options
from megatron_ttrace.evaluation.recipes.collect import Answer
from megatron_ttrace.evaluation.recipes.run import RESULTS, JobRow
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import ExitCode
from tests import programs
from tests.evaluation.nightly.synthetic import bug_row, matrix_row


def play(monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Let a part's process run a Python program instead of the command it would run.

    A program finds the file for its results in ``results``, its directory in ``directory``.
    """
    real = runner.subprocess.Popen

    def start(command: list[str], **more: object) -> object:
        if "megatron_ttrace" not in command:
            return real(command, **more)
        words = command[command.index("megatron_ttrace") + 1 :]
        results = [words[n + 1] for n, word in enumerate(words) if word in ("--rows", "--json")]
        work = words[words.index("--directory") + 1]
        program = f"results = {results[-1:]!r}\ndirectory = {work!r}\n{programs[words[0]]}"
        return real([sys.executable, "-c", program], **more)

    monkeypatch.setattr(runner.subprocess, "Popen", start)


def rows_program(rows: list[dict], code: int = 0, more: str = "") -> str:
    text = "\n".join([*map(json.dumps, rows), more])
    return f"open(results[0], 'w').write({text!r}); exit({code})"


MATRIX = f"print({json.dumps(matrix_row())!r})"
RECIPE = dataclasses.asdict(JobRow(key="1a2b", answer=Answer.EQUIVALENT, ranks=2))
RECIPES = (
    "import os; os.makedirs(directory, exist_ok=True); "
    f"open(directory + '/{RESULTS}', 'a').write({json.dumps(RECIPE)!r})"
)


def test_a_whole_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parts and their cases."""
    play(monkeypatch, bugs=rows_program([bug_row()]), matrix=MATRIX, recipes=RECIPES, hunt=RECIPES)
    night = runner.run(Options(recipes=tmp_path, hunt=1.0), tmp_path, lambda line: None)
    assert [(case.part, case.state) for case in night.cases] == [
        (part, State.GOOD) for part in NightPart
    ]
    assert night.exit_code == ExitCode.EQUIVALENT
    assert night.gaps == ()
    assert night.versions["torch"]


MISSED = bug_row(met=False, detected=False, problem="found equivalent")
ERROR = (
    "from megatron_ttrace.trace import ends; ends.begin(); "
    "ends.write(ends.EndRecord(code=2, at=0, message='disk is full')); exit(2)"
)
BROKEN = bug_row(met=False, detected=None, healthy=None, problem="rank 0 failed")


@pytest.mark.parametrize(
    ("program", "states", "reason"),
    [
        # Exit code 2: the cases say why, once.
        (rows_program([MISSED], 2), [State.MISSED], None),
        (rows_program([BROKEN], 2), [State.BROKEN], None),
        # An error ended it: what it did not run is missing, whatever ran before.
        (f"{rows_program([MISSED]).rpartition(';')[0]}; {ERROR}", [State.MISSED], "disk is full"),
        # What was finished counts.
        (rows_program([bug_row()], 3, '{"level": "INFO"}\n{"id": "cut o'), [State.GOOD], "code 3"),
        ("print('ttrace: megatron-core is not installed'); exit(2)", [], "bugs.log"),
        ("import os; os.kill(os.getpid(), 9)", [], "killed by signal 9"),
        ("raise SystemExit(7)", [], "exit code 7"),
        ("pass", [], "it ran nothing"),
    ],
)
def test_a_part_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    program: str,
    states: list[State],
    reason: str | None,
) -> None:
    """The others run; the night says why one is missing, and is not good; old results go first."""
    owned.write(tmp_path / "bugs.jsonl", [json.dumps(bug_row())])
    play(monkeypatch, bugs=program, matrix=MATRIX, recipes=RECIPES, hunt=RECIPES)
    night = runner.run(Options(recipes=tmp_path), tmp_path, lambda line: None)
    assert [case.state for case in night.cases if case.part is NightPart.BUGS] == states
    assert len(night.cases) == len(states) + 3
    assert [gap.part for gap in night.gaps] == [NightPart.BUGS] * (reason is not None)
    assert reason is None or reason in night.gaps[0].reason
    assert night.exit_code == ExitCode.COULD_NOT_CHECK


def test_time_runs_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part is stopped with all its processes, the rest is not begun."""
    pid = tmp_path / "pid"
    program = (
        "import subprocess, time\n"
        "child = subprocess.Popen(['sleep', '3600'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(3600)"
    )
    play(monkeypatch, bugs=program, matrix=MATRIX)
    night = runner.run(Options(seconds=4.0), tmp_path, lambda line: None)
    reasons = {gap.part: gap.reason for gap in night.gaps}
    assert "time limit of the night" in reasons[NightPart.BUGS]
    assert reasons[NightPart.MATRIX] == reasons[NightPart.RECIPES] == "no time was left for it"
    state = Path(f"/proc/{pid.read_text()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


@pytest.mark.nightly
@pytest.mark.parametrize("parts", [["matrix"], ["bugs", "matrix"]])
def test_the_command(tmp_path: Path, parts: list[str]) -> None:
    """Parts for real: kept, and logged offline."""
    out = tmp_path / "out"
    words = ["--quick", "--directory", str(out)]
    words += ["--bug", "11"] if "bugs" in parts else ["--no-bugs"]
    command = ("-W", "ignore", "-m", "megatron_ttrace", "nightly", *words)
    variables = {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    done = programs.python(*command, timeout=840, code=0, **variables)
    assert f"all good: {len(parts)} case" in done.stdout
    assert "offline run" in done.stdout
    lines = [json.loads(line) for line in (out / "nights.jsonl").read_text().splitlines()]
    cases = [line for line in lines if line["part"]]
    assert [(line["part"], line["state"]) for line in cases] == [(part, "good") for part in parts]
    assert cases[-1]["margin"] < 1
    assert len(cases) == 1 or cases[0]["margin"] > 5
