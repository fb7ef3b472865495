# SPDX-License-Identifier: Apache-2.0
"""What names of functions say."""

import pytest

from megatron_ttrace.diagnose.words import communicates, loss_of, tokens
from megatron_ttrace.trace.collectives import Function
from megatron_ttrace.trace.findings import Loss


def test_tokens() -> None:
    """Words in both spellings; numbers are none."""
    assert tokens("_AllToAll.forward_2d") == ("all", "to", "all", "forward", "d")


@pytest.mark.parametrize(
    ("name", "sends"),
    [
        ("all_to_all_sp2hp", True),
        ("_AllToAll.forward", True),
        ("gather_heads", True),
        ("all", False),
    ],
)
def test_communicates(name: str, sends: bool) -> None:
    """By any word for it."""
    assert communicates(Function("m.py", 1, name)) is sends


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("Router._apply_seq_aux_loss", Loss.SEQUENCE),
        ("Router._apply_aux_loss", Loss.AUXILIARY),
        ("z_loss_func", Loss.Z),
        ("loss_func", None),
    ],
)
def test_loss_of(name: str, loss: Loss | None) -> None:
    """The loss with most of its words in the name."""
    assert loss_of(Function("m.py", 1, name)) is loss
