# SPDX-License-Identifier: Apache-2.0
"""What is switched off, on or restored for a rehearsal: random choices, reruns, metrics."""

import functools
import inspect
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.modules.dropout import _DropoutNd

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.replaced import kept, replaced
from megatron_ttrace.trace.checksum import checksum

_DROPOUT_ATTRIBUTES = ("hidden_dropout", "attention_dropout", "attention_dropout_p")

_DROPOUTS = "dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout".split()
"""Functions of ``torch.nn.functional``, ..."""
_KERNELS = "dropout alpha_dropout feature_dropout feature_alpha_dropout".split()
KERNELS: list[tuple[Any, str]] = [
    (owner, f"{name}{place}")
    for owner in (torch, torch._VF)
    for name in _KERNELS
    for place in ("", "_")
]
"""... and what they call, as a module does that imported one of them by its own name."""

_RANDOM_ROUTING = {
    "moe_router_force_load_balancing": False,
    "moe_router_force_biased": None,
    "moe_input_jitter_eps": None,
}
"""Options with which a router draws random numbers (megatron/core/transformer/moe/router.py), and
what they are without."""
_SWITCHED_OFF = {**_RANDOM_ROUTING, "mlp_chunks_for_training": 1}

_THRESHOLDS = {"qk_clip_threshold": 0.1, "activation_func_clamp_value": 1.0}
"""Options, and what some attention scores, or inputs of activation functions, exceed. In 16 bits
rounding moves some of the latter across, and what their gradients are computed from is blind."""
_IN_FLOAT32 = "activation_func_clamp_value"


class Off(float):
    """The probability of dropout that is switched off.

    Attributes:
        was: what it is otherwise.
    """

    def __new__(cls, was: float = 0.0) -> "Off":
        """Zero."""
        off = super().__new__(cls, 0.0)
        off.was = was
        return off

    was: float


def has_dropout(args: MegatronArguments) -> bool:
    """Whether this run asks for dropout."""
    return bool(args.hidden_dropout or args.attention_dropout)


def has_own_dropout(args: MegatronArguments, chunks: Iterable[torch.nn.Module]) -> bool:
    """Whether modules of a fork have dropout that the arguments do not ask for."""
    return not has_dropout(args) and any(True for _ in _dropping(chunks))


def has_random_routing(args: MegatronArguments) -> bool:
    """Whether routers draw random numbers."""
    return bool(getattr(args, "num_experts", None)) and any(
        getattr(args, name, off) != off for name, off in _RANDOM_ROUTING.items()
    )


def has_mlp_chunks(args: MegatronArguments) -> bool:
    """Whether an MLP runs for a chunk of its tokens at a time."""
    return (getattr(args, "mlp_chunks_for_training", None) or 1) > 1


