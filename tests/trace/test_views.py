# SPDX-License-Identifier: Apache-2.0
"""The bytes of a tensor are its memory, and its storage stays what it was."""

import pytest
import torch

from megatron_ttrace.trace.views import memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_no_copy(dtype):
    """What is written into them is in the tensor, from its own first element on."""
    whole = torch.zeros(4, 3).to(dtype)
    view = memory(whole[1:3])
    assert (view.nbytes, view.readonly) == (6 * dtype.itemsize, False)
    view[:] = bytes(torch.ones(6).to(dtype).view(torch.uint8).tolist())
    assert whole.sum(1).tolist() == [0, 3, 3, 0]
    assert whole.untyped_storage().resizable()


def test_nothing():
    assert memory(torch.empty(0, 3)) == b""
