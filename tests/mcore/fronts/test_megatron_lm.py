# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's loop."""

from types import SimpleNamespace

from megatron_ttrace.mcore.fronts import megatron_lm


def test_a_script_without_a_log():
    """A Megatron without this function logs nothing, which is not an error."""
    assert megatron_lm._log_of(SimpleNamespace()) is None
