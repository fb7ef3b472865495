# SPDX-License-Identifier: Apache-2.0
"""The CUDA random generator becomes the CPU's.

Megatron keeps one random state per purpose (data parallel, tensor parallel, expert parallel) and
swaps them in and out of the *CUDA* generator, because that is the one dropout and weight
initialisation draw from. On the CPU both draw from ``torch.default_generator``; so that generator
stands in for the CUDA one, and which ranks draw equal numbers stays exactly as on a GPU.

The price of one generator: what on a GPU draws from the CPU's must not move it. Two such places are
known, both undone: the data loader's seed (``dataloader.py``) and the warm-up (``warmup.py``).
"""

import logging
from typing import Any

import torch


def _get_state(device: Any = "cuda") -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.default_generator.set_state(new_state)


def _manual_seed(seed: int) -> None:
    # Not torch.manual_seed: that one calls back here, through torch.cuda.manual_seed_all.
    torch.default_generator.manual_seed(int(seed))


def _seed() -> None:
    torch.default_generator.seed()


class _Generators:
    """``torch.cuda.default_generators``: the same generator under every device index."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return torch.cuda.device_count()


def _keep(record: logging.LogRecord) -> bool:
    # Megatron warns when code inside its CUDA random context moves the CPU's generator, which
    # here is the same one: the warning would come with every initialised weight.
    return "CPU RNG state changed" not in record.getMessage()


def install() -> None:
    """Replace the random-state functions of ``torch.cuda`` and ``torch.cuda.random``."""
    for module in (torch.cuda, torch.cuda.random):
        cuda: Any = module
        cuda.get_rng_state = _get_state
        cuda.set_rng_state = _set_state
        cuda.get_rng_state_all = lambda: [_get_state()]
        cuda.set_rng_state_all = lambda states: _set_state(states[0])
        cuda.manual_seed = cuda.manual_seed_all = _manual_seed
        cuda.seed = cuda.seed_all = _seed
        cuda.initial_seed = lambda: torch.default_generator.initial_seed()
    torch.cuda.default_generators = _Generators()  # type: ignore[assignment]
    logging.getLogger("megatron.core.tensor_parallel.random").addFilter(_keep)
