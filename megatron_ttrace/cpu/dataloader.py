# SPDX-License-Identifier: Apache-2.0
"""The DataLoader sees a machine without accelerator, and leaves the random state alone.

PyTorch's DataLoader pins batches when ``torch.accelerator`` finds a device. A CUDA build of
PyTorch names CUDA as its accelerator although no GPU is there, and asks ``torch.cuda``, which
now answers yes: so the accelerator interface is told the truth directly. Batches are the same
tensors, just not pinned.

Every iterator also draws a seed for its workers from the CPU's generator. Only the first rank of a
tensor-parallel group reads data; on a GPU its draw does not touch the generator of the dropout
masks, which has to stay in step on all ranks of the group. Here the two are one generator (see
``cuda.py``), so the draw is undone.
"""

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader


def install() -> None:
    """Make ``torch.accelerator`` report that there is none, and iterators draw aside."""
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: False
    accelerator.current_accelerator = lambda check_available=False: None
    accelerator.device_count = lambda: 0
    accelerator.synchronize = lambda device=None: None
    accelerator.empty_cache = lambda: None

    loader: Any = DataLoader
    make_iterator = loader.__iter__

    @functools.wraps(make_iterator)
    def iterate(self: Any) -> Any:
        with torch.random.fork_rng(devices=()):
            return make_iterator(self)

    loader.__iter__ = iterate
