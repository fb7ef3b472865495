# SPDX-License-Identifier: Apache-2.0
"""The FP8 contexts, the state that outlives them, and each module's share of it.

With delayed scaling the largest values seen by all layers are reduced over the ranks that share
tensors, once per forward pass (when the outermost context ends) and once per backward pass (when
the first layer is through), and the next scales are taken from them.
"""

import json
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.parallel import all_reduce
from megatron_ttrace.cpu.te.precision import (
    FORWARD,
    BlockScaling,
    CurrentScaling,
    DelayedScalingPrecision,
    Precision,
    ScalingState,
    backward_dtype,
)
from megatron_ttrace.cpu.te.recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    Recipe,
)

#: Tensors per product: input, weight, output; and their gradients: of output and of input.
_FORWARD_SLOTS, _BACKWARD_SLOTS = 3, 2
_DIRECTIONS = ("fwd", "bwd")
_SCALING = tuple(f"{what}_{way}" for way in _DIRECTIONS for what in ("scale", "amax_history"))

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


@dataclass(frozen=True)
class _Context:
    enabled: bool = False
    recipe: Recipe | None = None
    group: Any = None


@dataclass(frozen=True)
class Recompute:
    """Which of the two forward passes of an activation recomputation is running, if any."""

    enabled: bool = False
    second: bool = False


recompute = Recompute()


class _Registered:
    """The layers whose largest values are reduced together, and by which recipe."""

    def __init__(self, recipe: DelayedScaling, group: Any) -> None:
        self.recipe, self.group = recipe, group
        # Insertion order is the order of the layers, the same on all ranks of the group.
        self.forward: dict[int, ScalingState] = {}
        self.backward: dict[int, ScalingState] = {}

    def update(self, states: dict[int, ScalingState], fp8: torch.dtype) -> None:
        """Reduce the newest largest values over the group and take new scales."""
        if not states:
            return
        recipe = self.recipe
        newest = torch.cat([state.amax_history[0] for state in states.values()])
        if recipe.reduce_amax:
            newest = all_reduce(newest, self.group, dist.ReduceOp.MAX)
        sizes = [state.scale.numel() for state in states.values()]
        for state, values in zip(states.values(), newest.split(sizes), strict=True):
            state.amax_history[0] = values
            state.update(recipe.amax_compute_algo, torch.finfo(fp8).max, recipe.margin)


class FP8GlobalStateManager:
    """What is true of the FP8 context that encloses the current code."""

    _context = _Context()
    _depth = 0
    _first = False
    _registered: dict[tuple[str, int], _Registered] = {}  # noqa: RUF012 - one for the process

    @classmethod
    def reset(cls) -> None:
        """Forget everything."""
        cls._context, cls._depth, cls._first = _Context(), 0, False
        cls._registered = {}

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        """Whether products are computed in FP8 here."""
        return cls._context.enabled

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe of this context."""
        return cls._context.recipe or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the group over which largest values are reduced."""
        return cls._context.group

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Say yes to the first layer that asks in an outermost context."""
        first, cls._first = cls._first, False
        return first

    @classmethod
    def register(cls, forward: ScalingState, backward: ScalingState) -> None:
        """Let a layer's scales take part in the updates of the current recipe and group."""
        recipe, group = cls.get_fp8_recipe(), cls._context.group
        assert isinstance(recipe, DelayedScaling)
        key = repr(cls._context.recipe), id(group)
        entry = cls._registered.setdefault(key, _Registered(recipe, group))
        entry.forward[id(forward)] = forward
        entry.backward[id(backward)] = backward

    @classmethod
    def update_backward(cls) -> None:
        """Take new scales for gradients."""
        for entry in cls._registered.values():
            entry.update(entry.backward, backward_dtype(entry.recipe))

    @classmethod
    @contextmanager
    def within(cls, context: _Context) -> Iterator[None]:
        """Make ``context`` the current one; an outermost one updates forward scales at its end."""
        before, cls._context = cls._context, context
        cls._first |= cls._depth == 0
        cls._depth += 1
        try:
            yield
        finally:
            cls._context = before
            cls._depth -= 1
            outermost = context.enabled and cls._depth == 0
            if outermost and torch.is_grad_enabled() and not recompute.second:
                for entry in cls._registered.values():
                    entry.update(entry.forward, FORWARD)


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """Compute products in FP8 by ``recipe`` in the enclosed code."""
    context = _Context(enabled, recipe or DelayedScaling(), amax_reduction_group)
    return FP8GlobalStateManager.within(context)


