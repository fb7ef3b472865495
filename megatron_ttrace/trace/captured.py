# SPDX-License-Identifier: Apache-2.0
"""Types of what capture passes to a sink."""

from __future__ import annotations

import dataclasses

import torch

from megatron_ttrace.trace.records import Kind

Place = tuple[int, Kind, str, int]
"""(microbatch, kind, canonical name, index) of a traced tensor within an iteration."""

Batch = dict[str, torch.Tensor]
"""The tensors of one microbatch by name, as the data loader made them."""

Partials = dict[tuple[Kind, str, int], str]
"""By kind, module and index: the mesh axis over which an activation or its gradient is partial."""


@dataclasses.dataclass(frozen=True, slots=True)
class Groups:
    """``chosen`` of ``number`` equal groups of experts may be used by a token."""

    number: int
    chosen: int
