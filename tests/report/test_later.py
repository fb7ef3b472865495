# SPDX-License-Identifier: Apache-2.0
"""Pages that a process makes from the files of a verdict, beside a job that trains on."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ttrace.report import later, publish
from megatron_ttrace.trace import files, owned
from tests.report.expected import Check

JOB = """
import os, signal, sys
from pathlib import Path
from megatron_ttrace.report import later
later.start(Path(sys.argv[1]), html=True, wandb=False, online=False)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_verdict_comes_first(diverged: Check, tmp_path: Path) -> None:
    """Files of the verdict at once; no page, and none of an earlier check."""
    page = tmp_path / files.HTML
    owned.write(page, ["of an earlier check"])
    publish(*diverged, tmp_path, wandb=False, run_id="a" * 16, pages=False)
    assert files.load_report(tmp_path) == diverged
    assert not page.exists()
    later.start(tmp_path, html=False, wandb=False, online=False)
    assert not page.exists()


@pytest.mark.parametrize("ending", ["ends", "killed"])
def test_the_page_is_made_however_the_job_ends(
    diverged: Check, tmp_path: Path, ending: str
) -> None:
    """The same page as without a process; a job that ends waits for it."""
    for name in ("here", "there"):
        publish(*diverged, tmp_path / name, wandb=False, run_id="a" * 16, pages=name == "here")
    page = tmp_path / "there" / files.HTML
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(tmp_path / "there"), ending],
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=False,
    )
    if ending == "ends":
        assert done.returncode == 0
        assert done.stdout.endswith("report.html\n")
    deadline = time.monotonic() + 60
    while not page.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert page.read_text() == (tmp_path / "here" / files.HTML).read_text()


def test_a_report_that_cannot_be_read_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The training job must not see a traceback of ours in its log."""
    monkeypatch.setattr(later.os, "nice", lambda _: 0)
    monkeypatch.setattr(later.signal, "alarm", lambda _: 0)
    later.main([str(tmp_path), "html"])
    printed = capsys.readouterr().out
    assert printed.startswith("ttrace: WARNING: the report was left out: ")
    assert printed.count("\n") == 1