def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> AbstractContextManager[None]:
    """``autocast`` by its older name."""
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@contextmanager
def fp8_model_init(
    enabled: bool = True,
    recipe: Recipe | None = None,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Make parameters in FP8: not on a CPU, where they stay as they are and are rounded in use.

    An FP8 parameter is what the unrounded one becomes when it is rounded for a product, so the
    forward pass is the same. What differs is memory and communication.
    """
    _made_in_fp8.append(enabled)
    try:
        yield
    finally:
        _made_in_fp8.pop()


def makes_fp8_weights() -> bool:
    """Whether layers that are made now have weights in FP8."""
    return bool(_made_in_fp8) and _made_in_fp8[-1]


_made_in_fp8: list[bool] = []
"""For each :func:`fp8_model_init` that is entered, whether it is enabled."""


quantized_model_init = fp8_model_init


def encode_state(state: Mapping[str, Any]) -> torch.Tensor:
    """The FP8 state of a module as JSON in bytes.

    TransformerEngine pickles it. No pickle is read or written here, so a checkpoint carries FP8
    state from one emulated run to another, not to or from a GPU.
    """
    plain: dict[str, Any] = {"num_gemms": state["extra_fp8_variables"]["num_gemms"]}
    plain |= {name: state[name].tolist() for name in _SCALING if name in state}
    return torch.frombuffer(bytearray(json.dumps(plain).encode()), dtype=torch.uint8)


def decode_state(encoded: Any) -> dict[str, Any] | None:
    """What :func:`encode_state` was given, with the length of the recipe's histories.

    ``None`` for a module without FP8. Raises ``ValueError`` for other bytes, a GPU's pickle, say.
    """
    if not isinstance(encoded, torch.Tensor) or encoded.numel() == 0:
        return None
    try:
        plain: dict[str, Any] = json.loads(bytes(encoded.detach().cpu().numpy()))
    except ValueError as error:
        raise ValueError(
            "this checkpoint's FP8 state was not written by the CPU backend: "
            "load it without FP8, or on a GPU"
        ) from error
    state: dict[str, Any] = {"extra_fp8_variables": {"num_gemms": plain.pop("num_gemms")}}
    state |= {name: torch.tensor(values) for name, values in plain.items()}
    history = state.get("amax_history_fwd")
    state["recipe"] = Recipe() if history is None else DelayedScaling(amax_history_len=len(history))
    return state


class ScaledModule(torch.nn.Module):
    """Has scales and histories, if its recipe needs any; they go into checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.fp8_initialized = False
        self.fp8 = False
        self.fp8_calibration = False
        self.fp8_meta: dict[str, Any] = {"fp8_checkpoint": False}
        self._stashed: deque[tuple[torch.Tensor, bool]] = deque()

    @property
    def _scaling(self) -> tuple[ScalingState, ScalingState] | None:
        if "scaling_fwd" not in self.fp8_meta:
            return None
        return self.fp8_meta["scaling_fwd"], self.fp8_meta["scaling_bwd"]

    def init_fp8_metadata(self, num_gemms: int = 1) -> None:
        """Note the context's recipe, and make scales and histories if it needs them."""
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        if not self.fp8:
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta |= {"recipe": recipe, "num_gemms": num_gemms, "fp8_checkpoint": True}
        self.fp8_initialized = True
        if isinstance(recipe, DelayedScaling):
            self._allocate(num_gemms, recipe.amax_history_len)

    def _allocate(self, num_gemms: int, history_length: int) -> None:
        existing = self._scaling
        if existing is not None and existing[0].amax_history.shape[0] == history_length:
            return
        meta = self.fp8_meta
        meta["scaling_fwd"] = ScalingState(_FORWARD_SLOTS * num_gemms, history_length)
        meta["scaling_bwd"] = ScalingState(_BACKWARD_SLOTS * num_gemms, history_length)
        meta["scaling_bwd"].scale.fill_(_first_backward_scale)

    def precision(self, num_gemms: int = 1) -> Precision:
        """Return what rounds one forward pass's tensors, and its backward pass's."""
        self.init_fp8_metadata(num_gemms)
        if not self.fp8:
            return Precision()
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
        again = recompute.enabled and recompute.second
        if again and self._stashed:
            scale, last = self._stashed.popleft()
        else:
            scale, last = forward.scale.clone(), FP8GlobalStateManager.is_first_fp8_module()
            FP8GlobalStateManager.register(forward, backward)
            if recompute.enabled:
                self._stashed.append((scale, last))
        # The first layer forward is the last one backward.
        finish = FP8GlobalStateManager.update_backward if last else None
        return DelayedScalingPrecision(
            recipe, scaling, scale=scale, num_gemms=num_gemms, recording=not again, finish=finish
        )

    def get_extra_state(self) -> torch.Tensor:
        """Scales and histories; empty without FP8."""
        meta = self.fp8_meta
        if not meta["fp8_checkpoint"]:
            return torch.empty(0, dtype=torch.uint8)
        state: dict[str, Any] = {"extra_fp8_variables": {"num_gemms": meta["num_gemms"]}}
        for direction, scaling in zip(_DIRECTIONS, self._scaling or (), strict=False):
            state[f"scale_{direction}"] = scaling.scale
            state[f"amax_history_{direction}"] = scaling.amax_history
        return encode_state(state)

    def set_extra_state(self, state: Any) -> None:
        """Take the state back. Raises ``ValueError`` when it cannot be read."""
        content = decode_state(state)
        if content is None:
            return
        num_gemms = content["extra_fp8_variables"]["num_gemms"]
        self.fp8_meta |= {"num_gemms": num_gemms, "fp8_checkpoint": True}
        if "scale_fwd" not in content:
            return
        self._allocate(num_gemms, len(content["amax_history_fwd"]))
        assert self._scaling is not None
        for target, direction in zip(self._scaling, _DIRECTIONS, strict=True):
            target.scale = content[f"scale_{direction}"]
            target.amax_history = content[f"amax_history_{direction}"]
