# SPDX-License-Identifier: Apache-2.0
"""Norms against PyTorch's own, in float64."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from megatron_ttrace.cpu.te.norms import LayerNorm, NormKind, RMSNorm, normalise
from tests.cpu.te.ranks import same_gradients

NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


def expected(name, x, module):
    gamma = module.weight + 1 if module.zero_centered_gamma else module.weight
    if name == "LayerNorm":
        return F.layer_norm(x, x.shape[-1:], gamma, module.bias, module.eps)
    return F.rms_norm(x, x.shape[-1:], gamma, module.eps)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("zero_centered", [False, True])
def test_forward_and_gradients(name, zero_centered):
    torch.manual_seed(1)
    module = NORMS[name](
        normalized_shape=8, eps=1e-3, zero_centered_gamma=zero_centered, params_dtype=torch.float64
    )
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    same_gradients(module(x), expected(name, x, module), [x, *module.parameters()])


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_new_parameters(name, sequence_parallel):
    """They leave the normalised input, and say whether their gradients are partial sums."""
    options = {"sequence_parallel": sequence_parallel, "zero_centered_gamma": sequence_parallel}
    module = NORMS[name](normalized_shape=4, **options)
    assert {p.sequence_parallel for p in module.parameters()} == {sequence_parallel}
    assert module.weight.tolist() == [0.0 if sequence_parallel else 1.0] * 4
    assert not getattr(module, "bias", torch.zeros(1)).any()


def test_sixteen_bits_are_computed_in_float32():
    """The sum of squares of these overflows half precision."""
    module = RMSNorm(normalized_shape=4, dtype=torch.float16)
    x = torch.full((1, 4), 3000.0, dtype=torch.float16)
    torch.testing.assert_close(module(x), torch.ones(1, 4, dtype=torch.float16))


def test_results_are_rounded_once():
    """Those of each step would be another result; gradients have the types of their tensors."""
    torch.manual_seed(3)
    x = (torch.randn(5, 3, 12) * 3 + 1).bfloat16().requires_grad_()
    module = LayerNorm(normalized_shape=12)
    with torch.no_grad():
        module.weight.copy_(1 + torch.randn(12).bfloat16())
        module.bias.copy_(torch.randn(12).bfloat16())
    module.bfloat16()
    output = module(x)
    exact = expected("LayerNorm", x.double(), module.double())
    assert torch.equal(output, exact.float().bfloat16())
    module.bfloat16()
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    rounded = (x - mean) * torch.rsqrt(variance + module.eps) * module.weight + module.bias
    assert not torch.equal(output, rounded)
    module.float()
    grads = torch.autograd.grad(module(x).sum(), (x, module.weight, module.bias))
    assert module(x).dtype is torch.float32
    assert [grad.dtype for grad in grads] == [torch.bfloat16, torch.float32, torch.float32]


@pytest.mark.parametrize("name", NORMS)
def test_recomputed_gradients_have_the_same_bits(name):
    """That of a residual branch is added to one number, as with a kernel."""
    gradients = []
    for run in (lambda norm, x: norm(x), functools.partial(checkpoint, use_reentrant=True)):
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
        kind = NormKind(name, 1e-5, zero_centered_gamma=False)
        norm = functools.partial(normalise, weight=torch.ones(8), bias=None, kind=kind)
        torch.sin(x + run(norm, x)).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("kind", [LayerNorm, RMSNorm])
def test_the_input_is_rounded_to_the_dtype_of_the_weight(kind):
    """As in TransformerEngine's ``ops/basic/layer_norm.py``: residuals may be in float32."""
    module = kind(normalized_shape=4, dtype=torch.bfloat16)
    x = torch.randn(3, 4, requires_grad=True)
    output = module(x)
    assert torch.equal(output, module(x.bfloat16()))
    assert output.dtype is torch.bfloat16
    output.sum().backward()
    assert x.grad.dtype is torch.float32


@pytest.mark.parametrize("replaced", [False, True])
def test_meta_device_waits_for_reset(replaced):
    """Which also marks the parameters: Megatron-FSDP replaces them before."""
    module = LayerNorm(normalized_shape=4, device="meta", sequence_parallel=True)
    assert module.weight.is_meta
    assert module.weight.sequence_parallel
    if replaced:
        module.to_empty(device="cpu", recurse=False)
        assert not hasattr(module.weight, "sequence_parallel")
    module.reset_parameters()
    assert module.weight.tolist() == [1.0] * 4
    assert module.weight.sequence_parallel
    assert module.bias.sequence_parallel


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_input_is_kept_and_no_copy(name, dtype):
    """What overwrites it before the backward pass changes gradients, as with a kernel."""
    module = NORMS[name](normalized_shape=4, dtype=dtype)
    found = []
    for overwrites in (False, True):
        x = torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=dtype, requires_grad=True)
        y = module(x)
        if overwrites:
            x.data.fill_(3.0)
        found += torch.autograd.grad(y, module.weight, torch.ones_like(y))
    assert not torch.equal(*found)
