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


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    """One line, exit code 2, no traceback, and nothing of the reference is left."""
    script = tmp_path / "train.py"
    script.write_text(FULL.format(free=10_000, script=str(SCRIPT)))
    done = ttrace(*CHECK, "--", script, *TINY, cwd=tmp_path, code=2)
    assert "Traceback" not in done.stdout + done.stderr
    said = [line for line in our_lines(done.stdout + done.stderr) if "10 kB free" in line]
    assert said, done.stdout + done.stderr
    assert "the reference needs about" in said[0]
    assert not list(tmp_path.glob("ttrace-out/reference/*"))
    assert not list(tmp_path.glob("ttrace-out/.reference.building*"))


@pytest.mark.parametrize("keep", ["none", "all"])
def test_what_stays(tmp_path: Path, keep: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports always; tensors as told. ``ttrace clean`` removes all of it."""
    ttrace(*CHECK, "--ttrace-keep", keep, "--", SCRIPT, *TINY, cwd=tmp_path, code=0)
    out = tmp_path / "ttrace-out"
    assert (out / "report.html").exists()
    tensors = {path.parent.name for path in out.rglob("*.safetensors")}
    assert tensors == ({"reference", "candidate"} if keep == "all" else set())
    [left] = cleaning.find(tmp_path)
    assert cleaning.remove(left)
    assert not out.exists(), list(out.rglob("*"))


def test_the_estimate_is_near(tmp_path: Path) -> None:
    """What the refusal says is what the trace takes, within a quarter."""
    ttrace(*CHECK, "--", SCRIPT, *TINY, cwd=tmp_path, code=0)
    taken = sum(p.stat().st_size for p in (tmp_path / "ttrace-out").rglob("*.safetensors"))
    script = tmp_path / "train.py"
    for share, code in ((0.75, 2), (1.25, 0)):
        shutil.rmtree(tmp_path / "ttrace-out")
        script.write_text(FULL.format(free=int(share * taken), script=str(SCRIPT)))
        ttrace(*CHECK, "--", script, *TINY, cwd=tmp_path, code=code)
