# SPDX-License-Identifier: Apache-2.0
"""What a comparison knows of the job."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ttrace.compare import routing
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.run import comparison
from megatron_ttrace.trace.records import Kind, TraceKey


class MoEAlltoAllTokenDispatcher:
    """Megatron's, by its name."""


class Derived(MoEAlltoAllTokenDispatcher):
    """A fork's, which works as that does."""


class Own:
    """A fork's, which may work in any way."""


@pytest.mark.parametrize(
    ("kinds", "known"),
    [
        ([None], "alltoall"),
        ([None, MoEAlltoAllTokenDispatcher, Derived], "alltoall"),
        ([MoEAlltoAllTokenDispatcher, Own], "Own"),
    ],
)
def test_a_forks_own_dispatcher(kinds: list[type | None], known: str) -> None:
    """Its class is known, not what the option would stand for in Megatron."""
    layers: Any = [torch.nn.Identity() for _ in kinds]
    for layer, kind in zip(layers, kinds, strict=True):
        if kind is not None:
            layer.token_dispatcher = kind()
    names = canonical_names(torch.nn.Sequential(*layers))
    args: Any = SimpleNamespace(num_experts=4, moe_token_dispatcher_type="alltoall")
    assert comparison.dispatcher([names], args) == known
    assert comparison.dispatcher([names], SimpleNamespace(num_experts=None)) == ""


def test_a_forks_own_experts() -> None:
    """A list without a dispatcher: how tokens reach these is not known either."""
    layer = torch.nn.ModuleDict({"experts": torch.nn.ModuleList([torch.nn.Identity()])})
    names = canonical_names(torch.nn.ModuleDict({"mlp": layer}))
    args: Any = SimpleNamespace(num_experts=4, moe_token_dispatcher_type="alltoall")
    assert comparison.dispatcher([names], args) == "ModuleList"


def test_routers_whose_choice_is_not_seen() -> None:
    """Their experts get tokens, and nothing asked which."""
    seen = ["decoder.layers.0.mlp.router", "decoder.layers.2.mlp.router"]
    keys = [TraceKey(1, 0, Kind.ROUTING, name, 1) for name in seen]
    keys += [TraceKey(1, 0, Kind.ROUTING, f"decoder.layers.{n}.mlp.experts") for n in range(4)]
    assert routing.unseen(keys) == ["decoder.layers.1.mlp.router", "decoder.layers.3.mlp.router"]
