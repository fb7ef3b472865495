# SPDX-License-Identifier: Apache-2.0
"""The gated delta rule against its formula, the convolution against PyTorch's."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ttrace.cpu.operators.conv1d import causal_conv1d_fn
from megatron_ttrace.cpu.operators.delta_rule import (
    causal_conv1d,
    chunk_gated_delta_rule,
    l2norm,
)
from megatron_ttrace.cpu.operators.matrices import hadamard_transform, wgrad_gemm_accum_fp32


def inputs(length=6, heads=4, key_heads=2, keys=3, values=5, batch=2):
    torch.manual_seed(0)
    return {
        "q": torch.randn(batch, length, key_heads, keys),
        "k": torch.randn(batch, length, key_heads, keys),
        "v": torch.randn(batch, length, heads, values),
        "g": -torch.rand(batch, length, heads),
        "beta": torch.rand(batch, length, heads),
    }


def recurrence(q, k, v, g, beta):
    """With the state's transition as a matrix, one head after the other."""
    out = torch.zeros_like(v)
    repeats = v.shape[2] // q.shape[2]
    for sample in range(v.shape[0]):
        for head in range(v.shape[2]):
            state = torch.zeros(q.shape[3], v.shape[3])
            for t in range(v.shape[1]):
                key, query = k[sample, t, head // repeats], q[sample, t, head // repeats]
                rate = beta[sample, t, head]
                turn = torch.eye(len(key)) - rate * torch.outer(key, key)
                state = g[sample, t, head].exp() * turn @ state
                state = state + rate * torch.outer(key, v[sample, t, head])
                out[sample, t, head] = state.T @ query * q.shape[3] ** -0.5
    return out


def test_delta_rule():
    """The operator is the recurrence."""
    found, state = chunk_gated_delta_rule(**inputs())
    torch.testing.assert_close(found, recurrence(**inputs()))
    assert state is None


def test_packed_sequences():
    """Packed sequences are computed apart."""
    whole = inputs(length=7, batch=1)
    found, _ = chunk_gated_delta_rule(**whole, cu_seqlens=torch.tensor([0, 3, 3, 7, 7]))
    parts = [{name: one[:, at] for name, one in whole.items()} for at in (slice(3), slice(3, 7))]
    expected = torch.cat([recurrence(**part) for part in parts], dim=1)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("initial_state", "inference"),
        ("output_final_state", "inference"),
        ("head_first", "head_first"),
    ],
)
def test_what_would_change_the_result_is_refused(option, reason):
    with pytest.raises(NotImplementedError, match=reason):
        chunk_gated_delta_rule(**inputs(), **{option: torch.ones(1)})


def test_l2norm():
    """Rows of length one."""
    x = torch.randn(5, 7)
    torch.testing.assert_close(l2norm(x, eps=0.0), F.normalize(x))


def test_convolution():
    """PyTorch's own convolution, with zeros before the first position."""
    x, weight, bias = torch.randn(2, 9, 4), torch.randn(4, 3), torch.randn(4)
    expected = F.silu(F.conv1d(F.pad(x.mT, (2, 0)), weight[:, None], bias, groups=4)).mT
    found, state = causal_conv1d(x, weight, bias, activation="silu")
    torch.testing.assert_close(found, expected)
    assert state is None


def test_convolution_of_packed_sequences():
    """A sequence does not see the one before it."""
    x, weight = torch.randn(1, 9, 4), torch.randn(4, 3)
    found, _ = causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 4, 9]))
    parts = [causal_conv1d(part, weight)[0] for part in (x[:, :4], x[:, 4:])]
    torch.testing.assert_close(found, torch.cat(parts, dim=1))


def test_convolution_goes_on_from_a_state():
    """The last inputs of one part come before the next."""
    x, weight = torch.randn(2, 4, 9), torch.randn(4, 3)
    whole = causal_conv1d_fn(x, weight)
    first = causal_conv1d_fn(x[:, :, :5], weight)
    second = causal_conv1d_fn(x[:, :, 5:], weight, initial_states=x[:, :, 3:5])
    torch.testing.assert_close(torch.cat([first, second], dim=2), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weight_gradient(dtype):
    """The product is added to what is there, and a buffer of gradients needs none of its own."""
    inputs, grad = torch.randn(3, 2, 4, requires_grad=True), torch.randn(3, 2, 5)
    main_grad = torch.ones(5, 4, dtype=dtype)
    wgrad_gemm_accum_fp32(inputs, grad, main_grad)
    assert not main_grad.requires_grad
    expected = 1 + torch.einsum("sbo,sbi->oi", grad, inputs)
    torch.testing.assert_close(main_grad.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("size", [1, 2, 5, 8])
def test_hadamard(size):
    """Sylvester's matrix, of the next power of two."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    x = torch.randn(3, size)
    expected = 0.5 * F.pad(x, (0, len(matrix) - size)) @ matrix
    torch.testing.assert_close(hadamard_transform(x, scale=0.5), expected[:, :size])
