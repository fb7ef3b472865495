# SPDX-License-Identifier: Apache-2.0
"""Megatron's own initial values, before a traced step overwrites them."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator

import torch

from megatron_ttrace.capture.step import TracedModel, has_positions
from megatron_ttrace.mcore import quiet
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.plan import describe
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.moments import Moments, moments_of
from megatron_ttrace.trace.views import local_view


@dataclasses.dataclass(frozen=True, slots=True)
class Initial:
    """How the initial values of this rank's part of a parameter or buffer are distributed."""

    name: str
    dtype: str
    logical_shape: tuple[int, ...]
    placement: str
    boxes: tuple[Box, ...]
    moments: Moments


@contextlib.contextmanager
def new_memory_is_nan() -> Iterator[None]:
    """Within this context new memory holds NaN, so that it shows if nothing initialises it.

    It could hold anything, such as what an equal parameter had before, or zeros.
    """
    # PyTorch fills memory in this mode (torch.utils.deterministic.fill_uninitialized_memory).
    # ``use_deterministic_algorithms`` would import its compiler first, which takes seconds.
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode(before or "warn")
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def clear_scratch(chunks: Iterable[torch.nn.Module]) -> None:
    """Buffers that no checkpoint has, and that nothing has initialised, are zero."""
    for module in (module for chunk in chunks for module in chunk.modules()):
        for name in module._non_persistent_buffers_set:
            buffer = module._buffers[name]
            if buffer is not None and buffer.is_floating_point() and buffer.itemsize > 1:
                buffer.detach().masked_fill_(buffer.isnan(), 0.0)


def initial_values(model: TracedModel, args: MegatronArguments) -> list[Initial]:
    """The moments of all parameters and buffers that this rank holds; nothing is gathered.

    Tables of positions and masks with infinities are left out: they are no samples of one
    distribution. With ``use_cpu_initialization`` each rank cuts its part out of the same random
    numbers (``_initialize_affine_weight_cpu``, Megatron's tensor_parallel/layers.py), of a gated
    layer in other places.
    """
    is_placed = not getattr(args, "use_cpu_initialization", False)
    held = [(place, data) for _, place, data in model.held()]
    states = [quiet.state_of_divided(experts=experts) for experts in (False, True)]
    drawn_from = [0 if state is None else checksum(state) for state in states]
    for names in model.names:
        for name, buffer in names.buffers.items():
            is_table = has_positions(name, names) or bool(buffer.isinf().any())
            if buffer.is_floating_point() and not is_table:
                held.append((ParameterPlace(name, tuple(buffer.shape), ()), buffer))
    initial = []
    with torch.no_grad():
        for place, data in held:
            boxes = place.boxes(model.mesh)
            pieces = [
                moments_of(local_view(data, box), box.logical if is_placed else ()) for box in boxes
            ]
            initial.append(
                Initial(
                    name=place.name,
                    dtype=str(data.dtype).removeprefix("torch."),
                    logical_shape=place.logical_shape,
                    placement=describe(place.placement),
                    boxes=boxes,
                    moments=sum(pieces, Moments(state=drawn_from[is_within_experts(place.name)])),
                )
            )
    return initial


def as_training_begins(
    model: TracedModel, args: MegatronArguments, initial: list[Initial]
) -> list[Initial]:
    """Measure initial values again: a callback may have changed them since the model was built.

    The random numbers are still those that building the model left.
    """
    if not initial:
        return []
    states = {values.name: values.moments.state for values in initial}
    return [
        dataclasses.replace(now, moments=dataclasses.replace(now.moments, state=states[now.name]))
        for now in initial_values(model, args)
        if now.name in states
    ]


def uninitialised(args: MegatronArguments, *, is_loaded: bool) -> str:
    """Why a run's initial values say nothing; empty when they do."""
    if is_loaded:
        return "the run starts from a checkpoint: initial values are not judged"
    if not getattr(args, "perform_initialization", True):
        return "--no-initialization: initial values are not judged"
    return ""
