# SPDX-License-Identifier: Apache-2.0
"""Which release is emulated."""

from megatron_ttrace.cpu.te.releases import PINNED, current
from megatron_ttrace.mcore.versions import KNOWN, megatron_core_version, series


def test_every_supported_megatron_has_its_release():
    """The releases that are emulated are those that a supported Megatron is built with."""
    assert {*PINNED} == {series(version) for version in KNOWN}


def test_the_installed_megatron_chooses():
    """The emulation calls itself what the Megatron was built with."""
    assert current() == PINNED[series(megatron_core_version())]
