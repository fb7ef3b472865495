# SPDX-License-Identifier: Apache-2.0
"""The README's commands do what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.jobs import ROOT, environment

BLOCKS = re.findall(
    r"<!-- tested -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL
)


def test_the_readme_has_commands() -> None:
    """The marker is still there."""
    assert len(BLOCKS) >= 2


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1])
def test_commands_of_the_readme(tmp_path: Path, block: str) -> None:
    """Each marked block runs, as it stands, in a checkout."""
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    command = block.replace("ttrace ", f"{sys.executable} -m megatron_ttrace ", 1)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path,
        env=environment(WANDB_MODE="offline"),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


def test_links_of_the_readme_lead_somewhere() -> None:
    """Every relative link names a file of this repository."""
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert links
    assert not [link for link in links if not os.path.exists(ROOT / link)]
