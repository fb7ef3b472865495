# SPDX-License-Identifier: Apache-2.0
"""How ranks exchange data about the check: JSON, never pickle.

The object collectives of ``torch.distributed`` use pickle. Here text is sent as byte tensors over
the job's own backend. Ranks agree beforehand that all of them take part (``agreement.py``).
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.errors import TTraceError


def encode(value: Any) -> bytes:
    """A JSON value as bytes."""
    return json.dumps(value).encode()


def buffer(text: bytes, size: int, device: torch.device) -> torch.Tensor:
    """A message in a tensor of ``size`` bytes."""
    made = torch.zeros(size, dtype=torch.uint8, device=device)
    if text:
        made[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return made


def gather(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of all ranks, by rank, on every rank: a collective."""
    everyone = [torch.zeros_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)
    return everyone


def decode(text: bytes, rank: int) -> Any:
    """The JSON value that a rank sent. Raises ``TTraceError`` when it is damaged."""
    try:
        return json.loads(text.decode())
    except ValueError as error:
        raise TTraceError(f"the data from rank {rank} arrived damaged ({error})") from error


def store() -> Any:
    """The job's key-value store."""
    # The only handle on the store that init_process_group made; torch's own elastic code uses it.
    return dist.distributed_c10d._get_default_store()
