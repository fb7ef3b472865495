# SPDX-License-Identifier: Apache-2.0
"""Tensors that rooms hand to each other: what a sink gets, and the losses' shares of gradients."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.records import Kind, TraceKey

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
    all tokens of this call. ``groups``: where the router is limited to some of them. ``run``: of
    the router in its microbatch; ``None`` for one that is recomputed if it is not known which.
    """

    scores: torch.Tensor
    chosen: torch.Tensor
    groups: Groups | None = None
    by: torch.Tensor | None = None
    run: int | None = 0

    def of(self, router: str) -> str:
        """The name of the router's run."""
        return f"{router}#{self.run}" if self.run else router


@dataclasses.dataclass(frozen=True)
class Share:
    """What a loss adds to a gradient of the reference.

    ``own``: only what it adds in the module of the tensor itself, and not through the gradients
    that enter this module.
    """

    loss: Loss
    own: bool
    value: torch.Tensor


Separate = Callable[[Sequence[TraceKey]], Mapping[TraceKey, Sequence[Share]]]
"""Finds the losses' shares of gradients."""
