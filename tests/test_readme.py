# SPDX-License-Identifier: Apache-2.0
"""The README's commands do what it says."""

from pathlib import Path

import pytest

from tests import documents

BLOCKS = [block for block in documents.blocks("README.md") if not block.excuse]


def test_the_readme_has_commands() -> None:
    """The markers are still there, and none is forgotten."""
    assert len(BLOCKS) >= 2
    assert not [block.text for block in BLOCKS if block.unmarked]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: " ".join(block.text.split()[:2]))
def test_commands_of_the_readme(tmp_path: Path, block: documents.Block) -> None:
    """Each marked block runs, as it stands, in a checkout."""
    documents.check(block, tmp_path)
