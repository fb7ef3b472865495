# SPDX-License-Identifier: Apache-2.0
"""How ranks talk to each other about the check: JSON, never pickle.

``torch.distributed``'s object collectives pickle. Here text travels as byte tensors over the job's
own backend, and one-off messages before training through the job's key-value store, where a rank
may wait for longer than a collective's time-out.
"""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PATIENCE = timedelta(hours=24)


def gather_json(value: Any, device: torch.device) -> list[Any]:
    """Everybody's ``value``, by rank, on every rank."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
    if dist.get_world_size() == 1:
        return [value]
    size = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    sizes = [torch.zeros_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    longest = max(int(s.item()) for s in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8, device=device)
    padded[: mine.numel()] = mine
    everyone = [torch.zeros_like(padded) for _ in sizes]
    dist.all_gather(everyone, padded)
    return [
        json.loads(bytes(text[: int(s.item())].cpu().numpy()).decode())
        for text, s in zip(everyone, sizes, strict=True)
    ]


def announce(key: str, value: Any) -> None:
    """Leave a message for the other ranks."""
    _store().set(f"ttrace/{key}", json.dumps(value))


def await_message(key: str) -> Any:
    """Wait, for as long as it takes, for a message from another rank."""
    store = _store()
    store.wait([f"ttrace/{key}"], _PATIENCE)
    return json.loads(store.get(f"ttrace/{key}").decode())


def _store() -> Any:
    # The only handle on the store that init_process_group made; torch's own elastic code uses it.
    return dist.distributed_c10d._get_default_store()
