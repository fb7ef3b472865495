# SPDX-License-Identifier: Apache-2.0
"""The table of models has all scripts, each of which is shrunk to a job of few ranks."""

import os

import pytest

from megatron_ttrace.jobs.commands import shell_script
from megatron_ttrace.jobs.commands.command_line import ShellScript
from megatron_ttrace.jobs.shrink import plan
from tests.assay.models import SCRIPTS, header_of, row_of

FILES = sorted(SCRIPTS.glob("*.sh"))
PAGE = SCRIPTS.parents[1] / "docs" / "models.md"


def test_the_page():
    """A row for each script, and none for others; a known fault is named."""
    rows = [line for line in PAGE.read_text().splitlines() if "launch/models/" in line]
    rows = [row for row in rows if row.startswith("| ")]
    assert [row.rsplit("`", 2)[1] for row in rows] == [f"launch/models/{f.name}" for f in FILES]
    for row, file in zip(rows, FILES, strict=True):
        assert row.split(" | ")[:3] == row_of(file, {}).split(" | ")[:3]


@pytest.mark.parametrize("script", FILES, ids=lambda file: file.stem)
def test_a_script(script):
    """It can be executed, starts the GPUs that it says, and is shrunk."""
    assert os.access(script, os.X_OK)
    command = shell_script.resolve(ShellScript((str(script),)))
    assert command.ranks == int(header_of(script)["gpus"])
    assert all(job.axes.ranks <= 8 for job in plan.shrink(command).jobs)


def test_answers():
    """Of Megatron-LM by the script's name, of Bridge by the recipe's."""
    script = SCRIPTS / "llama31-8b.sh"
    recipe = header_of(script)["source"].removeprefix("Megatron-Bridge's ")
    row = row_of(
        script,
        {
            script.name: {"answer": "equivalent", "finding": ""},
            recipe: {"answer": "diverged", "finding": "a fault"},
        },
    )
    assert "| equivalent | finding: a fault |" in row
