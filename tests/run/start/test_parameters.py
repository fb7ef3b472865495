# SPDX-License-Identifier: Apache-2.0
"""Start values of parameters whose kind is not known."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run.start.parameters import BIAS, agreed, constants_of, fill

CONFIG: Any = SimpleNamespace(num_layers=2, init_method_std=0.02)


@pytest.mark.parametrize("init", ["reveal", "megatron"])
def test_a_temperature_stays_near_what_it_begins_with(init: str) -> None:
    """Its root, say, is a number: with values around zero both runs had none."""
    parameter = torch.nn.Parameter(torch.ones(1000))
    place = ParameterPlace("decoder.layers.0.mlp.temperature", (1000,), ())
    constants = agreed([constants_of([(parameter, place)])])
    fill(place, parameter, SINGLE, seed=3, config=CONFIG, init=init, constants=constants)
    assert 0.0 < parameter.min() <= 1.0 <= parameter.max()
    assert (parameter.std() > 0.1) == (init == "reveal")


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("norm.weight", torch.ones(4)),
        ("fc.bias", torch.ones(4)),
        ("gate", torch.full((4,), BIAS)),
        ("gate", torch.arange(4.0)),
        ("gate", torch.ones(2, 2)),
        ("gate", torch.full((4,), torch.nan)),
        ("gate", torch.ones(0)),
    ],
)
def test_others_have_values_of_their_kind(name: str, values: torch.Tensor) -> None:
    """Weights and biases by their names, small numbers, different ones, matrices, memory."""
    parameter = torch.nn.Parameter(values)
    constants = constants_of([(parameter, ParameterPlace(name, tuple(values.shape), ()))])
    assert constants.get(name) is None


def test_ranks_that_begin_with_different_numbers() -> None:
    """One device has both in one vector, which then does not begin with one number."""
    ranks = [{"slope": 1.0, "gate": 1.0, "x": None}, {"slope": 2.0, "gate": 1.0, "x": 1.0}, {}]
    assert agreed(ranks) == {"gate": 1.0}
