# SPDX-License-Identifier: Apache-2.0
"""What Megatron itself reads from a checkpoint, before it loads any of it.

With ``--ckpt-format torch`` this is all of a rank's state, as the rank that saved it passed it on;
with other formats the random states. (``load_checkpoint`` in megatron/training/checkpointing.py,
``load_parameter_state_from_dp_zero`` in megatron/core/optimizer/distrib_optimizer.py.)
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_ttrace.mcore.names import unwrap
from megatron_ttrace.mcore.optimizer import MOMENTS, family, leaves_of, owned_by
from megatron_ttrace.mcore.replaced import wrap
from megatron_ttrace.trace.records import Kind

_LITERAL = "LEGACY"
"""Megatron's ``CheckpointType`` of a checkpoint whose state is as a rank has it."""
_RANDOM = "rng_state"


@dataclasses.dataclass(frozen=True, slots=True)
class Stepped:
    """What was read of a parameter's optimizer state, as of the whole local parameter.

    Attributes:
        main: main weights, if they were read.
        state: the torch optimizer's, by name.
        moments: which of it are moments.
    """

    main: torch.Tensor | None
    state: Mapping[str, Any]
    moments: Mapping[str, Kind]


class Reading:
    """Copies of what is read, for loading may go on with the same tensors.

    ``state`` is Megatron's state dict, or of it what is literal.
    """

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}
        self._buckets: dict[int, Mapping[Any, Any]] = {}

    def watch(self) -> None:
        """Copy what is read from now on."""
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
        from megatron.training import checkpointing

        def reading(read: Callable[..., Any], *args: Any, **more: Any) -> Any:
            result = read(*args, **more)
            state, kind = result[0], result[3]
            if not more.get("rank0") and state is not None:
                self.keep(state, is_literal=getattr(kind, "name", "") == _LITERAL)
            return result

        def distributing(distribute: Any, optimizer: Any, state: Any, **more: Any) -> Any:
            if state is not None and not more.get("update_legacy_format"):
                self.keep_buckets(optimizer, state)
            return distribute(optimizer, state, **more)

        wrap(checkpointing, "_load_base_checkpoint", reading)
        wrap(DistributedOptimizer, "load_parameter_state_from_dp_zero", distributing)

    def keep(self, state: Mapping[str, Any], *, is_literal: bool) -> None:
        """Copy a state dict."""
        names = state if is_literal else [_RANDOM]
        self.state = {name: copy.deepcopy(state[name]) for name in names if name in state}

    def keep_buckets(self, optimizer: Any, state: Mapping[Any, Any]) -> None:
        """Copy what the first data-parallel rank reads for all."""
        self._buckets[id(optimizer)] = copy.deepcopy(state)

    @property
    def is_literal(self) -> bool:
        """Whether more than random states was read."""
        return bool(self.state.keys() - {_RANDOM})

    def of_model(self, chunks: list[torch.nn.Module]) -> dict[torch.Tensor, torch.Tensor]:
        """What was read of parameters and buffers."""
        values_by_tensor = {}
        for number, chunk in enumerate(chunks):
            values = self.state.get("model" if len(chunks) == 1 else f"model{number}", {})
            model = unwrap(chunk)
            for named in (model.named_parameters, model.named_buffers):
                for name, tensor in named(remove_duplicate=False):
                    if torch.is_tensor(value := values.get(name)) and value.shape == tensor.shape:
                        values_by_tensor[tensor] = value
        return values_by_tensor

    def of_optimizer(self, optimizer: Any) -> dict[torch.nn.Parameter, Stepped]:
        """What was read of the state of parameters; of divided state, on the rank that read it."""
        readings = [
            (leaf, _of_leaf(leaf, state))
            for leaf, state in _by_leaf(optimizer, self.state.get("optimizer"))
        ]
        readings += [
            (leaf, _of_buckets(leaf, buckets))
            for leaf in leaves_of(optimizer)
            if (buckets := self._buckets.get(id(leaf))) is not None
        ]
        return {
            parameter: Stepped(main, state, MOMENTS.get(family(leaf.optimizer), {}))
            for leaf, stepped in readings
            for parameter, main, state in stepped
        }

    def of_optimizers(self, optimizer: Any) -> list[Mapping[str, Any]]:
        """The state dict of each optimizer in a chain."""
        return [state for _, state in _by_leaf(optimizer, self.state.get("optimizer"))]

    def random(self, place: str, dp_rank: int) -> Mapping[str, Any] | None:
        """The random states, as of Megatron's ``get_rng_state``; ``place`` is ``(PP, TP)``."""
        states = self.state.get(_RANDOM)
        if isinstance(states, Mapping):
            states = states.get(place)
        if not states:
            return None
        return states[dp_rank if len(states) > 1 else 0]  # type: ignore[no-any-return]


def _by_leaf(optimizer: Any, state: Any) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """The state dict of each optimizer in a chain; a chain of one has that one's."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        if isinstance(state, Mapping) and getattr(optimizer, "optimizer", None) is not None:
            yield optimizer, state
        return
    parts = [state] if len(chained) == 1 else state
    if isinstance(parts, list) and len(parts) == len(chained):
        for part, its_state in zip(chained, parts, strict=True):
            yield from _by_leaf(part, its_state)


type _Read = tuple[torch.nn.Parameter, torch.Tensor | None, Mapping[str, Any]]


def _of_leaf(leaf: Any, state: Mapping[str, Any]) -> Iterator[_Read]:
    """Of an optimizer that steps whole parameters: torch numbers these in the groups' order."""
    groups = zip(
        getattr(leaf, "fp32_from_float16_groups", ()),
        state.get("fp32_from_fp16_params", ()),
        strict=False,
    )
    mains = {id(main): value for pair in groups for main, value in zip(*pair, strict=False)}
    stepped = (p for group in leaf.optimizer.param_groups for p in group["params"])
    numbers = {id(parameter): number for number, parameter in enumerate(stepped)}
    states = state.get("optimizer", state).get("state", {})
    for parameter, part in owned_by(leaf).items():
        if part.range is None and part.sharded is None:
            yield parameter, mains.get(id(part.main)), states.get(numbers.get(id(part.key)), {})


def _of_buckets(leaf: Any, buckets: Mapping[Any, Any]) -> Iterator[_Read]:
    """Of a distributed optimizer: a flat tensor of all buckets of a buffer, without their ends."""
    for number, (buffer, by_dtype) in enumerate(zip(leaf.buffers, leaf.gbuf_ranges, strict=True)):
        values = buckets[number][next(iter(by_dtype))]
        first = 0
        for bucket in buffer.buckets:
            for parameter, (start, end) in bucket.param_to_index.items():
                state = {
                    name: value[first + start : first + end].view(parameter.shape)
                    for name, value in values.items()
                    if torch.is_tensor(value)
                }
                yield parameter, state.pop("param", None), state
            first += bucket.numel_unpadded
