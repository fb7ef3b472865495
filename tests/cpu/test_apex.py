# SPDX-License-Identifier: Apache-2.0
"""The norms against PyTorch's, and what is offered under Apex's names."""

import sys
from types import ModuleType

import pytest
import torch
from torch.nn import functional as F

from megatron_ttrace.cpu import apex
from tests.cpu.te.ranks import same_gradients

HIDDEN = 12


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Input [s b h], weight, bias and the gradient of the output, none of them special."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    return draw(5, 3, HIDDEN) * 3 + 1, draw(HIDDEN) + 1, draw(HIDDEN), draw(5, 3, HIDDEN)


def gradients(
    output: torch.Tensor, grad: torch.Tensor, *leaves: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(output, leaves, grad)


def ours_layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return apex.FusedLayerNormAffineFunction.apply(x, w, b, torch.Size([HIDDEN]), 1e-5)


def ours_fast(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return apex.FastLayerNormFN.apply(x, w, b, 1e-5)


@pytest.mark.parametrize("norm", [ours_layer, ours_fast])
def test_layer_norm_is_torchs_in_float64(norm):
    x, w, b, grad = (t.requires_grad_() for t in operands(torch.float64))
    expected = F.layer_norm(x, (HIDDEN,), w, b, 1e-5)
    same_gradients(norm(x, w, b), expected, (x, w, b), grad)


def test_gradients_are_the_derivatives():
    """Independent of PyTorch's own backward formula."""
    x, w, b, _ = (t.requires_grad_() for t in operands(torch.float64))
    assert torch.autograd.gradcheck(ours_layer, (x, w, b))


def test_bf16_is_computed_in_float32_and_rounded_once():
    x, w, b, _ = operands(torch.bfloat16)
    exact = F.layer_norm(x.double(), (HIDDEN,), w.double(), b.double(), 1e-5)
    output = ours_layer(x, w, b)
    assert output.dtype == torch.bfloat16
    assert torch.equal(output, exact.float().to(torch.bfloat16))
    # The same formula with every step rounded to bf16 is another result: the test can fail.
    mean = x.mean(-1, keepdim=True)
    rounded = (x - mean) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5) * w + b
    assert not torch.equal(output, rounded)


def test_gradient_dtypes_follow_their_tensors():
    """A bf16 input with float32 weights: main gradients must not lose their precision."""
    x, w, b, grad = operands(torch.float32)
    leaves = (x.bfloat16().requires_grad_(), w.requires_grad_(), b.requires_grad_())
    found = gradients(ours_layer(*leaves), grad.bfloat16(), *leaves)
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32, torch.float32]


def test_memory_efficient_changes_no_bit():
    x, w, b, _ = operands(torch.float32)
    shape = torch.Size([HIDDEN])
    plain = apex.FusedLayerNormAffineFunction.apply(x, w, b, shape, 1e-5, False)
    assert torch.equal(plain, apex.FusedLayerNormAffineFunction.apply(x, w, b, shape, 1e-5, True))


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
