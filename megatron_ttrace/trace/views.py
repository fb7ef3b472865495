# SPDX-License-Identifier: Apache-2.0
"""Both sides of a box as views of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron_ttrace.placement.boxes import Box


def box_views(
    local: torch.Tensor, logical: torch.Tensor, boxes: Sequence[Box]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """For each box its (local, logical) pair of equally shaped views."""
    for box in boxes:
        yield local_view(local, box), logical_view(logical, box)


def local_view(local: torch.Tensor, box: Box) -> torch.Tensor:
    """The local side of ``box`` as a view (of the logical box's shape)."""
    if box.is_flat:
        return local.reshape(-1).narrow(0, box.local[0], box.numel).view(box.extent)
    return _narrowed(local, box.local, box.extent)


def logical_view(logical: torch.Tensor, box: Box) -> torch.Tensor:
    """The logical side of ``box`` as a view."""
    return _narrowed(logical, box.logical, box.extent)


def _narrowed(data: torch.Tensor, starts: Sequence[int], extent: Sequence[int]) -> torch.Tensor:
    whole = tuple(data.shape)
    if whole != extent:
        for dim, (start, size) in enumerate(zip(starts, extent, strict=True)):
            if size != whole[dim]:
                data = data.narrow(dim, start, size)
    return data
