# SPDX-License-Identifier: Apache-2.0
"""Memory that nothing is written to shows, and nothing else changes."""

from argparse import Namespace

import pytest
import torch

from megatron_ttrace.capture.initial import (
    as_training_begins,
    clear_scratch,
    initial_values,
    new_memory_is_nan,
)
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.placement.mesh import SINGLE


@pytest.mark.parametrize("mode", [(False, False), (True, True), (True, False)])
def test_new_memory(mode):
    """A parameter without initial values; the mode of PyTorch is as before."""
    torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    try:
        with new_memory_is_nan():
            layer = torch.nn.Linear(4, 2)
            empty = torch.nn.Parameter(torch.empty(3, dtype=torch.bfloat16))
        assert layer.weight.isfinite().all()
        assert empty.isnan().all()
        assert torch.are_deterministic_algorithms_enabled() == mode[0]
        assert torch.is_deterministic_algorithms_warn_only_enabled() == mode[1]
    finally:
        torch.use_deterministic_algorithms(False)


def test_scratch_memory():
    """A buffer that is not stored need not be initialised; an infinite one is meant."""
    module = torch.nn.Module()
    with new_memory_is_nan():
        for name, persistent in (("scratch", False), ("state", True)):
            module.register_buffer(name, torch.empty(3), persistent=persistent)
        module.register_buffer("mask", torch.full((2,), -torch.inf), persistent=False)
        module.register_buffer("number", torch.tensor(1), persistent=False)
        module.register_buffer("absent", None, persistent=False)
    clear_scratch([module])
    assert module.scratch.tolist() == [0.0, 0.0, 0.0]
    assert module.state.isnan().all()
    assert module.mask.isinf().all()


def test_random_numbers_are_the_same():
    """A healthy model starts as without it."""
    torch.manual_seed(1)
    expected = torch.nn.Linear(64, 64).weight.detach().clone()
    torch.manual_seed(1)
    with new_memory_is_nan():
        assert torch.equal(torch.nn.Linear(64, 64).weight, expected)


def test_a_mask_is_no_sample_of_a_distribution():
    """Its infinities are meant; NaN are not, and a buffer in FP8 has moments like any other."""
    model = torch.nn.Linear(3, 2)
    model.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
    model.register_buffer("scales", torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn))
    model.register_buffer("state", torch.full((2,), torch.nan))
    traced = TracedModel([model], [canonical_names(model)], None, SINGLE)
    found = {one.name: one.moments for one in initial_values(traced, Namespace())}
    assert found.keys() == {"weight", "bias", "scales", "state"}
    assert (found["scales"].sum, found["scales"].least, found["scales"].most) == (2.5, 0.5, 2.0)
    assert [name for name, moments in found.items() if moments.nonfinite] == ["state"]


def test_values_that_a_callback_changes():
    """They are measured again when training starts; the random numbers are those of the build."""
    model = torch.nn.Linear(3, 2)
    traced = TracedModel([model], [canonical_names(model)], None, SINGLE)
    built = initial_values(traced, Namespace())
    torch.rand(1)
    with torch.no_grad():
        model.bias.fill_(2.0)
    before = {one.name: one.moments for one in built}
    found = {one.name: one.moments for one in as_training_begins(traced, Namespace(), built)}
    assert found.keys() == before.keys()
    assert found["weight"] == before["weight"]
    assert found["bias"].sum == 4.0
    assert found["bias"].state == before["bias"].state
    assert as_training_begins(traced, Namespace(), []) == []


def test_places_of_numbers_that_each_layout_cuts_its_own_way():
    """With ``--use-cpu-initialization``."""
    model = torch.nn.Linear(3, 2)
    traced = TracedModel([model], [canonical_names(model)], None, SINGLE)
    summed, unknown = (
        initial_values(traced, Namespace(use_cpu_initialization=on)) for on in (False, True)
    )
    assert all(one.moments.places for one in summed)
    assert not any(one.moments.places for one in unknown)
