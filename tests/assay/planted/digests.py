# SPDX-License-Identifier: Apache-2.0
"""Checksums of everything a rank has when training begins or ends, to prove that a fault is real.

Nothing of the checker is used: tensors are listed as PyTorch's modules and optimizers list them.
Two runs of the same layout are compared, so no name has to mean the same elsewhere.
"""

import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.assay.planted.mistakes import global_rank, wrap

_SETUP = "megatron.training.training:setup_model_and_optimizer"
_TIMING = re.compile(r"\[\d{4}-|elapsed|throughput|power|energy|memory")
"""Parts of a line of Megatron's log that differ from run to run."""


def at_start(directory: Path) -> None:
    """Write the checksums to ``directory/RANK.json`` when the model is set up."""

    def setup(old: Any, *args: Any, **more: Any) -> Any:
        model, optimizer, scheduler = built = old(*args, **more)
        _write(
            directory, {**dict(_tensors(model, optimizer)), **dict(_numbers(optimizer, scheduler))}
        )
        return built

    wrap(_SETUP, setup)


def at_end(directory: Path) -> Callable[[], None]:
    """Watch a training; what is returned writes its checksums and its log after it."""
    state: list[Any] = []
    log: list[str] = []

    def setup(old: Any, *args: Any, **more: Any) -> Any:
        built = old(*args, **more)
        state[:] = built[:2]
        return built

    def print_rank_last(old: Any, message: str) -> None:
        parts = (part.strip() for part in str(message).split("|"))
        log.extend(part for part in parts if part and not _TIMING.search(part))
        old(message)

    wrap(_SETUP, setup)
    wrap("megatron.training.training:print_rank_last", print_rank_last)
    return lambda: _write(directory, {**dict(_tensors(*state)), "log": log})


def _write(directory: Path, content: dict[str, Any]) -> None:
    Path(directory, f"{global_rank()}.json").write_text(json.dumps(content), encoding="utf-8")


def _tensors(model: Any, optimizer: Any) -> Iterator[tuple[str, str]]:
    for number, chunk in enumerate(model):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"model{number}.{name}", of(tensor)
    for name, value in _held(optimizer):
        if torch.is_tensor(value):
            yield name, of(value)


def _numbers(optimizer: Any, scheduler: Any) -> Iterator[tuple[str, str]]:
    from megatron.core import tensor_parallel
    from megatron.training import get_args

    for name, value in _held(optimizer):
        if not torch.is_tensor(value):
            yield name, of(value)
    for number, leaf in enumerate(_leaves(optimizer)):
        if getattr(leaf, "grad_scaler", None) is not None:
            yield f"optimizer{number}.scale", repr(leaf.grad_scaler.state_dict())
    yield "scheduler", repr(scheduler.state_dict())
    args = get_args()
    for name in ("iteration", "consumed_train_samples", "skipped_train_samples"):
        yield name, repr(getattr(args, name, None))
    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    yield "rng", of(repr((torch.get_rng_state().tolist(), random.getstate())))
    yield "rng.tracker", of(repr({name: of(state) for name, state in states.items()}))


def _held(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """What the parameter groups of PyTorch's optimizers hold, and the state of each parameter."""
    for number, leaf in enumerate(_leaves(optimizer)):
        for order, group in enumerate(leaf.optimizer.param_groups):
            place = f"optimizer{number}.{order}"
            yield from ((f"{place}.{name}", group[name]) for name in group if name != "params")
            for index, main in enumerate(group["params"]):
                yield f"{place}.{index}", main
                for state, value in sorted(leaf.optimizer.state.get(main, {}).items()):
                    yield f"{place}.{index}.{state}", value


def _leaves(optimizer: Any) -> Iterator[Any]:
    for leaf in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(leaf, "chained_optimizers", None) is not None:
            yield from _leaves(leaf)
        elif getattr(leaf, "optimizer", None) is not None:
            yield leaf


def of(value: Any) -> str:
    """The checksum of a value; of a tensor, of this rank's part."""
    if torch.is_tensor(value):
        tensor = getattr(value, "_local_tensor", value).detach().cpu().contiguous()
        if not tensor.untyped_storage().nbytes():
            return "released"
        # Of a copy: what NumPy has seen cannot be resized.
        return hashlib.sha256(tensor.reshape(-1).clone().view(torch.uint8).numpy()).hexdigest()
    return hashlib.sha256(repr(value).encode()).hexdigest()
