# SPDX-License-Identifier: Apache-2.0
"""The README's commands work as described."""

from pathlib import Path

import pytest

from tests import documents

BLOCKS = [block for block in documents.blocks("README.md") if not block.excuse]


def test_the_readme_has_commands() -> None:
    """Every block of commands has a marker."""
    assert len(BLOCKS) >= 2
    assert not [block.text for block in BLOCKS if block.unmarked]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: " ".join(block.text.split()[:2]))
def test_commands_of_the_readme(tmp_path: Path, block: documents.Block) -> None:
    """Each marked block runs unchanged in a checkout."""
    documents.check(block, tmp_path)
