# SPDX-License-Identifier: Apache-2.0
"""Small traces, and the bits of tensors."""

from collections.abc import Mapping
from pathlib import Path

import torch

from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import Entry, TraceWriter, seal


def written(directory: Path, tensors: Mapping[TraceKey, torch.Tensor], *, rank: int = 0) -> Path:
    """A trace of whole tensors that is not sealed."""
    writer = TraceWriter(directory, rank)
    for key, data in tensors.items():
        writer.add(Entry.of(key, data), data)
    writer.close()
    return directory


def sealed(
    directory: Path, tensors: Mapping[TraceKey, torch.Tensor], meta: Mapping[str, object]
) -> Path:
    """A complete trace of whole tensors."""
    seal(written(directory, tensors), dict(meta))
    return directory


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in row-major order."""
    return bytes(
        tensor.detach()
        .flatten()
        .clone(memory_format=torch.contiguous_format)
        .view(torch.uint8)
        .numpy()
    )
