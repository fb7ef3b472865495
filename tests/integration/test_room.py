# SPDX-License-Identifier: Apache-2.0
"""Room on disk: what is refused for lack of it, and what stays after a check."""

import shutil
from pathlib import Path

import pytest

from megatron_ttrace.trace import cleaning
from tests.integration.jobs import SCRIPT, TINY, our_lines, ttrace

pytestmark = pytest.mark.slow
FULL = """
import shutil
usage = shutil.disk_usage
shutil.disk_usage = lambda path: usage(path)._replace(free={free})
exec(compile(open({script!r}).read(), {script!r}, "exec"))
"""
CHECK = "check", "--nproc-per-node", 1, "--ttrace-no-wandb", "--ttrace-seeds", 1


def cleaned(home: Path) -> dict[Path, int]:
    """The bytes of a check's files of tensors; ``ttrace clean`` removes all of it."""
    out = home / "ttrace-out"
    assert (out / "report.html").exists()
    sizes = {path: path.stat().st_size for path in out.rglob("*.safetensors")}
    [left] = cleaning.find(home)
    assert cleaning.remove(left)
    assert not out.exists(), list(out.rglob("*"))
    return sizes


def test_reports_stay(tmp_path: Path) -> None:
    """Always; tensors only if they are to."""
    ttrace(*CHECK, "--ttrace-keep", "none", "--", SCRIPT, *TINY, cwd=tmp_path, code=0)
    assert cleaned(tmp_path) == {}


def test_a_full_disk(tmp_path: Path) -> None:
    """Refused in one line if a quarter of a trace's room is missing, not if a quarter is left."""
    ttrace(*CHECK, "--ttrace-keep", "all", "--", SCRIPT, *TINY, cwd=tmp_path, code=0)
    out, script = tmp_path / "ttrace-out", tmp_path / "train.py"
    sizes = cleaned(tmp_path)
    assert {path.parent for path in sizes} == {out / "reference", out / "candidate"}
    taken = sum(size for path, size in sizes.items() if path.parent.name == "reference")
    script.write_text(FULL.format(free=int(0.75 * taken), script=str(SCRIPT)))
    done = ttrace(*CHECK, "--", script, *TINY, cwd=tmp_path, code=2)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert any("the reference needs about" in line for line in our_lines(said)), said
    assert not [*out.glob("reference/*"), *out.glob(".reference.building*")]
    shutil.rmtree(out)
    script.write_text(FULL.format(free=int(1.25 * taken), script=str(SCRIPT)))
    ttrace(*CHECK, "--", script, *TINY, cwd=tmp_path, code=0)
