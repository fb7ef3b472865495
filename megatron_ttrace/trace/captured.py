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


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Routed:
    """A router's choice of experts, [tokens, k], by its scores, [tokens, experts].

    ``by`` is what the choice maximises where that is not each token's ``scores``, but depends on
    all tokens of this call. ``groups``: where the router is limited to some of them.
    """

    scores: torch.Tensor
    chosen: torch.Tensor
    groups: Groups | None = None
    by: torch.Tensor | None = None
