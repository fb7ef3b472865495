# SPDX-License-Identifier: Apache-2.0
"""The loads by which biases of routers are updated."""

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from megatron_ttrace.capture.loads import watched
from megatron_ttrace.mcore.balancing import loads
from megatron_ttrace.mcore.names import canonical_names


class Router(nn.Module):
    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(2))
        self.frozen_expert_bias = frozen


@pytest.fixture
def megatron(monkeypatch):
    """A module of Megatron with the function that updates biases."""

    def get_updated_expert_bias(tokens_per_expert, expert_bias, rate):
        tokens_per_expert *= 2  # the sum over two ranks
        mean = tokens_per_expert.mean(dim=-1, keepdim=True)
        return expert_bias + torch.sign(mean - tokens_per_expert) * rate

    module = ModuleType("megatron.updates")
    module.get_updated_expert_bias = get_updated_expert_bias
    monkeypatch.setitem(sys.modules, "megatron.updates", module)
    return module


def run(module, model, tokens, attempt=lambda work: work()):
    """What is handed over, and the new biases."""
    taken = {}
    biases = torch.zeros(len(tokens), 2)
    with watched([canonical_names(model)], attempt, taken.__setitem__):
        new = module.get_updated_expert_bias(
            tokens_per_expert=torch.tensor(tokens), expert_bias=biases, rate=0.5
        )
    return {name: load.tolist() for name, load in taken.items()}, new.tolist()


def test_loads_are_relative(megatron):
    """Each router's loads have its bias's name; the multiple that the ranks' sum is drops out."""
    model = nn.Sequential(Router(), Router(frozen=True), Router())
    original = megatron.get_updated_expert_bias
    found, biases = run(megatron, model, [[30.0, 10.0], [0.0, 0.0]])
    assert found == {"0.expert_bias": [1.5, 0.5], "2.expert_bias": [0.0, 0.0]}
    assert biases == [[-0.5, 0.5], [0.0, 0.0]]
    assert megatron.get_updated_expert_bias is original


def test_other_routers_are_missing(megatron):
    """If Megatron updates other biases than it should, none is named wrongly."""
    assert run(megatron, nn.Sequential(Router(), Router()), [[30.0, 10.0]])[0] == {}


def test_an_error_of_ours_leaves_the_update(megatron):
    """What is returned is Megatron's own result, whatever becomes of the work of ours."""
    given = run(megatron, nn.Sequential(Router()), [[30.0, 10.0]], attempt=lambda work: None)
    assert given == ({}, [[-0.5, 0.5]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_loads_are_as_exact_as_the_counts(dtype):
    """What was counted in bf16 is known to its eight bits only."""
    found = loads(torch.tensor([[301, 101]]).to(dtype))
    assert found.dtype == (torch.float32 if dtype is torch.int64 else dtype)
    exact = torch.tensor([[301 / 201, 101 / 201]])
    assert torch.allclose(found.float(), exact, rtol=2 * torch.finfo(found.dtype).eps)
