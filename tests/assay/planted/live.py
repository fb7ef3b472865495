# SPDX-License-Identifier: Apache-2.0
"""The state of a rank that saves or loads, so that faults of checkpoints can change it."""

import dataclasses
import functools
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch

Key = tuple[str, str]
"""A state (``weight``, ``main``, ``buffer``, or as the optimizer calls it) and a canonical name; of
numbers ``number`` and the number's name."""
NUMBER = "number"


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor, or the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


@dataclasses.dataclass
class Live:
    """State of a rank while it saves or loads.

    Attributes:
        chunks, optimizer, scheduler: Megatron's.
        before: copies of all tensors and numbers at an earlier time: before the last step when
            saving, before loading otherwise.
        described: the sharded state dict, for mechanisms that change descriptions.
        undo: what makes all changes good, last first.
        truth: the keys that were changed.
    """

    chunks: list[Any] = dataclasses.field(default_factory=list)
    optimizer: Any = None
    scheduler: Any = None
    before: dict[Key, Any] = dataclasses.field(default_factory=dict)
    described: dict[str, Any] = dataclasses.field(default_factory=dict)
    undo: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    truth: list[Key] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def parameters(self) -> dict[str, Any]:
        """By canonical name."""
        return {
            name: parameter for names in self._names for name, parameter in names.parameters.items()
        }

    @functools.cached_property
    def _names(self) -> list[Any]:
        from megatron.core import mpu

        from megatron_ttrace.mcore.names import canonical_names, unwrap

        chunks = [unwrap(chunk) for chunk in self.chunks]
        experts = getattr(chunks[0].config, "num_moe_experts", None) or 0
        offset = (
            mpu.get_expert_model_parallel_rank() * experts
        ) // mpu.get_expert_model_parallel_world_size()
        return [canonical_names(chunk, expert_offset=offset) for chunk in chunks]

    def tensors(self) -> dict[Key, torch.Tensor]:
        """Everything this rank holds, as views that can be written."""
        from megatron_ttrace.mcore.optimizer import owned_by

        owned = owned_by(self.optimizer)
        tensors: dict[Key, torch.Tensor] = {}
        for name, parameter in self.parameters.items():
            weight = local(parameter.data)
            tensors["weight", name] = weight
            part = owned.get(parameter)
            if part is None:
                continue
            main = local(part.main.data)
            if main.untyped_storage().data_ptr() != weight.untyped_storage().data_ptr():
                tensors["main", name] = main
            for state, value in part.inner.state.get(part.key, {}).items():
                if torch.is_tensor(value) and local(value).numel() > 1:
                    tensors[state, name] = local(value)
        for names in self._names:
            for name, buffer in names.buffers.items():
                tensors["buffer", name] = buffer
        return {key: value for key, value in tensors.items() if value.numel()}

    def leaves(self) -> Iterator[Any]:
        """Megatron's optimizers that step parameters."""
        from megatron_ttrace.mcore.optimizer import leaves_of

        yield from (leaf for leaf in leaves_of(self.optimizer) if getattr(leaf, "optimizer", None))

    def remember(self) -> None:
        """Copy everything to :attr:`before`."""
        from megatron.training import get_args

        args = get_args()
        self.before = {key: value.detach().clone() for key, value in self.tensors().items()}
        self.before[NUMBER, "consumed_train_samples"] = args.consumed_train_samples
        self.before[NUMBER, "num_steps"] = self.scheduler.num_steps
        self.before[NUMBER, "rng"] = random_state()

    def choose(self, chance: random.Random, wanted: Callable[[str, str], bool]) -> Key:
        """A key that some rank has with values other than zero; the same on all ranks."""
        keys = {key for key, value in self.tensors().items() if wanted(*key) and bool(value.any())}
        return chance.choice(sorted(set().union(*gathered(keys))) or [("", "")])

    def change(self, key: Key, new: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Replace the values of a key, if this rank has it."""
        tensor = self.tensors().get(key)
        if tensor is None:
            return
        old = tensor.detach().clone()
        with torch.no_grad():
            tensor.copy_(new(old).to(tensor.dtype))
        self.undo.append(functools.partial(_write, tensor, old))
        if not torch.equal(tensor, old):
            self.truth.append(key)

    def set(self, owner: Any, field: str, value: Any, name: str) -> None:
        """Replace an attribute, or an entry of a dictionary."""
        if isinstance(owner, dict):
            self.undo.append(functools.partial(owner.__setitem__, field, owner[field]))
            owner[field] = value
        else:
            self.undo.append(functools.partial(setattr, owner, field, getattr(owner, field)))
            setattr(owner, field, value)
        self.truth.append((NUMBER, name))

    def related(self, chance: random.Random, name: str) -> list[Key]:
        """All states of a parameter, or those of the optimizer only, or one of them."""
        everything = sorted(
            set().union(*gathered({key for key in self.tensors() if key[1] == name}))
        )
        inner = [key for key in everything if key[0] != "weight"] or everything
        return chance.choice([everything, inner, [chance.choice(inner)]])


def _write(tensor: torch.Tensor, old: torch.Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(old)


def gathered(mine: Any, group: Any = None) -> list[Any]:
    """One object of each rank."""
    objects = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(objects, mine, group=group)
    return objects


def random_state() -> tuple[Any, ...]:
    from megatron.core import tensor_parallel

    return (torch.get_rng_state(), tensor_parallel.get_cuda_rng_tracker().get_states())


def set_random_state(state: tuple[Any, ...]) -> None:
    from megatron.core import tensor_parallel

    torch.set_rng_state(state[0])
    tensor_parallel.get_cuda_rng_tracker().set_states(state[1])
