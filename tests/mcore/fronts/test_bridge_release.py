# SPDX-License-Identifier: Apache-2.0
"""What a Megatron-Bridge must have."""

from pathlib import Path

import pytest

from megatron_ttrace.mcore.fronts import bridge_release


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with all that is needed, imported or defined."""
    for number, (file, names) in enumerate(bridge_release._NEEDED.items()):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        lines = [
            f"from x import y as {name}" if number % 2 else f"def {name}(): ..." for name in names
        ]
        (tmp_path / file).write_text("\n".join(lines))
    return tmp_path


def test_nothing_is_lacking(package: Path) -> None:
    assert bridge_release.lacking(package) == []


def test_what_is_lacking(package: Path) -> None:
    """A function that was renamed, a file that cannot be read."""
    (package / "training/train.py").write_text("def train_one_step(): ...\nforce_param_sync = 1")
    (package / "data/samplers.py").unlink()
    assert bridge_release.lacking(package) == [
        "training/train.py: train_step",
        "training/train.py: force_param_sync",
        "data/samplers.py: MegatronPretrainingRandomSampler",
    ]


@pytest.mark.bridge
def test_the_installed_release() -> None:
    home = bridge_release.folder()
    assert home is not None
    assert bridge_release.lacking(home) == []
    assert bridge_release.version() in bridge_release.TESTED
