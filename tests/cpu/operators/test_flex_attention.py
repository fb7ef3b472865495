# SPDX-License-Identifier: Apache-2.0
"""Attention with functions of scores and positions, against PyTorch's without them."""

import pytest
import torch
import torch.nn.functional as F

from megatron_ttrace.cpu.operators.flex_attention import flex_attention


class Mask:
    """As ``create_block_mask`` returns one."""

    def __init__(self, mask_mod):
        self.mask_mod = mask_mod


def tensors(dtype=torch.float64):
    torch.manual_seed(0)
    return [torch.randn(2, n, 6, 4, dtype=dtype, requires_grad=True) for n in (4, 2, 2)]


def window(batch, head, query, key):
    return (query >= key) & (query - key <= 2)


def test_masks_and_groups():
    """A causal window with grouped queries, forward and backward."""
    query, key, value = tensors(torch.float32)
    keys = torch.arange(6)
    mask = window(None, None, keys[:, None], keys[None, :])
    found = flex_attention(query, key, value, block_mask=Mask(window), scale=0.3, enable_gqa=True)
    expected = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True
    )
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found.square().sum(), (query, key, value)),
        torch.autograd.grad(expected.square().sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_functions_of_scores():
    """They see scaled scores with their batch, head, query and key."""
    query, key, value = tensors(torch.float32)
    slopes = torch.rand(4)

    def biased(score, batch, head, query, key):
        return score + slopes[head] * (key - query) + batch

    key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
    keys = torch.arange(6)
    bias = slopes[None, :, None, None] * (keys[None, :] - keys[:, None])
    found = flex_attention(query, key, value, biased)
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=bias.expand(2, 4, 6, 6))
    torch.testing.assert_close(found, expected)


def test_a_row_without_any_position():
    """It is zero, as are its gradients."""
    query, key, value = tensors(torch.bfloat16)
    nothing = Mask(lambda batch, head, query, key: (query > 0) & (key >= 0))
    found = flex_attention(query, key, value, block_mask=nothing, enable_gqa=True)
    found.float().sum().backward()
    assert found.dtype is torch.bfloat16
    assert not found[:, :, 0].any()
    assert not query.grad[:, :, 0].any()
    assert query.grad[:, :, 1:].any()


def test_further_results():
    """They are refused."""
    with pytest.raises(NotImplementedError, match="output only"):
        flex_attention(*tensors(), enable_gqa=True, return_lse=True)
