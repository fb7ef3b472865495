# SPDX-License-Identifier: Apache-2.0
"""Two checks at the same time, one of a faulty job: each has its own answer or none."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.jobs import SCRIPT, TINY, environment

TENSOR_PARALLEL = ("--tensor-model-parallel-size", "2")
BUG = "--ttrace-bug=01"


def start(out: Path, *flags: str, **more: str) -> subprocess.Popen[str]:
    """A check of a small job with two ranks."""
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "megatron_ttrace", "check", "--nproc-per-node", "2"),
            *("--ttrace-no-wandb", "--ttrace-dir", str(out), *flags),
            *("--", str(SCRIPT), *TINY, *TENSOR_PARALLEL),
        ],
        cwd=out.parent,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code and output."""
    out, error = process.communicate(timeout=280)
    return process.returncode, out, error


def verdict(out: Path) -> str:
    """The answer in a directory."""
    return str(json.loads((out / "summary.json").read_text())["verdict"])


@pytest.mark.nightly
def test_one_directory(tmp_path: Path) -> None:
    """The second check is refused at once; the first, faulty one ends as it would alone."""
    out = tmp_path / "out"
    first = start(out, BUG)
    while not (out / "logs").exists():
        assert first.poll() is None, end(first)
        time.sleep(0.05)
    began = time.monotonic()
    code, _, said = end(start(out))
    assert time.monotonic() - began < 30
    assert code == 2
    assert f"{out} is in use by another check (process {first.pid} on" in said
    assert len([line for line in said.splitlines() if line.strip()]) == 1
    code, _, said = end(first)
    assert code == 1, said
    assert verdict(out) == "diverged"


@pytest.mark.nightly
def test_one_cache(tmp_path: Path) -> None:
    """Whoever comes first makes the reference; the faulty job diverges, the other does not."""
    cache = str(tmp_path / "cache")
    healthy, faulty = tmp_path / "healthy", tmp_path / "faulty"
    runs = [start(healthy, TTRACE_CACHE=cache), start(faulty, BUG, TTRACE_CACHE=cache)]
    codes = [end(run)[0] for run in runs]
    assert codes == [0, 1]
    assert (verdict(healthy), verdict(faulty)) == ("equivalent", "diverged")
    entries = [path for path in Path(cache).iterdir() if not path.name.startswith(".")]
    assert len(entries) == 1
    assert {(out / "reference").resolve() for out in (healthy, faulty)} == {entries[0].resolve()}
    assert not list(Path(cache).glob(".*.building-*"))
    made = [
        "making the reference" in (out / "logs" / "rank-00000.log").read_text()
        for out in (healthy, faulty)
    ]
    assert sorted(made) == [False, True]
