# SPDX-License-Identifier: Apache-2.0
"""Delayed FP8 scaling: scales and amax histories are state of a run, like moments.

TransformerEngine creates them in the first forward pass, in ``fp8_meta["scaling_fwd"]`` and
``["scaling_bwd"]`` of each module (``DelayedScalingRecipeState``: ``scale``, ``amax_history``).
Both runs of a check must start with the same ones, and a rehearsal must restore them.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ttrace.mcore.names import Names

_DIRECTIONS = ("scaling_fwd", "scaling_bwd")

HEADROOM = 16.0
"""Factor of a gradient's scale beyond the number of tokens. E5M2 has room for 2**15 above and 2**16
below, enough for the gradients of one token's loss over width and depth."""


@contextmanager
def scales_kept(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Restore the FP8 state of modules afterwards; what is created within is reset, as if new."""
    known = {
        id(state): (state.scale.detach().clone(), state.amax_history.detach().clone())
        for state, _ in _states(chunks)
    }
    try:
        yield
    finally:
        for state, _ in _states(chunks):
            _set(state, *known.get(id(state), ()))


def equal_scales(chunks: Iterable[torch.nn.Module], backward_scale: float) -> None:
    """Give all modules an empty history, and scales that fit the start values."""
    for state, direction in _states(chunks):
        _set(state, backward_scale if direction == "scaling_bwd" else 1.0)


def backward_scale(tokens: float) -> float:
    """A gradient's first scale, for a loss that is averaged over this many tokens.

    A power of two, which adds no rounding.
    """
    return float(2.0 ** math.floor(math.log2(tokens))) * HEADROOM


def in_use(names: Names) -> Iterator[tuple[str, bool]]:
    """Each module that may compute in FP8, and whether it did in its last pass.

    TransformerEngine notes it as ``fp8`` (``init_fp8_metadata`` in its pytorch/module/base.py). A
    product in bf16 instead is within the tolerance of one in FP8.
    """
    for name, module in names.modules.items():
        asked = getattr(getattr(module, "config", None), "fp8", None)
        if asked and isinstance(getattr(module, "fp8_meta", None), dict):
            yield name, bool(getattr(module, "fp8", False))


def _set(
    state: Any, scale: torch.Tensor | float = 1.0, history: torch.Tensor | float = 0.0
) -> None:
    """In place: TransformerEngine's fused updates hold references."""
    with torch.no_grad():
        state.scale[...] = scale
        state.amax_history[...] = history


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
