# SPDX-License-Identifier: Apache-2.0
"""Isolation: a tensor gets the reference's values and keeps its place in the autograd graph.

Every captured tensor is first compared as the candidate computed it, then replaced by the
reference's values: in the forward pass when it enters or leaves a module, in the backward pass when
its gradient is complete. So each tensor is computed from exact ones, an error does not spread, and
a second fault is not hidden behind the first.

``x + (reference - x).detach()`` would not be exact, and writing into ``x`` would change whatever
shares its memory (a cached rotary table, a communication buffer). So a new tensor takes its place,
and an autograd function passes the gradient to the old one.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_ttrace.mcore.replaced import wrapped
from megatron_ttrace.mcore.statistics import CLIP, whole


class _Substitute(torch.autograd.Function):
    """The values of one tensor with the history of another."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, values: list[torch.Tensor]) -> torch.Tensor:
        """``values`` hides its tensor from autograd: what comes out is new, and no view."""
        return values[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """The gradient as it is, to the tensor that was replaced."""
        return gradients[0], None


def substitute(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A tensor with ``values`` (fresh memory, same shape and dtype) in ``tensor``'s place."""
    if tensor.requires_grad and torch.is_grad_enabled():
        result: torch.Tensor = _Substitute.apply(tensor, [values])
        return result
    return values


@contextmanager
def clipped_by(norm: torch.Tensor | None) -> Iterator[None]:
    """Within this context gradients are clipped by ``norm``, not by the norm that they have.

    Without one, by theirs as a trace stores it: rounded to fp32. Each update is scaled by the norm
    of *all* gradients, so one wrong gradient would affect all. The norm that Megatron reports does
    not change. Parameters that are clipped in groups keep their groups' norms, because the
    reference's is that of all parameters.
    """
    from megatron.core.optimizer import optimizer as module

    def clip(
        original: Callable[..., Any],
        parameters: Any,
        max_norm: float,
        total_norm: float | torch.Tensor,
        *args: Any,
        **more: Any,
    ) -> Any:
        parameters = whole(parameters)
        stored = torch.as_tensor(total_norm, dtype=torch.float32)
        if norm is not None and not any(getattr(p, "grad_norm_group", None) for p in parameters):
            stored = norm.to(stored).expand_as(stored)
        # A factor that is computed from a tensor is rounded otherwise.
        value = stored if torch.is_tensor(total_norm) else stored.item()
        return original(parameters, max_norm, value, *args, **more)

    with wrapped([(module, CLIP, clip)]):
        yield
