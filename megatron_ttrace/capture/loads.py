# SPDX-License-Identifier: Apache-2.0
"""The loads by which Megatron updates the biases of routers.

A bias changes by a fixed step, up or down. That hides most errors in what the direction was
computed from: they show in a later step, when an expert is nearer to the mean.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ttrace.mcore import balancing, statistics
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.replaced import wrapped


@contextlib.contextmanager
def watched(
    chunks: list[Names],
    attempt: Callable[[Callable[[], Any]], Any],
    take: Callable[[str, torch.Tensor], None],
) -> Iterator[None]:
    """Within this context hand over what each update of the biases is computed from.

    ``take`` is called with the name of a bias and the relative loads of its experts; ``attempt``
    runs work of ours: if that fails, Megatron's step goes on.
    """

    def hand_over(tokens: torch.Tensor) -> None:
        names, loads = balancing.updated_biases(chunks), balancing.loads(tokens)
        # If Megatron updates others than these, what it updates is missing.
        if len(names) == len(loads):
            for name, load in zip(names, loads, strict=True):
                take(name, load)

    def update(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        updated = original(*args, **kwargs)
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        attempt(lambda: hand_over(next(iter(given.values()))))
        return updated

    with wrapped(statistics.users({balancing.UPDATE: update})):
        yield
