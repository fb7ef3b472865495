# SPDX-License-Identifier: Apache-2.0
"""Which compiled file is used; its numbers are tested in test_measure.py."""

import shutil

import pytest

from megatron_ttrace.compare import native
from megatron_ttrace.trace import compiled


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_it_was_compiled():
    """Where there is a compiler; a build that fails is a warning at installation, and NumPy."""
    assert native.library() is not None


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The module as if it lay in another directory, and asked for the first time."""
    if native.library() is None:
        pytest.skip("no C compiler when this was installed")
    monkeypatch.setattr(compiled, "__file__", str(tmp_path / "trace" / "compiled.py"))
    (tmp_path / "compare").mkdir()
    native.library.cache_clear()
    yield tmp_path
    native.library.cache_clear()


def test_a_wheel_has_no_source(elsewhere):
    assert native.library() is not None


def test_a_file_of_another_source_is_not_used(elsewhere):
    """After an update of a checkout, until it is installed again: its numbers may be others."""
    (elsewhere / "compare" / "sums.c").write_text("another source")
    assert native.library() is None
