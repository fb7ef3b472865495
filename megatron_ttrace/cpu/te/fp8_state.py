# SPDX-License-Identifier: Apache-2.0
"""The FP8 contexts, and the state that outlives them."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

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


class FP8GlobalStateManager:
    """What is true of the FP8 context that encloses the current code."""

    _context = _Context()
    _depth = 0

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


@contextmanager
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:
    """Compute products in FP8 by ``fp8_recipe`` in the enclosed code."""
    manager = FP8GlobalStateManager
    before = manager._context
    manager._context = _Context(enabled, calibrating, fp8_recipe or DelayedScaling(), fp8_group)
    manager._depth += 1
    try:
        yield
    finally:
        manager._depth -= 1
        manager._context = before


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
