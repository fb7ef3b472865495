# SPDX-License-Identifier: Apache-2.0
"""What replaces a captured tensor when isolating: this rank's part of the reference.

How it enters the autograd graph: megatron_ttrace/capture/isolate.py.
"""

from collections.abc import Callable, Sequence

import torch

from megatron_ttrace.compare.experts import Match
from megatron_ttrace.compare.planning import Planner
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.staging import to_device
from megatron_ttrace.trace.store import TraceReader
from megatron_ttrace.trace.views import box_views

Perturb = Callable[[TraceKey, torch.Tensor], torch.Tensor]


class Substituter:
    """Makes a rank's tensors out of one reference.

    ``perturb`` changes the values, in a replay that estimates tolerances.
    """

    def __init__(self, reference: TraceReader, planner: Planner, perturb: Perturb | None) -> None:
        self._reference = reference
        self._planner = planner
        self._perturb = perturb

    def instead(self, key: TraceKey, data: torch.Tensor) -> torch.Tensor | None:
        """This rank's part of the reference; ``None`` without one, or if ``data`` equals it.

        Of the step's tensors only scalars are replaced so.
        """
        if not data.is_floating_point() and data.dtype != torch.bool:
            return None
        has_rows = self._planner.experts.holds(key)
        if not has_rows and key not in self._reference:
            return None
        if key.microbatch == STEP_LEVEL and not self._reference.entry(key).shape:
            return self._reference.data(key).clone()
        instead = data.detach().clone()
        oriented = self._planner.oriented(key, instead)
        try:
            if has_rows:
                parts = self._planner.rows(key, tuple(data.shape))
                matches = [part for part in parts if isinstance(part, Match)]
            else:
                matches = [self._planner.activation(key, tuple(oriented.shape))]
        except ValueError:
            return None
        if not has_rows and sum(box.numel for box in matches[0].boxes) != data.numel():
            return None
        for match in matches:
            self.fill(oriented, match.key, match.boxes, match.share)
        if self._perturb is not None and instead.is_floating_point():
            instead = self._perturb(key, instead)
        return None if torch.equal(instead, data) else instead

    def chosen(self, match: Match, data: torch.Tensor) -> torch.Tensor:
        """The reference's choice of a router, in the shape of this rank's."""
        theirs = torch.empty_like(data)
        self.fill(theirs, match.key, match.boxes)
        return theirs

    def fill(
        self, data: torch.Tensor, key: TraceKey, boxes: Sequence[Box], share: float = 1.0
    ) -> None:
        """Write the reference's values, or a share of them, over ``data``, in place."""
        for here, there in box_views(data, self._reference.data(key), boxes):
            here.copy_(to_device(there, here.device))
            if share != 1.0:
                here.mul_(share)


def makers_of(keys: Sequence[TraceKey]) -> list[TraceKey]:
    """Of the names of one gradient, those of the modules that computed it.

    The innermost modules that the tensor enters compute its gradient: not the module that it left,
    nor a module that contains those, nor one that returns its input (dropout that is off).
    """
    left = {key.name for key in keys if key.kind is Kind.GRAD_OUTPUT}
    entered = [key for key in keys if key.kind is Kind.GRAD_INPUT and key.name not in left]
    return [
        key for key in entered if not any(o.name.startswith(f"{key.name}.") for o in entered)
    ] or list(keys)
