# SPDX-License-Identifier: Apache-2.0
"""The gradients that stand for those that are already where they belong."""

import torch

from megatron_ttrace.cpu.te.distributed_weight import get_dummy_wgrad


def test_a_dummy_is_shared_and_not_written() -> None:
    """Whoever adds it up without asking for zeros gets NaN; zeros remain, as in one buffer."""
    first, second = (get_dummy_wgrad([3, 5], torch.bfloat16) for _ in range(2))
    assert (first.shape, first.dtype) == ((3, 5), torch.bfloat16)
    assert first.data_ptr() == second.data_ptr()
    assert first.isnan().all()
    assert get_dummy_wgrad([5, 3], torch.bfloat16).isnan().all()
    assert not get_dummy_wgrad([3, 5], torch.bfloat16, zero=True).any()
    assert not first.any()
