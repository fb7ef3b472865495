# SPDX-License-Identifier: Apache-2.0
"""The scripts that start a night, with a stand-in for ``ttrace``."""

import fcntl
import os
import subprocess
from pathlib import Path

import pytest

from tests import programs

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "launch" / "nightly.sh"
SLURM = SCRIPT.with_suffix(".slurm")


def program(path: Path, body: str) -> Path:
    return programs.executable(path, f"#!/usr/bin/env bash\n{body}\n")


def night(tmp_path: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {"TTRACE_NIGHTLY_DIR": str(tmp_path / "out"), **environment}
    return programs.run(SCRIPT, *words, cwd=tmp_path, timeout=600, **variables)


@pytest.mark.parametrize("code", [0, 1, 2])
def test_arguments_go_in_and_the_exit_code_comes_out(tmp_path: Path, code: int) -> None:
    fake = program(tmp_path / "ttrace", f'echo "$PWD|$OMP_NUM_THREADS|$*"; exit {code}')
    done = night(tmp_path, "--matrix", "tp2 *", TTRACE=str(fake), OMP_NUM_THREADS="1")
    assert done.returncode == code, done.stderr
    assert done.stdout == f"{ROOT}|1|eval nightly --directory {tmp_path / 'out'} --matrix tp2 *\n"


def test_the_active_environment_is_used(tmp_path: Path) -> None:
    program(tmp_path / "bin" / "ttrace", "echo mine")
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = night(tmp_path, PATH=path, VIRTUAL_ENV=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, "mine\n")


def test_two_nights_at_once(tmp_path: Path) -> None:
    """A second night does not disturb the first, and says so in one line."""
    (tmp_path / "out").mkdir()
    with (tmp_path / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = night(tmp_path, TTRACE="true")
    assert done.returncode == 2
    assert "still running" in done.stderr
    assert night(tmp_path, TTRACE="true").returncode == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = night(tmp_path, TTRACE="true", TTRACE_NIGHTLY_DIR=str(tmp_path / "file" / "out"))
    assert done.returncode == 2
    assert "set TTRACE_NIGHTLY_DIR" in done.stderr


def test_slurm(tmp_path: Path) -> None:
    """The next night is submitted, then this one runs, with time to spare."""
    said = tmp_path / "said"
    sbatch = program(tmp_path / "bin" / "sbatch", f'echo "sbatch $*" >> {said}')
    fake = program(tmp_path / "ttrace", f'echo "$*" >> {said}')
    variables = {
        "PATH": f"{sbatch.parent}:{os.environ['PATH']}",
        "SLURM_SUBMIT_DIR": str(ROOT),
        "TTRACE_NIGHTLY_DIR": str(tmp_path / "out"),
        "TTRACE": str(fake),
    }
    programs.run("bash", SLURM, cwd=tmp_path, timeout=600, **variables, code=0)
    assert said.read_text().splitlines() == [
        "sbatch --begin=tomorrow launch/nightly.slurm",
        f"eval nightly --directory {tmp_path / 'out'} --minutes 150",
    ]


def test_slurm_outside_a_checkout(tmp_path: Path) -> None:
    done = programs.run("bash", SLURM, timeout=600, SLURM_SUBMIT_DIR=str(tmp_path), code=2)
    assert "is not a checkout" in done.stderr


def test_the_workflow_is_well_formed() -> None:
    """Valid YAML, with the steps in an order that keeps the history of a bad night."""
    yaml = pytest.importorskip("yaml")
    workflow = yaml.safe_load((ROOT / "launch" / "nightly-github.yml").read_text())
    steps = workflow["jobs"]["nightly"]["steps"]
    names = [step.get("name") for step in steps]
    assert names.index("Restore the history") < names.index("Run") < names.index("Save the history")
    for step in steps[names.index("Run") + 1 :]:
        assert step["if"] == "always()"
    assert workflow["permissions"] == {"contents": "read"}
