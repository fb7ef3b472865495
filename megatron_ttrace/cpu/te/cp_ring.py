# SPDX-License-Identifier: Apache-2.0
"""Context parallelism by a ring of point-to-point messages (``p2p``, ring attention).

Keys and values travel around the ring. A rank attends to the block it holds while the next one is
on its way, and joins the blocks' outputs by their log-sum-exps (``attention_core.py``). In the
backward pass the blocks travel once more, and the gradients of each block travel with it and come
home last.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te.masks import MaskRule, Tokens
from megatron_ttrace.cpu.te.parallel import Group

Block = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of a rank, or their gradients."""


class Ring:
    """The neighbours of this rank, to which it sends and from which it receives.

    Without a group the rank is alone, and its block is always at home.
    """

    def __init__(self, group: Group = None) -> None:
        self.group, self.rank, self.size = group, 0, 1
        if group is not None:
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
            self._next, self._previous = (
                dist.get_global_rank(group, (self.rank + step) % self.size) for step in (1, -1)
            )

    def allowed(self, rule: MaskRule, tokens: Sequence[Tokens]) -> list[torch.Tensor | None]:
        """The masks of this rank's queries, by step; ``tokens`` are those of each rank."""
        holders = ((self.rank - step) % self.size for step in range(self.size))
        return [rule.allowed(tokens[self.rank], tokens[holder]) for holder in holders]

    def start(self, k: torch.Tensor, v: torch.Tensor) -> Callable[[], Block]:
        """Send a block to the next rank; the result waits for the previous rank's."""
        if self.size == 1:
            return lambda: (k, v)
        sent = torch.cat([k, v], -1)
        incoming = torch.empty_like(sent)
        # One message at a time is under way in a group, so sends and receives pair up in order.
        works: list[Any] = [
            dist.isend(sent, self._next, group=self.group),
            dist.irecv(incoming, self._previous, group=self.group),
        ]

        def arrived() -> Block:
            for work in works:
                work.wait()
            return incoming[..., : k.shape[-1]], incoming[..., k.shape[-1] :]

        return arrived
