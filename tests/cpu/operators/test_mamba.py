# SPDX-License-Identifier: Apache-2.0
"""The state space operators against their recurrence."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.cpu.operators.mamba import (
    RMSNorm,
    mamba_chunk_scan_combined,
    mamba_split_conv1d_scan_combined,
)

BATCH, HEADS, HEADDIM, GROUPS, STATE = 2, 4, 3, 2, 5


def inputs(length, seed=0, dtype=torch.float64):
    """x, dt, A, B, C, D, z, dt_bias."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=dtype)

    return (
        draw(BATCH, length, HEADS, HEADDIM),
        draw(BATCH, length, HEADS),
        -draw(HEADS).exp(),
        draw(BATCH, length, GROUPS, STATE),
        draw(BATCH, length, GROUPS, STATE),
        draw(HEADS),
        draw(BATCH, length, HEADS, HEADDIM),
        draw(HEADS),
    )


def recurrence(x, dt, A, B, C, D, z, dt_bias, numbers=None):  # noqa: N803 - as in the formula
    """One step after the other."""
    steps = F.softplus(dt + dt_bias)
    group_of = torch.arange(HEADS) // (HEADS // GROUPS)
    state = x.new_zeros(BATCH, HEADS, HEADDIM, STATE)
    out = []
    for t in range(x.shape[1]):
        if numbers is not None and t:
            state = state * (numbers[:, t] == numbers[:, t - 1])[:, None, None, None]
        keys, queries = B[:, t, group_of], C[:, t, group_of]
        state = state * torch.exp(steps[:, t] * A)[..., None, None]
        state = state + (x[:, t] * steps[:, t, :, None])[..., None] * keys[:, :, None]
        out.append((state * queries[:, :, None]).sum(-1) + D[:, None] * x[:, t])
    return torch.stack(out, dim=1) * F.silu(z)


@settings(max_examples=15, deadline=None)
@given(length=st.integers(1, 11), chunk=st.integers(1, 12), packed=st.booleans())
def test_scan(length, chunk, packed):
    """Any length, in chunks of any size, of one sequence or of several, is the recurrence."""
    x, dt, a, b, c, d, z, bias = inputs(length, seed=length)
    numbers = (torch.arange(length) // 4).expand(BATCH, -1) if packed else None
    found = mamba_chunk_scan_combined(
        x, dt, a, b, c, chunk, D=d, z=z, dt_bias=bias, dt_softplus=True, seq_idx=numbers
    )
    expected = recurrence(x, dt, a, b, c, d, z, bias, numbers)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("option", ["initial_states", "cu_seqlens", "return_final_states"])
def test_states_are_for_inference(option):
    x, dt, a, b, c, *_ = inputs(4)
    with pytest.raises(NotImplementedError, match="inference"):
        mamba_chunk_scan_combined(x, dt, a, b, c, 2, **{option: torch.ones(1)})


def test_gradients():
    """The gradients of a scan in chunks are those of the recurrence."""
    values = [one.float().requires_grad_() for one in inputs(7)]
    x, dt, a, b, c, d, z, bias = values
    mamba_chunk_scan_combined(
        x, dt, a, b, c, 3, D=d, z=z, dt_bias=bias, dt_softplus=True
    ).square().sum().backward()
    found = [one.grad for one in values]
    again = [one.detach().double().requires_grad_() for one in values]
    recurrence(*again).square().sum().backward()
    for ours, theirs in zip(found, (one.grad for one in again), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-3)


def test_split():
    """Convolution, scan and gate one after the other are the combined operator."""
    x, dt, a, b, c, d, z, bias = inputs(6)
    mixed = torch.cat([x.flatten(2), b.flatten(2), c.flatten(2)], dim=-1)
    weight = torch.randn(mixed.shape[-1], 4, dtype=torch.float64)
    shift = torch.randn(mixed.shape[-1], dtype=torch.float64)
    found = mamba_split_conv1d_scan_combined(
        torch.cat([z.flatten(2), mixed, dt], dim=-1), weight, shift, bias, a, d, 4,
        headdim=HEADDIM, ngroups=GROUPS, norm_before_gate=False,
    )  # fmt: skip
    convolved = F.conv1d(F.pad(mixed.mT, (3, 0)), weight[:, None], shift, groups=mixed.shape[-1]).mT
    sizes = [HEADS * HEADDIM, GROUPS * STATE, GROUPS * STATE]
    x2, b2, c2 = F.silu(convolved).split(sizes, dim=-1)
    parts = x2.unflatten(-1, (HEADS, -1)), b2.unflatten(-1, (GROUPS, -1))
    expected = recurrence(parts[0], dt, a, parts[1], c2.unflatten(-1, (GROUPS, -1)), d, z, bias)
    torch.testing.assert_close(found, expected.reshape(found.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("before", [False, True])
def test_norm(before):
    """Each group of channels is divided by its own root mean square."""
    norm = RMSNorm(6, eps=0.0, group_size=3, norm_before_gate=before)
    x, z = torch.randn(4, 6), torch.randn(4, 6)
    gated = x if before else x * F.silu(z)
    groups = gated.view(4, 2, 3)
    expected = (groups / groups.square().mean(-1, keepdim=True).sqrt()).view(4, 6)
    torch.testing.assert_close(norm(x, z), expected * F.silu(z) if before else expected)
