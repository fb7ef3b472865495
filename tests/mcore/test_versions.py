# SPDX-License-Identifier: Apache-2.0
"""The version of a Megatron is read from its file; Megatron takes seconds to import."""

import subprocess
import sys

import pytest

from megatron_ttrace.mcore import versions

INFO = "MAJOR = 0\nMINOR = 20\nPATCH = 1\nPRE_RELEASE = {}\nVERSION = (MAJOR, MINOR)\n"


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (INFO.format("''"), "0.20.1"),
        (INFO.format('"rc0"'), "0.20.1rc0"),
        (INFO.replace("PRE_RELEASE = {}\n", ""), "0.20.1"),
        ("MAJOR = 0\nMINOR = 20\n", ""),
        ("", ""),
    ],
)
def test_a_version_is_read(text, version):
    assert versions.version_in(text) == version


def test_it_is_what_megatron_says():
    """Without what it appends of a git repository; and it is not imported for that."""
    program = "from megatron_ttrace.mcore import versions; print(versions.megatron_core_version())"
    program += "; import sys; print('megatron.core' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    from megatron.core.package_info import __version__

    assert process.stdout.split() == [__version__.partition("+")[0], "False"]


def test_without_megatron(monkeypatch):
    monkeypatch.delitem(sys.modules, "megatron.core", raising=False)
    monkeypatch.setattr(versions.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError):
        versions.megatron_core_version()
