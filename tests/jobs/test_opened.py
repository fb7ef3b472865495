# SPDX-License-Identifier: Apache-2.0
"""Files that a reference reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ttrace.jobs import opened

PROGRAM = """
import json, os, pathlib, sys
from megatron_ttrace.jobs import argv, opened
argv.take()
opened.watch()
open("written.txt", "w").close()
names = "conf.json", "written.txt", "/proc/self/stat", ".cache/x", __file__
[open(name).close() for name in names]
sys.audit("open", "of another form")
os.chdir("apart")
open("log").close()
os.close(os.open("../texts/part", os.O_RDONLY))
os.chdir("..")
open("large", "rb").close()
print(json.dumps(opened.files(pathlib.Path.cwd(), [pathlib.Path("apart")])))
"""
"""Reads what counts and what does not."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A job's folder."""
    for folder in ("apart", "texts", ".cache"):
        (tmp_path / folder).mkdir()
    for name in ("conf.json", "apart/log", "texts/part", ".cache/x"):
        (tmp_path / name).write_text("1")
    (tmp_path / "large").write_bytes(bytes(2 << 20))
    for path in tmp_path.rglob("*"):
        os.utime(path, (1, 1))
    return tmp_path


def read(home: Path, role: str) -> dict[str, str]:
    """What a run has read."""
    (home / "train.py").write_text(PROGRAM)
    words = [sys.executable, "train.py", "--ttrace-role", role]
    path = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(words, cwd=home, env=path, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_what_a_reference_has_read(home: Path) -> None:
    """Files as they were before it, of which one changes, or is gone."""
    assert read(home, "candidate") == {}
    files = read(home, "reference")
    assert sorted(files) == ["conf.json", "large", "texts/part"]
    assert not opened.changed(files, home, absent=True)
    for name in files:
        (home / name).rename(home / "kept")
        assert opened.changed(files, home, absent=True) == name
        assert not opened.changed(files, home, absent=False)
        (home / name).write_text("2")
        assert opened.changed(files, home, absent=False) == name
        (home / "kept").rename(home / name)
