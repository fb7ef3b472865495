# SPDX-License-Identifier: Apache-2.0
"""Weight gradients computed after the backward pass (``delay_wgrad_compute``).

Pipeline schedules use it to send the input's gradient on before the weight's is known. The numbers
are the same; only the time differs.
"""

from collections import deque
from collections.abc import Callable

import torch


class Queue:
    """Computations that one layer's backward passes put off, first in, first out."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], torch.Tensor]] = deque()

    def put(self, compute: Callable[[], torch.Tensor]) -> None:
        """Keep a computation for later."""
        self._waiting.append(compute)

    def run_one(self, *weights: torch.nn.Parameter) -> None:
        """Compute the oldest one: the weights' gradients, which replace what they had.

        Whoever collects gradients takes each microbatch's away (``backward_dw`` of the modules).
        """
        for weight in weights:
            weight.grad = self._waiting.popleft()().to(weight.dtype)


def now_or_later(queue: Queue | None, compute: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Compute, or put the computation off and give autograd no gradient."""
    if queue is None:
        return compute()
    queue.put(compute)
    return None
