# SPDX-License-Identifier: Apache-2.0
"""Version 2 of Megatron-FSDP, whose buffers remember the stream that they were allocated on."""

import importlib
from typing import Any

import torch

_BUFFERS = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.dbuffer"


def allocate_on_a_stream() -> None:
    """Let buffers say that it was the current one; on a CPU, Megatron's have none."""
    buffer: Any = importlib.import_module(_BUFFERS).DBuffer

    def ignore(_: Any, stream: Any) -> None:
        pass

    buffer.allocation_stream = property(lambda _: torch.cuda.current_stream(), ignore)
