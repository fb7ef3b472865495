# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a run."""

from pathlib import Path

import pytest

from megatron_ttrace.jobs import provenance


def test_a_script_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory is then another one, and meant is the one where the run began."""
    monkeypatch.setattr(provenance, "_folder", [tmp_path])
    monkeypatch.chdir(tmp_path)
    assert provenance.placed(Path("out")) == Path("out")
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir("scratch")
    assert provenance.placed(Path("out")) == tmp_path / "out"
    assert provenance.placed(tmp_path / "out") == tmp_path / "out"
    assert provenance.shown(tmp_path / "out") == Path("out")
    assert provenance.shown(Path("/elsewhere")) == Path("/elsewhere")
