# SPDX-License-Identifier: Apache-2.0
"""What is offered under Apex's names."""

import sys
from types import ModuleType

import pytest
import torch

from megatron_ttrace.cpu import apex


@pytest.fixture
def no_apex():
    """A process that has not seen Apex, and forgets again what the test installs."""

    def take_out() -> dict[str, ModuleType]:
        names = [name for name in sys.modules if name.split(".")[0] == "apex"]
        return {name: sys.modules.pop(name) for name in names}

    before = take_out()
    yield
    take_out()
    sys.modules.update(before)


def test_the_real_apex_is_left_alone(no_apex, monkeypatch):
    monkeypatch.setattr(apex, "real_apex_present", lambda: True)
    apex.install()
    assert "apex" not in sys.modules


def test_names_that_megatron_imports(no_apex, monkeypatch):
    monkeypatch.setattr(apex, "real_apex_present", lambda: False)
    apex.install()
    norms = sys.modules["apex.normalization.fused_layer_norm"]
    assert norms.FusedLayerNormAffineFunction is apex.FusedLayerNormAffineFunction
    assert sys.modules["apex"].normalization.fused_layer_norm is norms


def test_the_unrelated_apex_of_the_index_does_not_count(no_apex):
    """The package index has a project of this name that has no norms."""
    sys.modules["apex"] = ModuleType("apex")
    assert not apex.real_apex_present()


def test_a_float32_residual_is_normalised_into_the_weights_dtype():
    x = torch.randn(3, 8, requires_grad=True)
    weight, bias = torch.ones(8).bfloat16(), torch.zeros(8).bfloat16()
    normalised = apex.FusedLayerNormAffineFunction.apply(x, weight, bias, (8,), 1e-5)
    normalised.sum().backward()
    assert (normalised.dtype, x.grad.dtype) == (torch.bfloat16, torch.float32)
