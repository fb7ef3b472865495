# SPDX-License-Identifier: Apache-2.0
"""How ranks talk to each other about the check: JSON, never pickle.

``torch.distributed``'s object collectives pickle. Here text travels as byte tensors over the job's
own backend. Ranks agree beforehand that all of them take part (``agreement.py``).
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.errors import TTraceError


def encode(value: Any) -> bytes:
    """A JSON value as it travels."""
    return json.dumps(value).encode()


def gather(text: bytes, device: torch.device) -> list[Any]:
    """Everybody's encoded value, decoded, by rank, on every rank.

    Raises:
        TTraceError: when what arrived cannot be decoded.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [_decode(text, 0)]
    mine = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    size = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s.item()) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [
        _decode(bytes(text[: int(s.item())].cpu().numpy()), rank)
        for rank, (text, s) in enumerate(zip(everyone, sizes, strict=True))
    ]


def _decode(text: bytes, rank: int) -> Any:
    try:
        return json.loads(text.decode())
    except ValueError as error:
        raise TTraceError(f"what rank {rank} sent arrived damaged ({error})") from error


def store() -> Any:
    """The job's key-value store."""
    # The only handle on the store that init_process_group made; torch's own elastic code uses it.
    return dist.distributed_c10d._get_default_store()
