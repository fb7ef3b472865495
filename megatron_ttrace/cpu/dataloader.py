# SPDX-License-Identifier: Apache-2.0
"""The DataLoader sees a machine without accelerator, and leaves the random state alone.

It pins batches when ``torch.accelerator`` finds a device, which is CUDA for a CUDA build of PyTorch
now that ``torch.cuda`` says there is one.

Every iterator also draws a seed for its workers from the CPU's generator, which here is that of the
dropout masks too (see ``cuda.py``). Only the first rank of a tensor-parallel group reads data, and
the masks have to stay in step on all of them, so the draw is undone.
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
