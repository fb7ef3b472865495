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


def test_a_full_disk(tmp_path: Path) -> None:
    """Refused in one line if a quarter of a trace's room is missing, not if a quarter is left."""
    ttrace(*CHECK, "--", SCRIPT, *TINY, cwd=tmp_path, code=0)
    out, script = tmp_path / "ttrace-out", tmp_path / "train.py"
    taken = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
    shutil.rmtree(out)
    script.write_text(FULL.format(free=int(0.75 * taken), script=str(SCRIPT)))
    done = ttrace(*CHECK, "--", script, *TINY, cwd=tmp_path, code=2)
    said = done.stdout + done.stderr
    assert "Traceback" not in said
    assert any("the reference needs about" in line for line in our_lines(said)), said
    assert not [*out.glob("reference/*"), *out.glob(".reference.building*")]
    shutil.rmtree(out)
    script.write_text(FULL.format(free=int(1.25 * taken), script=str(SCRIPT)))
    ttrace(*CHECK, "--", script, *TINY, cwd=tmp_path, code=0)
