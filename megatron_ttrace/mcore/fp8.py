# SPDX-License-Identifier: Apache-2.0
"""Delayed FP8 scaling: its scales and histories are state of a run, like moments.

TransformerEngine keeps them in ``fp8_meta["scaling_fwd"]`` and ``["scaling_bwd"]`` of each module
(``DelayedScalingRecipeState``: ``scale``, ``amax_history``), made in the first forward pass. Both
runs of a check must start from the same ones, and a rehearsal must leave none behind.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")

HEADROOM = 16.0
"""How far a gradient scale reaches beyond one over the number of tokens. E5M2 has room for 2**15
above and 2**16 below: gradients of a token's loss, spread over width and depth, stay within."""


class ScalesKept:
    """The FP8 state of some modules, to be put back."""

    def __init__(self, chunks: Iterable[torch.nn.Module]) -> None:
        self._chunks = list(chunks)
        self._known = {
            id(state): (state.scale.detach().clone(), state.amax_history.detach().clone())
            for state, _ in _states(self._chunks)
        }

    def restore(self) -> None:
        """Put it back; state that was made since starts afresh, as it would have."""
        for state, _ in _states(self._chunks):
            scale, history = self._known.get(id(state), (None, None))
            _set(state, scale, history)


def equal_scales(chunks: Iterable[torch.nn.Module], backward_scale: float) -> None:
    """Give all modules the same history: none, and scales that fit the start values."""
    for state, direction in _states(chunks):
        _set(state, None, None)
        if direction == "scaling_bwd":
            state.scale.fill_(backward_scale)


def backward_scale(tokens: float) -> float:
    """A gradient's first scale, a power of two (so that it rounds nothing itself).

    Args:
        tokens: that one loss is the mean of: a token's loss enters with one over it.
    """
    return float(2.0 ** math.floor(math.log2(tokens))) * HEADROOM


def _set(state: Any, scale: torch.Tensor | None, history: torch.Tensor | None) -> None:
    """In place: TransformerEngine's fused updates hold references."""
    with torch.no_grad():
        state.scale.fill_(1.0) if scale is None else state.scale.copy_(scale)
        if history is None:
            state.amax_history.zero_()
        else:
            state.amax_history.copy_(history)


def _states(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[Any, str]]:
    for chunk in chunks:
        for module in chunk.modules():
            meta = getattr(module, "fp8_meta", None)
            if not isinstance(meta, dict):
                continue
            for direction in _DIRECTIONS:
                state = meta.get(direction)
                if hasattr(state, "amax_history"):
                    yield state, direction
