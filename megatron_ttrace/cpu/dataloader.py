# SPDX-License-Identifier: Apache-2.0
"""The DataLoader sees a machine without accelerator.

PyTorch's DataLoader pins batches when ``torch.accelerator`` finds a device. A CUDA build of
PyTorch names CUDA as its accelerator although no GPU is there, and asks ``torch.cuda``, which
now answers yes: so the accelerator interface is told the truth directly. Batches are the same
tensors, just not pinned.
"""

from typing import Any

import torch


def install() -> None:
    """Make ``torch.accelerator`` report that there is none."""
    accelerator: Any = torch.accelerator
    accelerator.is_available = lambda: False
    accelerator.current_accelerator = lambda check_available=False: None
    accelerator.device_count = lambda: 0
    accelerator.synchronize = lambda device=None: None
    accelerator.empty_cache = lambda: None
