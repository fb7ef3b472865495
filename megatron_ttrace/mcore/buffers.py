# SPDX-License-Identifier: Apache-2.0
"""The buffers of modules, which a forward pass changes in place, or replaces (``self.mean = ...``).

Tables of positions are replaced by longer ones, or by ones of another dtype, when they are needed;
their modules know what they have by now.
"""

from collections.abc import Iterable

import torch

from megatron_ttrace.mcore.names import unwrap
from megatron_ttrace.mcore.sharded_weights import local
from megatron_ttrace.trace.copies import Copies


class Buffers:
    """A copy of all buffers of some models."""

    def __init__(self, chunks: Iterable[torch.nn.Module], copies: Copies | None = None) -> None:
        """``copies`` copies them; by default in memory."""
        copies = copies or Copies()
        self._kept = [
            (module, name, buffer, copies.copy(local(buffer)))
            for chunk in chunks
            for module in unwrap(chunk).modules()
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def restore(self) -> None:
        """Write the values into the buffers that the modules have now, if these are alike."""
        with torch.no_grad():
            for module, name, before, copy in self._kept:
                now = module._buffers.get(name)
                if now is None or now.shape != before.shape:
                    continue
                # Megatron's routers change the dtype of a buffer in place.
                if now is before or now.dtype == before.dtype:
                    copy.put(local(now))
