# SPDX-License-Identifier: Apache-2.0
"""Which release is emulated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.cpu import te
from megatron_ttrace.cpu.te import releases
from megatron_ttrace.cpu.te.releases import KNOWN, PINNED, Release, parsed
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.versions import KNOWN as MEGATRONS
from megatron_ttrace.mcore.versions import megatron_core_version
from megatron_ttrace.runtime.entry import exits_on_user_error
from tests.cpu.te import document


def test_every_supported_megatron_has_its_release():
    assert {*PINNED} == {version.rpartition(".")[0] for version in MEGATRONS}
    assert {*PINNED.values()} <= {*KNOWN}
    assert sorted(KNOWN) == list(KNOWN)


def test_the_installed_megatron_chooses(monkeypatch):
    monkeypatch.delenv(releases.VARIABLE, raising=False)
    assert releases.wanted() == PINNED[megatron_core_version().rpartition(".")[0]]


@pytest.mark.parametrize("release", KNOWN, ids=str)
def test_release_is_asked_for_by_its_name(monkeypatch, release):
    monkeypatch.setenv(releases.VARIABLE, f" {release} ")
    assert releases.wanted() == release
    assert parsed(f"{release.major}.{release.minor}") == Release(release.major, release.minor)


@given(st.text())
def test_other_text_is_refused_in_one_line(text):
    if text in {str(known) for known in KNOWN} | {str(k).removesuffix(".0") for k in KNOWN}:
        return
    with pytest.raises(TTraceError, match=r"use one of 2\.3, 2\.4"):
        parsed(text)


def test_unknown_release_is_one_line_and_exit_code_2(monkeypatch, capsys):
    monkeypatch.setenv(releases.VARIABLE, "9")
    with pytest.raises(SystemExit) as end, exits_on_user_error():
        te.install()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("ttrace: TTRACE_TE_VERSION=9 is not a release")


def test_document_has_the_table():
    """``python -m tests.cpu.te.document`` writes it anew."""
    text = document.PATH.read_text(encoding="utf-8")
    assert document.BEGIN in text
    assert document.END in text
    assert text == document.replaced(text)
