# SPDX-License-Identifier: Apache-2.0
"""What is recorded of a run."""

from pathlib import Path

import pytest

from megatron_ttrace.jobs import provenance
from megatron_ttrace.trace.errors import TTraceError


def test_a_script_that_changes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative directory is then another one, and meant is the one where the run began."""
    monkeypatch.setattr(provenance, "_folder", [tmp_path])
    monkeypatch.chdir(tmp_path)
    provenance.require_place(Path("out"))
    assert provenance.placed(Path("out")) == Path("out")
    (tmp_path / "scratch").mkdir()
    monkeypatch.chdir("scratch")
    assert provenance.placed(Path("out")) == tmp_path / "out"
    provenance.require_place(tmp_path / "out")
    with pytest.raises(TTraceError, match=f"changed its working directory to {tmp_path}/scratch: "):
        provenance.require_place(Path("out"))
