# SPDX-License-Identifier: Apache-2.0
"""Delayed FP8 scales are state: equal at the start, put back at the end."""

import types

import pytest
import torch

from megatron_ttrace.mcore.fp8 import HEADROOM, backward_scale, equal_scales, in_use, scales_kept


def state(scale):
    """As TransformerEngine keeps it."""
    return types.SimpleNamespace(
        scale=torch.tensor([scale]), amax_history=torch.tensor([[2 * scale]])
    )


@pytest.fixture
def module():
    """A module with FP8 state, in a model with others."""
    inner = torch.nn.Linear(2, 2)
    inner.fp8_meta = {"scaling_fwd": state(3.0), "scaling_bwd": state(5.0), "recipe": None}
    return torch.nn.Sequential(torch.nn.ReLU(), inner)


def values(module):
    """All scales and histories."""
    meta = module[1].fp8_meta
    return [
        (float(meta[name].scale), float(meta[name].amax_history))
        for name in ("scaling_fwd", "scaling_bwd")
    ]


def test_a_rehearsal_leaves_nothing_behind(module):
    """In place: fused updates hold references."""
    before, scale = values(module), module[1].fp8_meta["scaling_bwd"].scale
    with scales_kept([module]):
        equal_scales([module], 64.0)
        assert values(module) == [(1.0, 0.0), (64.0, 0.0)]
    assert values(module) == before
    assert module[1].fp8_meta["scaling_bwd"].scale is scale


def test_state_that_was_made_since_starts_afresh(module):
    """As it would have, had there been no rehearsal."""
    made = module[1].fp8_meta.pop("scaling_bwd")
    with scales_kept([module]):
        module[1].fp8_meta["scaling_bwd"] = made
    assert values(module) == [(3.0, 6.0), (1.0, 0.0)]


@pytest.mark.parametrize(("tokens", "expected"), [(1, 1), (256, 256), (300, 256), (511.5, 256)])
def test_backward_scale(tokens, expected):
    """A power of two, with room above."""
    assert backward_scale(tokens) == expected * HEADROOM


@pytest.mark.parametrize(("asked", "expected"), [("hybrid", [("inner", True)]), (None, [])])
def test_who_computes_in_fp8(module, asked, expected):
    """Of the modules that may; the others have no precision to compare."""
    inner = module[1]
    inner.config, inner.fp8 = types.SimpleNamespace(fp8=asked), True
    names = types.SimpleNamespace(modules={"act": module[0], "inner": inner})
    assert [*in_use(names)] == expected
