# SPDX-License-Identifier: Apache-2.0
"""``make gpu`` without a GPU: the environment, the commands of all tests, the lines they leave."""

import dataclasses
import json
import os
import sys
import zipfile

import pytest

from tests import programs
from tests.gpu import run
from tests.gpu.tests_of_make import TESTS, Context
from tests.integration.jobs import ROOT

HERE = ("doctor", "kernel", "kernel-speed", "side-streams")
TRAINING = [test for test in TESTS if test.name not in HERE]


@pytest.mark.parametrize("test", TRAINING, ids=lambda test: test.name)
def test_every_command_is_built(test, tmp_path):
    """By a dry run, with local layers and with TransformerEngine's."""
    for te in test.stages:
        context = Context(tmp_path, dry=True, trains=False, te=te)
        is_absent = test.name in ("cp2", "tp2-sp", "bug-11") and not te
        assert run.alone(test, context)["result"] == ("not available" if is_absent else "dry")
        assert is_absent or context.commands
        for command in context.commands:
            scripts = [word for word in command if word.endswith(".py")]
            assert all(os.path.exists(word) for word in scripts)


def wheel(folder, name):
    """A package that says its name."""
    folder.mkdir()
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as file:
        about = f"{name}-1.0.dist-info"
        file.writestr(f"{name}.py", f"NAME = {name!r}\n")
        file.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        file.writestr(
            f"{about}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        file.writestr(f"{about}/RECORD", "")


@pytest.fixture
def gpu_sh(tmp_path):
    """The script, with wheels and results of the test's own."""

    def call(*words):
        variables = {
            "PYTHON": sys.executable,
            "WHEELS": str(tmp_path / "wheels"),
            "RESULTS": str(tmp_path / "results"),
            "TMPDIR": str(tmp_path),
        }
        return programs.run(ROOT / "launch" / "gpu.sh", "run", *words, timeout=840, **variables)

    return call


@pytest.mark.nightly
def test_a_dry_run_leaves_its_lines(tmp_path, gpu_sh):
    """The environment is made, tests run in it, and each leaves a line of JSON."""
    wheel(tmp_path / "wheels", "standin_wheel")
    done = gpu_sh("--dry", "--no-training", "--only", "sanitizer")
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "results" / "gpu.jsonl").read_text()
    lines = {line["test"]: line for line in map(json.loads, text.splitlines())}
    assert lines["sanitizer"]["result"] == "dry"
    assert "compute-sanitizer --tool memcheck" in lines["sanitizer"]["commands"][0]
    assert lines["sanitizer"]["megatron"]


def test_bad_input_is_one_line(tmp_path, gpu_sh):
    """A missing folder of wheels."""
    done = gpu_sh("--dry")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        f"ttrace: {tmp_path}/wheels has no wheels: run make gpu-wheels first"
    )


def test_a_test_that_takes_too_long_is_told(tmp_path):
    """It is ended, and the run goes on."""
    [test] = [test for test in TESTS if test.name == "kernel"]
    found = run.apart(dataclasses.replace(test, limit=0), ["--dry"], tmp_path)
    assert found["result"] == "timed out"


def test_a_failure_is_told(tmp_path):
    """With its reason, and the commands so far."""

    def fails(on):
        raise AssertionError("wrong by half")

    found = run.alone(dataclasses.replace(TESTS[0], run=fails), Context(tmp_path, dry=False))
    assert (found["result"], found["note"]) == ("failed", "wrong by half")
