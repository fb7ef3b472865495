# SPDX-License-Identifier: Apache-2.0
"""What is switched on for a rehearsal."""

import types

import pytest
import torch

from megatron_ttrace.mcore import quiet


@pytest.mark.parametrize(
    ("clips", "before", "within"), [(True, 100, 0.1), (True, 0.05, 0.05), (False, 100, 100)]
)
def test_attention_is_clipped(clips: bool, before: float, within: float) -> None:
    """Modules share a config."""
    config = types.SimpleNamespace(qk_clip=clips, qk_clip_threshold=before)
    model = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Identity())
    for module in (*model, model):
        module.config = config
    with quiet.attention_clipped([model]):
        assert config.qk_clip_threshold == within
    assert config.qk_clip_threshold == before
