# SPDX-License-Identifier: Apache-2.0
"""Bad input gets one clear line that says what to do, exit code 2, and no traceback."""

import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.integration import jobs
from tests.integration.jobs import SCRIPT, TINY, ttrace


def refused(done, *fragments: str) -> str:
    """The one line of a refusal."""
    told = done.stderr.strip().splitlines()
    lines = [line for line in told if line.startswith("ttrace: ")]
    assert done.returncode == 2, done.stdout[-2000:] + done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert lines, done.stderr[-2000:]
    text = done.stderr[done.stderr.index(lines[-1]) :]
    for fragment in fragments:
        assert fragment in text, text
    return lines[-1]


def check(cwd: Path, *flags: object, nproc: int = 1, job: Sequence[object] = TINY, **more):
    """``ttrace check`` of a tiny job that is refused."""
    return jobs.check(cwd, model=job, flags=flags, nproc=nproc, code=2, **more).done


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a complete reference and a complete candidate of the tiny job."""
    home = tmp_path_factory.mktemp("traced")
    return jobs.check(home, flags=("--ttrace-save-candidate",), nproc=1).out


def test_data_that_do_not_exist(tmp_path: Path) -> None:
    """The exception that ended the job, where it was raised, and nothing that Python ignored."""
    job = [word for word in TINY if word != "--mock-data"]
    done = check(tmp_path, job=[*job, "--data-path", "/no/such/text"])
    line = refused(done, ".idx and .bin files cannot be found")
    assert ", at megatron/core/datasets/" in line
    assert done.stderr.count("cannot be found") == 1


@pytest.mark.parametrize(
    ("arguments", "nproc", "words"),
    [
        ("--tensor-model-parallel-size 4", 2, "world size (2) is not divisible by"),
        ("--context-parallel-size 2 --transformer-impl local", 2, "needs --transformer-impl"),
        *(
            pytest.param(*row, marks=pytest.mark.nightly)
            for row in (
                ("--tensor-model-parallel-size 2 --num-attention-heads 3", 2, "rank"),
                ("--expert-model-parallel-size 2 --num-experts 3", 2, "Number of experts should"),
                ("--multi-latent-attention --transformer-impl local", 1, "latent-attention needs"),
                ("--pipeline-model-parallel-size 2 --num-layers 3", 2, "layers should be divisi"),
            )
        ),
    ],
)
def test_what_megatron_or_ttrace_refuses(
    arguments: str, nproc: int, words: str, tmp_path: Path
) -> None:
    """In one line."""
    done = check(tmp_path, nproc=nproc, job=[*TINY, *arguments.split()])
    line = refused(done)
    assert words.lower() in line.lower()


def test_an_unknown_argument(tmp_path: Path) -> None:
    """The parser's complaint is passed on, without the value."""
    done = check(tmp_path, job=[*TINY, "--no-such-flag", "canary 7f3a"])
    refused(done, "unrecognized arguments: --no-such-flag ***")
    logs = [path for path in tmp_path.rglob("*.log") if "canary" in path.read_text()]
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path not in logs]
    assert logs
    assert not [path for path in written if "canary" in path.read_text(errors="replace")]


def test_a_reference_of_another_configuration(traced: Path, tmp_path: Path) -> None:
    """The difference is named."""
    job = [*TINY, "--hidden-size", "64"]
    done = check(tmp_path, "--ttrace-reference", traced / "reference", job=job)
    refused(done, "a different configuration", "hidden_size is 64 here and 32 there")


def test_a_damaged_trace(traced: Path, tmp_path: Path) -> None:
    """It is named; trace/test_store.py has other damage."""
    broken = tmp_path / "reference"
    shutil.copytree((traced / "reference").resolve(), broken)
    os.truncate(next(broken.glob("*.safetensors")), 1000)
    refused(ttrace("compare", broken, traced / "candidate", cwd=tmp_path), "is truncated")


def test_a_reference_run_that_crashes(tmp_path: Path) -> None:
    """Its last lines are shown, and where its log lies."""
    done = check(tmp_path, "--ttrace-reference-args", "--num-attention-heads 5")
    refused(done, "the reference run failed", "reference.log")


def test_a_rank_that_dies(tmp_path: Path) -> None:
    """A killed rank ends the job; its signal and its log are named."""
    script = tmp_path / "dying.py"
    script.write_text(
        "import os, runpy, signal\n"
        "if os.environ['RANK'] == '1': os.kill(os.getpid(), signal.SIGKILL)\n"
        f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
    )
    done = check(tmp_path, nproc=2, script=script)
    refused(done, "rank 1 was killed by signal 9", "rank-00001.log")
    assert signal.SIGKILL == 9


def test_an_unsupported_megatron(tmp_path: Path) -> None:
    """A release whose internals were never tried is refused by name."""
    patch = "import megatron_ttrace.mcore.versions as v\nv.megatron_core_version = lambda: '0.16.1'"
    (tmp_path / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join([str(tmp_path), str(SCRIPT.parents[1])])
    done = check(tmp_path, PYTHONPATH=path, cold=True)
    refused(done, "megatron-core 0.16.1 is not supported", "0.19.2")


def test_one_rank_against_one_rank_is_told(traced: Path) -> None:
    """Equivalent, but not of anything parallel; the summary counts it, offline as well."""
    told = {"what": "one_rank", "value": 1.0, "limit": None, "names": []}
    assert told in json.loads((traced / "summary.json").read_text())["not_exercised"]
    done = ttrace("compare", traced / "reference", traced / "candidate", cwd=traced, code=0)
    assert "not exercised: parallelism (one rank" in done.stdout
    assert told in json.loads((traced / "summary.json").read_text())["not_exercised"]


def test_without_exit_a_failed_check_lets_training_go_on(tmp_path: Path) -> None:
    """Tracing fails open, loudly: the reference crashes, the run trains to its end."""
    words = ("--ttrace-reference-args", "--num-attention-heads 5")
    done = jobs.train(tmp_path, "--ttrace", "--ttrace-no-wandb", *words, nproc=1)
    assert "training goes on, UNCHECKED" in done.stderr
    assert "iteration        3/" in done.stdout
