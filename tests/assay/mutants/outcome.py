# SPDX-License-Identifier: Apache-2.0
"""What a run without a check ends with, to the bit, and what it logged on the way.

The checker is not used: whether a fault has an effect is decided without it.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import xxhash

_TIMING = re.compile(r"\[\d{4}-|elapsed|throughput|power|energy|memory")
"""Parts of a line of Megatron's log that differ from run to run."""


def watch() -> Callable[[], list[str]]:
    """Watch Megatron's training; what is returned is to be called after it.

    That gives a line for each parameter, buffer and moment on this rank with a checksum of its
    bytes, and the lines of the log.
    """
    from megatron.training import training

    setup, show = training.setup_model_and_optimizer, training.print_rank_last
    held: list[Any] = []
    logged: list[str] = []

    def setup_model_and_optimizer(*args: Any, **kwargs: Any) -> Any:
        made = setup(*args, **kwargs)
        held[:] = made[:2]
        return made

    def print_rank_last(message: str) -> None:
        parts = (part.strip() for part in str(message).split("|"))
        logged.extend(part for part in parts if part and not _TIMING.search(part))
        show(message)

    training.setup_model_and_optimizer = setup_model_and_optimizer
    training.print_rank_last = print_rank_last
    return lambda: [*_checksums(*held), *logged]


def _checksums(chunks: list[torch.nn.Module], optimizer: Any) -> Iterator[str]:
    for number, chunk in enumerate(chunks):
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers()):
            yield f"{number} {name} {_checksum(tensor)}"
    for number, one in enumerate(getattr(optimizer, "chained_optimizers", [optimizer])):
        inner = one.optimizer
        for group in inner.param_groups:
            for place, parameter in enumerate(group["params"]):
                yield f"optimizer {number} {place} {_checksum(parameter)}"
                for name, value in sorted(inner.state[parameter].items()):
                    if isinstance(value, torch.Tensor):
                        yield f"optimizer {number} {place} {name} {_checksum(value)}"


def _checksum(tensor: torch.Tensor) -> str:
    data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return xxhash.xxh3_128_hexdigest(data.numpy())
