# SPDX-License-Identifier: Apache-2.0
"""How ranks exchange data about the check: JSON, never pickle.

The object collectives of ``torch.distributed`` use pickle. Here text is sent as byte tensors over
the job's own backend. Ranks agree beforehand that all of them take part (``agreement.py``).
"""

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.trace.errors import TTraceError

FAN_IN = 16
"""From how many ranks, itself included, one rank of the tree receives."""


def encode(value: Any) -> bytes:
    """A JSON value as bytes."""
    return json.dumps(value).encode()


def buffer(text: bytes, size: int, device: torch.device) -> torch.Tensor:
    """A message in a tensor of ``size`` bytes."""
    made = torch.zeros(size, dtype=torch.uint8, device=device)
    if text:
        made[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return made


def gather(tensor: torch.Tensor, group: Any = None) -> list[torch.Tensor]:
    """The tensors of all ranks of a group, by rank, on each of them: a collective."""
    everyone = [torch.zeros_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, tensor, group)
    return everyone


def packed(value: Any) -> bytes:
    """A JSON value, compressed: names and layouts repeat."""
    return zlib.compress(encode(value), 1)


def unpacked(message: bytes, rank: int) -> Any:
    """The inverse of :func:`packed`. Raises ``TTraceError`` when it is damaged."""
    try:
        return decode(zlib.decompress(message), rank)
    except zlib.error as error:
        raise TTraceError(f"the data from rank {rank} arrived damaged ({error})") from error


def send(message: bytes, to: int, device: torch.device) -> None:
    """Send a message to a rank, which must call :func:`receive`."""
    dist.send(torch.tensor([len(message)], dtype=torch.int64, device=device), to)
    if message:
        dist.send(buffer(message, len(message), device), to)


def receive(source: int, device: torch.device) -> bytes:
    """The message that a rank sends."""
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source)
    message = torch.zeros(int(size.item()), dtype=torch.uint8, device=device)
    if message.numel():
        dist.recv(message, source)
    return message.cpu().numpy().tobytes()


def broadcast(message: bytes, source: int, device: torch.device) -> bytes:
    """The message of ``source`` on every rank: a collective."""
    size = torch.tensor([len(message)], dtype=torch.int64, device=device)
    dist.broadcast(size, source)
    sent = buffer(message, int(size.item()), device)
    dist.broadcast(sent, source)
    return sent.cpu().numpy().tobytes()


def tree(rank: int, size: int) -> tuple[list[list[int]], int | None]:
    """From which ranks one receives, group by group, and to which it sends then.

    The last rank is the root, which sends to none. Ranks of a group are as near to each other as
    the tree allows; in Megatron's order these share tensors.
    """
    place, stride = size - 1 - rank, 1
    groups: list[list[int]] = []
    while stride < size:
        if up := place % (stride * FAN_IN):
            return groups, rank + up
        reach = min(size, place + stride * FAN_IN)
        groups.append([size - 1 - child for child in range(place + stride, reach, stride)])
        stride *= FAN_IN
    return groups, None


def decode(text: bytes, rank: int) -> Any:
    """The JSON value that a rank sent. Raises ``TTraceError`` when it is damaged."""
    try:
        return json.loads(text.decode())
    except ValueError as error:
        raise TTraceError(f"the data from rank {rank} arrived damaged ({error})") from error
