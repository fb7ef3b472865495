# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation (``checkpoint``), and the tracker of named random states.

Recomputation runs forward twice and keeps the inputs only. The second run has to compute what the
first did: the random states are put back, and FP8 modules are told which of the two they are in, so
that they round with the scales of the first run.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from megatron_ttrace.cpu.te import fp8
from megatron_ttrace.cpu.te.fp8 import FP8GlobalStateManager, fp8_autocast


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    """Say that the enclosed forward pass is recomputed later, or is the recomputation."""
    before = fp8.recompute
    fp8.recompute = fp8.Recompute(
        enabled=activation_recompute and FP8GlobalStateManager.is_fp8_enabled(),
        second=activation_recompute and recompute_phase,
    )
    try:
        yield
    finally:
        fp8.recompute = before


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether the current forward pass in FP8 takes part in recomputation."""
    return fp8.recompute.enabled


def in_fp8_activation_recompute_phase() -> bool:
    """Whether this is the second forward pass."""
    return fp8.recompute.second


class CudaRNGStatesTracker:
    """Named states of the one generator there is (``--te-rng-tracker``); see ``cuda.py``."""

    def __init__(self) -> None:
        self.states_: dict[str, torch.Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, torch.Tensor]:
        """Return copies of all states."""
        return {name: state.clone() for name, state in self.states_.items()}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        """Take all states back."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add a state seeded with ``seed``; neither may have been added before."""
        if seed in self.seeds_:
            raise RuntimeError(f"seed {seed} already exists")
        if name in self.states_:
            raise RuntimeError(f"state {name} already exists")
        self.seeds_.add(seed)
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            self.states_[name] = torch.get_rng_state()

    @contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        """Draw from the state ``name`` inside the context."""
        if name not in self.states_:
            raise KeyError(f"state {name} has not been added")
        with torch.random.fork_rng(devices=()):
            torch.set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = torch.get_rng_state()


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function`` now and again in the backward pass, as PyTorch does.

    The second run has the named random states and the FP8 context of the first.
    ``distribute_saved_activations`` would cut what is kept over the tensor-parallel ranks, to spare
    memory; the numbers are the same without.
    """
    tracker = get_rng_state_tracker() if get_rng_state_tracker is not None else None
    states = tracker.get_states() if tracker is not None else None
    enabled, group = FP8GlobalStateManager.is_fp8_enabled(), FP8GlobalStateManager.get_fp8_group()
    recipe = FP8GlobalStateManager.get_fp8_recipe() if enabled else None
    runs = itertools.count()

    def run(*args: Any) -> Any:
        if not next(runs):
            with activation_recompute_forward(True, False):
                return function(*args, **kwargs)
        now = tracker.get_states() if tracker is not None else None
        if tracker is not None:
            tracker.set_states(states)
        with (
            fp8_autocast(enabled, fp8_recipe=recipe, fp8_group=group),
            activation_recompute_forward(True, True),
        ):
            outputs = function(*args, **kwargs)
        if tracker is not None:
            tracker.set_states(now)
        return outputs

    # Not ``checkpoint``, whose decorator imports PyTorch's compiler.
    return CheckpointFunction.apply(run, True, *args)
