# SPDX-License-Identifier: Apache-2.0
"""The FP8 state of one module: what lasts between its calls, and goes into checkpoints."""

import json
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ttrace.cpu.te import fp8_state
from megatron_ttrace.cpu.te.fp8_precision import (
    BlockScaling,
    CurrentScaling,
    DelayedScalingPrecision,
    ScalingState,
)
from megatron_ttrace.cpu.te.fp8_state import FP8GlobalStateManager
from megatron_ttrace.cpu.te.products import HighPrecision, Precision
from megatron_ttrace.cpu.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)

#: Tensors per product: input, weight, output; and their gradients: of output and of input.
_FORWARD_SLOTS, _BACKWARD_SLOTS = 3, 2


_first_backward_scale = 1.0


@contextmanager
def backward_scales_from(scale: float) -> Iterator[None]:
    """Within this context state that is made starts with this scale for gradients, not with 1.

    At 1 the gradients of a first step are too small for FP8 and vanish: nothing to compare.
    """
    global _first_backward_scale
    before, _first_backward_scale = _first_backward_scale, scale
    try:
        yield
    finally:
        _first_backward_scale = before


class ModuleState:
    """Scales and histories of one module, if its recipe needs any."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._stashed: deque[tuple[torch.Tensor, bool]] = deque()

    @property
    def _scaling(self) -> tuple[ScalingState, ScalingState] | None:
        meta = self._module.fp8_meta
        if "scaling_fwd" not in meta:
            return None
        return meta["scaling_fwd"], meta["scaling_bwd"]

    def prepare(self, num_gemms: int = 1) -> None:
        """Note the context's recipe, and make the state that it needs."""
        module = self._module
        module.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if not module.fp8:
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        module.fp8_meta["recipe"] = recipe
        module.fp8_meta["num_gemms"] = num_gemms
        module.fp8_meta["fp8_checkpoint"] = True
        module.fp8_initialized = True
        if isinstance(recipe, DelayedScaling):
            self._allocate(num_gemms, recipe.amax_history_len)

    def _allocate(self, num_gemms: int, history_length: int) -> None:
        existing = self._scaling
        if existing is not None and existing[0].amax_history.shape[0] == history_length:
            return
        meta = self._module.fp8_meta
        meta["scaling_fwd"] = ScalingState(_FORWARD_SLOTS * num_gemms, history_length)
        meta["scaling_bwd"] = ScalingState(_BACKWARD_SLOTS * num_gemms, history_length)
        meta["scaling_bwd"].scale.fill_(_first_backward_scale)

    def precision(self, num_gemms: int = 1) -> Precision:
        """Return the rounding for one forward pass and its backward pass."""
        self.prepare(num_gemms)
        if not self._module.fp8:
            return HighPrecision()
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        if isinstance(recipe, DelayedScaling):
            return self._delayed(recipe, num_gemms)
        if isinstance(recipe, Float8CurrentScaling):
            return CurrentScaling(recipe)
        if isinstance(recipe, Float8BlockScaling):
            return BlockScaling(recipe, 128, square_weights=True)
        if isinstance(recipe, MXFP8BlockScaling):
            return BlockScaling(recipe, 32, square_weights=False)
        raise NotImplementedError(f"FP8 recipe {type(recipe).__name__}")

    def _delayed(self, recipe: Recipe, num_gemms: int) -> Precision:
        scaling = self._scaling
        assert scaling is not None
        forward, backward = scaling
        manager, recompute = FP8GlobalStateManager, fp8_state.recompute
        again = recompute.enabled and recompute.second
        if again and self._stashed:
            scale, last = self._stashed.popleft()
        else:
            scale, last = forward.scale.clone(), manager.is_first_fp8_module()
            manager.register(forward, backward)
            if recompute.enabled:
                self._stashed.append((scale, last))
        # The first layer forward is the last one backward.
        finish = manager.update_backward if last else None
        return DelayedScalingPrecision(
            recipe, forward, backward, num_gemms, scale, not again, finish
        )

    # Checkpoints

    def to_bytes(self) -> torch.Tensor:
        """Scales and histories as JSON in bytes; empty without FP8.

        TransformerEngine pickles them. No pickle is read or written here, so a checkpoint carries
        FP8 state from one emulated run to another, not to or from a GPU.
        """
        meta = self._module.fp8_meta
        if not meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        state: dict[str, Any] = {"num_gemms": meta["num_gemms"]}
        for direction, scaling in zip(_DIRECTIONS, self._scaling or (), strict=False):
            scale, history = _contents(scaling)
            state[f"scale_{direction}"] = scale.tolist()
            state[f"amax_history_{direction}"] = history.tolist()
        return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)

    def from_bytes(self, state: Any) -> None:
        """Take the state back.

        Raises:
            ValueError: when it is not what :meth:`to_bytes` wrote, a GPU checkpoint's pickle say.
        """
        if not isinstance(state, torch.Tensor) or state.numel() == 0:
            return
        try:
            found: dict[str, Any] = json.loads(bytes(state.detach().cpu().numpy()))
        except ValueError as error:
            raise ValueError(
                "this checkpoint's FP8 state was not written by the CPU backend: "
                "load it without FP8, or on a GPU"
            ) from error
        meta = self._module.fp8_meta
        meta["num_gemms"] = found["num_gemms"]
        meta["fp8_checkpoint"] = True
        if "scale_fwd" not in found:
            return
        self._allocate(meta["num_gemms"], len(found["amax_history_fwd"]))
        assert self._scaling is not None
        for target, direction in zip(self._scaling, _DIRECTIONS, strict=True):
            target.scale = torch.tensor(found[f"scale_{direction}"])
            target.amax_history = torch.tensor(found[f"amax_history_{direction}"])


_DIRECTIONS = ("fwd", "bwd")


def _contents(state: ScalingState) -> tuple[torch.Tensor, torch.Tensor]:
    return state.scale.detach().clone(), state.amax_history.detach().clone()
