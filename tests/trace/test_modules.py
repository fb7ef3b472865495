# SPDX-License-Identifier: Apache-2.0
"""Names of modules say what is in what."""

import pytest

from megatron_ttrace.trace.modules import is_within


@pytest.mark.parametrize(
    ("name", "module", "expected"),
    [
        ("decoder.layers.1.mlp", "decoder.layers.1", True),
        ("decoder.layers.10.mlp", "decoder.layers.1", False),
        ("mlp#1", "mlp", True),
        ("mlp.linear_fc1", "mlp#1", True),
        ("anything", "model", True),
        ("shared#decoder/layers/1", "shared", True),
        ("shared#decoder/layers/1", "decoder.layers.1", True),
        ("shared.norm#decoder/layers/1#2", "decoder.layers.1", True),
        ("shared#decoder/layers/10", "decoder.layers.1", False),
        ("decoder.layers.1", "shared#decoder/layers/1", False),
    ],
)
def test_what_is_within(name: str, module: str, expected: bool) -> None:
    """Also a run of a module elsewhere, which a layer calls."""
    assert is_within(name, module) is expected