def without_options(chunks: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Let routers choose by their own scores, and each module run once.

    Of random numbers each rank draws its own. A chunk of a rank's tokens is none of one device's.
    """
    return replaced(
        (config, name, off)
        for chunk in chunks
        for module in chunk.modules()
        for name, off in _SWITCHED_OFF.items()
        if getattr(config := getattr(module, "config", None), name, off) != off
    )


def without_dumps(args: MegatronArguments) -> AbstractContextManager[None]:
    """Write nothing that a step of Megatron's writes: some files only grow."""
    dumped = ("activations", "dgrads", "params", "tokens_per_expert", "wgrads")
    return replaced((args, f"save_{what}_interval", None) for what in dumped)


def clipped(chunks: Sequence[torch.nn.Module]) -> AbstractContextManager[None]:
    """Let ``--qk-clip`` and ``--activation-func-clamp-value`` act.

    Start values give nothing near the usual thresholds.
    """
    configs: list[Any] = [
        module.config for chunk in chunks for module in chunk.modules() if hasattr(module, "config")
    ]
    return replaced(
        (config, name, threshold)
        for config in configs
        for name, threshold in _THRESHOLDS.items()
        if (getattr(config, name, None) or 0.0) > threshold
        and (name != _IN_FLOAT32 or config.params_dtype.itemsize > 2)
    )


def without_dropout(
    chunks: Sequence[torch.nn.Module], off: float = 0.0, drops: Callable[[], None] = lambda: None
) -> AbstractContextManager[None]:
    """Switch dropout off, because ranks of different layouts draw different masks.

    ``bias_dropout_add`` reads ``hidden_dropout`` of its layer, attention and embedding have
    modules of ``torch.nn``, and TransformerEngine keeps ``attention_dropout``. A fork's module may
    have its probability anywhere, and give it to PyTorch's function: then ``drops`` is called.
    With an :class:`Off`, calls can be followed; kernels on a GPU are compiled for plain numbers.
    """

    def switched_off(
        dropout: Callable[..., Any], input: torch.Tensor, p: float = 0.5, *args: Any, **kwargs: Any
    ) -> Any:
        if p and (args[0] if args else kwargs.get("training", kwargs.get("train", True))):
            drops()
        return dropout(input, p and instead(p), *args, **kwargs)

    def without(attention: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = given_to_attention(*args, **kwargs)
        if given.arguments.get("dropout_p"):
            drops()
            given.arguments["dropout_p"] = 0.0
        return attention(*given.args, **given.kwargs)

    def instead(p: float) -> float:
        return Off(p) if isinstance(off, Off) else off

    values = [(m, name, instead(getattr(m, name))) for m, name in _dropping(chunks)]
    functional: Any = torch.nn.functional
    named: list[tuple[Any, str, Callable[..., Any]]]
    named = [(functional, name, switched_off) for name in _DROPOUTS]
    named += [(owner, name, switched_off) for owner, name in KERNELS]
    named.append((functional, "scaled_dot_product_attention", without))
    off_too = [(o, n, functools.partial(f, getattr(o, n))) for o, n, f in named]
    return replaced([*values, *off_too])


def given_to_attention(*args: Any, **kwargs: Any) -> inspect.BoundArguments:
    """The arguments of PyTorch's attention by name."""
    return inspect.signature(_attention).bind(*args, **kwargs)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    *_: Any,
    **__: Any,
) -> None:
    """As PyTorch's, which has no signature."""


def _dropping(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[torch.nn.Module, str]]:
    """Modules with dropout, each with the name of its probability."""
    for chunk in chunks:
        for module in chunk.modules():
            for name in _names(module):
                if isinstance(value := getattr(module, name, None), float) and value > 0:
                    yield module, name


def _names(module: torch.nn.Module) -> tuple[str, ...]:
    return ("p",) if isinstance(module, _DropoutNd) else _DROPOUT_ATTRIBUTES


@contextmanager
def one_attempt() -> Iterator[None]:
    """Switch off Megatron's rerun state machine, which would count a rehearsal as a step.

    On a NaN loss or gradient it would also raise, before the check finds the module where it began.
    """
    from megatron.core.rerun_state_machine import RerunMode, get_rerun_state_machine

    machine = get_rerun_state_machine()
    with kept(vars(machine)):
        machine.mode = RerunMode.DISABLED
        machine.validate_result = lambda *_, **__: None  # the check judges results
        yield


@contextmanager
def metrics_kept() -> Iterator[None]:
    """Discard what a rehearsal adds to the metrics that are logged with a step (MoE, MTP).

    And what it would add to files that ``--moe-routing-trace-path`` writes.
    """
    with ExitStack() as stack:
        for tracker in _trackers():
            stack.enter_context(kept(tracker))
            tracker.clear()
        module = sys.modules.get("megatron.core.transformer.moe.router_trace")
        if tracer := module and module.get_moe_router_tracer():
            stack.enter_context(kept(vars(tracer)))
            tracer._stopped, tracer.max_steps = True, math.inf
        yield


def empty_metrics() -> None:
    """Forget metrics of earlier steps: some are sums since the run began (those of MTP)."""
    for tracker in _trackers():
        tracker.clear()


def _trackers() -> Iterator[dict[str, Any]]:
    """Where modules sum up metrics over the microbatches of a step."""
    from megatron.core.transformer.experimental_attention_variant import dsa
    from megatron.core.transformer.moe import moe_logging
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    yield MTPLossLoggingHelper.tracker
    yield dsa.DSAIndexerLossLoggingHelper.tracker
    yield moe_logging.get_moe_metrics_tracker()._metrics


def state_of_divided(*, experts: bool) -> torch.Tensor | None:
    """The random state that a rank draws divided parameters from; ``None`` without one.

    Ranks with different parts have different seeds (megatron/core/tensor_parallel/random.py).
    """
    from megatron.core.tensor_parallel import random as states

    tracker = states.get_cuda_rng_tracker()
    name = "expert-parallel-rng" if experts else "model-parallel-rng"
    state = tracker.get_states().get(name) if tracker.is_initialized() else None
    return state if torch.is_tensor(state) else None


@contextmanager
def python_state_kept() -> Iterator[None]:
    """Restore Python's random state: importing packages that only a check needs may draw from it.

    What training draws, as to read its data, must not be within.
    """
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Restore random states, so that the real step draws the numbers that a rehearsal drew."""
    restore, numpy_state = random_states(), np.random.get_state()
    try:
        with python_state_kept():
            yield
    finally:
        restore()
        np.random.set_state(numpy_state)


def drawn_from() -> list[int]:
    """Marks of the states that modules on a CPU draw random numbers from."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = [*tracker.get_states().values()] if tracker.is_initialized() else []
    plain = (s.get_state() if isinstance(s, torch.Generator) else s for s in states)
    return [*map(checksum, (torch.get_rng_state(), *plain))]


def random_states() -> Callable[[], None]:
    """Megatron's and torch's random states of now; returns what restores them."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    states = tracker.get_states() if tracker.is_initialized() else None
    # What CUDA graphs draw from are generators (--te-rng-tracker), which advance in place.
    generators = [
        (state, state.get_state())
        for state in (states or {}).values()
        if isinstance(state, torch.Generator)
    ]
    before = torch.get_rng_state(), torch.cuda.get_rng_state()

    def restore() -> None:
        torch.set_rng_state(before[0])
        torch.cuda.set_rng_state(before[1])
        if states is not None:
            tracker.set_states({**states})  # it changes them
        for generator, state in generators:
            generator.set_state(state)

    return restore
