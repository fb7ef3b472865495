# SPDX-License-Identifier: Apache-2.0
"""The FP8 contexts, and the state that outlives them.

With delayed scaling the largest values seen by all layers are reduced over the ranks that share
tensors, once per forward pass (when the outermost context ends) and once per backward pass (when
the first layer is through), and the next scales are taken from them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.fp8_precision import FORWARD, ScalingState, backward_dtype
from megatron_ttrace.cpu.te.parallel import all_reduce
from megatron_ttrace.cpu.te.recipes import DelayedScaling, Recipe


@dataclass
class _Context:
    enabled: bool = False
    calibrating: bool = False
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
    def is_fp8_calibration(cls) -> bool:
        """Whether largest values are recorded without rounding; never on a CPU."""
        return cls._context.calibrating

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        """Return the recipe of this context."""
        return cls._context.recipe or DelayedScaling()

    @classmethod
    def get_fp8_group(cls) -> Any:
        """Return the group over which largest values are reduced."""
        return cls._context.group

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether parameters are made in FP8; never on a CPU."""
        return False

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        """Whether FP8 parameters keep their unrounded first value."""
        return False

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a CUDA graph is being captured."""
        return False

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        """Whether FP8 can be used: emulated, always."""
        return True, ""

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """Say yes to the first layer that asks in an outermost context."""
        first, cls._first = cls._first, False
        return first

    @classmethod
    def _key(cls) -> tuple[str, int]:
        return repr(cls._context.recipe), id(cls._context.group)

    @classmethod
    def register(cls, forward: ScalingState, backward: ScalingState) -> None:
        """Let a layer's scales take part in the updates of the current recipe and group."""
        recipe = cls.get_fp8_recipe()
        assert isinstance(recipe, DelayedScaling)
        entry = cls._registered.setdefault(cls._key(), _Registered(recipe, cls._context.group))
        entry.forward[id(forward)] = forward
        entry.backward[id(backward)] = backward

    @classmethod
    def update_forward(cls) -> None:
        """Take new scales for inputs and weights."""
        for entry in cls._registered.values():
            entry.update(entry.forward, FORWARD)

    @classmethod
    def update_backward(cls) -> None:
        """Take new scales for gradients."""
        for entry in cls._registered.values():
            entry.update(entry.backward, backward_dtype(entry.recipe))

    @classmethod
    def enter(cls, context: _Context) -> _Context:
        """Make ``context`` the current one; return the one before."""
        before, cls._context = cls._context, context
        if cls._depth == 0:
            cls._first = True
        cls._depth += 1
        return before

    @classmethod
    def leave(cls, before: _Context) -> None:
        """Go back to ``before``; the outermost context of a forward pass updates scales."""
        enabled, cls._context = cls._context.enabled, before
        cls._depth -= 1
        if enabled and cls._depth == 0 and torch.is_grad_enabled() and not recompute.second:
            cls.update_forward()


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Compute products in FP8 by ``fp8_recipe`` in the enclosed code."""
    context = _Context(enabled, calibrating, fp8_recipe or DelayedScaling(), fp8_group)
    before = FP8GlobalStateManager.enter(context)
    try:
        yield
    finally:
        FP8GlobalStateManager.leave(before)


@contextmanager
def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | None = None,
    amax_reduction_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """``fp8_autocast`` by its newer name."""
    with fp8_autocast(enabled, calibrating, recipe, amax_reduction_group, _graph):
        yield


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
    yield


quantized_model_init = fp8_model_init
