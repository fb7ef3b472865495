# SPDX-License-Identifier: Apache-2.0
"""Activation recomputation (``checkpoint``), and the tracker of named random states.

Recomputation runs forward twice and keeps the inputs only. The second run has to compute what the
first did: the random states are put back, and FP8 modules are told which of the two they are in, so
that they round with the scales of the first run.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

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


class _RandomStates:
    """The generator's state and the named ones."""

    def __init__(self, get_tracker: Callable[[], Any] | None) -> None:
        self._tracker = get_tracker() if get_tracker is not None else None
        self._state = torch.get_rng_state()
        self._named = self._tracker.get_states() if self._tracker is not None else None

    def restore(self) -> None:
        torch.set_rng_state(self._state)
        if self._tracker is not None:
            self._tracker.set_states(self._named)


def _detached(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)


class CheckpointFunction(torch.autograd.Function):
    """Autograd around the two runs."""

    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        get_tracker: Callable[[], Any] | None,
        kwargs: dict[str, Any],
        *args: Any,
    ) -> Any:
        """Run without recording, and keep the arguments."""
        ctx.function, ctx.get_tracker, ctx.kwargs = function, get_tracker, kwargs
        ctx.random_states = _RandomStates(get_tracker)
        ctx.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        ctx.fp8_recipe = FP8GlobalStateManager.get_fp8_recipe() if ctx.fp8 else None
        ctx.fp8_group = FP8GlobalStateManager.get_fp8_group()
        with torch.no_grad(), activation_recompute_forward(True, False):
            outputs = function(*args, **kwargs)
        ctx.is_tensor = [isinstance(value, torch.Tensor) for value in args]
        ctx.others = [value for value in args if not isinstance(value, torch.Tensor)]
        ctx.save_for_backward(*[value for value in args if isinstance(value, torch.Tensor)])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Run again with recording, and go back through it."""
        tensors, values = iter(ctx.saved_tensors), iter(ctx.others)
        args = [
            _detached(next(tensors)) if is_tensor else next(values) for is_tensor in ctx.is_tensor
        ]
        now = _RandomStates(ctx.get_tracker)
        ctx.random_states.restore()
        with (
            torch.enable_grad(),
            fp8_autocast(ctx.fp8, fp8_recipe=ctx.fp8_recipe, fp8_group=ctx.fp8_group),
            activation_recompute_forward(True, True),
        ):
            outputs = ctx.function(*args, **ctx.kwargs)
        now.restore()
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        pairs = [
            (output, grad)
            for output, grad in zip(outputs, grads, strict=True)
            if isinstance(output, torch.Tensor) and output.requires_grad and grad is not None
        ]
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        return (
            None,
            None,
            None,
            *(value.grad if isinstance(value, torch.Tensor) else None for value in args),
        )


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Callable[[], Any] | None = None,
    tp_group: Any = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Run ``function`` now and again in the backward pass.

    ``distribute_saved_activations`` would cut what is kept over the tensor-parallel ranks, to spare
    memory; the numbers are the same without.
    """
    return CheckpointFunction.apply(function, get_rng_state_tracker, kwargs, *args)
