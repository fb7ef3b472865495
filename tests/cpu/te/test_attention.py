# SPDX-License-Identifier: Apache-2.0
"""Attention against softmax written out, in float64."""

import math

import pytest
import torch

from megatron_ttrace.cpu.te.attention import DotProductAttention
from tests.cpu.te.ranks import close, same_gradients

SEQ, BATCH, HEADS, GROUPS, DIM = 6, 2, 4, 2, 5


def inputs(groups=GROUPS, value_dim=DIM, dtype=torch.float64):
    torch.manual_seed(5)
    q = torch.randn(SEQ, BATCH, HEADS, DIM, dtype=dtype, requires_grad=True)
    k = torch.randn(SEQ, BATCH, groups, DIM, dtype=dtype, requires_grad=True)
    v = torch.randn(SEQ, BATCH, groups, value_dim, dtype=dtype, requires_grad=True)
    return q, k, v


def written_out(q, k, v, hidden, sink=None, bias=None):
    """``[s, b, h, d]`` to ``[s, b, h * d]``; ``hidden`` broadcasts to ``[b, h, s, s]``."""
    repeat = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
    score = torch.einsum("sbhd,tbhd->bhst", q, k) / math.sqrt(q.shape[-1])
    if bias is not None:
        score = score + bias
    score = score.masked_fill(hidden, float("-inf"))
    if sink is not None:
        column = sink.view(1, -1, 1, 1).expand(*score.shape[:3], 1).to(score.dtype)
        score = torch.cat([score, column], -1)
    probability = torch.softmax(score, -1)
    if sink is not None:
        probability = probability[..., :-1]
    return torch.einsum("bhst,tbhd->sbhd", probability, v).flatten(-2)


def distance():
    position = torch.arange(SEQ)
    return position[None, :] - position[:, None]


def module(**kwargs):
    return DotProductAttention(HEADS, DIM, num_gqa_groups=GROUPS, **kwargs)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("mask", ["causal", "no_mask"])
def test_masks_and_grouped_heads(groups, mask):
    tensors = inputs(groups)
    hidden = distance() > 0 if mask == "causal" else torch.zeros(SEQ, SEQ, dtype=torch.bool)
    same_gradients(module(attn_mask_type=mask)(*tensors), written_out(*tensors, hidden), tensors)


@pytest.mark.parametrize(
    ("mask", "window"), [("causal", (2, 0)), ("no_mask", (1, 2)), ("causal", (0, 0))]
)
def test_sliding_window(mask, window):
    tensors = inputs()
    hidden = (distance() < -window[0]) | (distance() > window[1])
    ours = module(attn_mask_type=mask, window_size=window)(*tensors)
    same_gradients(ours, written_out(*tensors, hidden), tensors)


def test_values_of_another_width():
    tensors = inputs(value_dim=3)
    attention = DotProductAttention(HEADS, (DIM, 3), num_gqa_groups=GROUPS)
    same_gradients(attention(*tensors), written_out(*tensors, distance() > 0), tensors)


def test_sinks():
    """They are zero, or start at it and are learnt."""
    tensors = inputs()
    expected = written_out(*tensors, distance() > 0, torch.zeros(HEADS))
    same_gradients(module(softmax_type="off-by-one")(*tensors), expected, tensors)
    attention = module(softmax_type="learnable")
    assert not attention.softmax_offset.any()
    with torch.no_grad():
        attention.softmax_offset.normal_()
    sink = attention.softmax_offset
    expected = written_out(*tensors, distance() > 0, sink)
    same_gradients(attention(*tensors), expected, (*tensors, sink))


def test_hidden_keys():
    """Only the mask types that make use of it look at the mask."""
    tensors = inputs()
    mask = torch.zeros(BATCH, 1, 1, SEQ, dtype=torch.bool)
    mask[1, ..., -2:] = True
    for mask_type, hidden in (("causal", distance() > 0), ("padding", mask)):
        ours = module()(*tensors, attention_mask=mask, attn_mask_type=mask_type)
        same_gradients(ours, written_out(*tensors, hidden), tensors)


def test_bias_of_the_scores():
    tensors = inputs()
    bias = torch.randn(1, HEADS, SEQ, SEQ, dtype=torch.float64, requires_grad=True)
    options = {"core_attention_bias_type": "post_scale_bias", "core_attention_bias": bias}
    expected = written_out(*tensors, distance() > 0, bias=bias)
    same_gradients(module()(*tensors, **options), expected, (*tensors, bias))


def test_packed_sequences_do_not_see_each_other():
    torch.manual_seed(5)
    q, k, v = (torch.randn(6, n, DIM, dtype=torch.float64) for n in (HEADS, GROUPS, GROUPS))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    ours = module(attn_mask_type="padding_causal")(q, k, v, **packed)
    parts = []
    for start, end in ((0, 2), (2, 6)):
        part = [t[start:end, None] for t in (q, k, v)]
        parts.append(module()(*part)[:, 0])
    close(ours, torch.cat(parts))


def test_batch_first():
    q, k, v = (t.detach() for t in inputs())
    expected = module()(q, k, v).transpose(0, 1)
    close(module()(*(t.transpose(0, 1) for t in (q, k, v)), qkv_format="bshd"), expected)


def test_dropout_drops_and_its_gradient_uses_the_same_mask():
    q, k, v = inputs()
    attention = module(attention_dropout=0.5)
    torch.manual_seed(0)
    dropped = attention(q, k, v)
    assert not torch.allclose(dropped, attention(q, k, v))
    attention.eval()
    close(attention(q, k, v), written_out(q, k, v, distance() > 0))

    def seeded(*tensors):
        torch.manual_seed(0)
        return attention.train()(*tensors)

    assert torch.autograd.gradcheck(seeded, (q, k, v), fast_mode=True)


def test_largest_score_of_each_head():
    q, k, v = inputs()
    _, largest = module(return_max_logit=True)(q, k, v)
    score = torch.einsum("sbhd,tbhd->bhst", q, k.repeat_interleave(2, 2)) / math.sqrt(DIM)
    close(largest, score.masked_fill(distance() > 0, float("-inf")).amax((0, 2, 3)))


def test_sixteen_bits_round_once():
    tensors = [t.detach().bfloat16() for t in inputs()]
    exact = module()(*(t.double() for t in tensors))
    torch.testing.assert_close(module()(*tensors), exact.bfloat16(), rtol=2**-7, atol=1e-6)
