# SPDX-License-Identifier: Apache-2.0
"""Records which gradients the buckets of ``DistributedDataParallel`` add up over which ranks.

A bucket is a range of memory that holds gradients of several parameters. Each collective that runs
while Megatron reduces a bucket takes such a range, and leaves its sum in this range or, with ZeRO,
in a part of it (megatron/core/distributed/param_and_grad_buffer.py). So the number of the last
collective is kept for each range, and what no collective has taken is this rank's own.
"""

import contextlib
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_ttrace.capture.flow import Memory, group_ranks
from megatron_ttrace.mcore import statistics
from megatron_ttrace.mcore.replaced import wrapped
from megatron_ttrace.trace.counted import Counting, Runs, Statistic, Sum, Term

_ELSEWHERE = -1
"""Stands for a sum that other ranks have."""


class _Range(NamedTuple):
    """Addresses at which the result of a collective is."""

    start: int
    end: int
    made: int


class Reducing:
    """What the buckets of one rank reduce in one step."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        remember: Callable[[], Memory],
        attempt: Callable[[Callable[[], Any]], Any],
        unknown: str = "",
    ) -> None:
        """``remember``, called in the step, knows where gradients are in memory.

        ``attempt`` runs work of ours; if that fails, Megatron's step goes on. ``unknown``: why what
        the buckets reduce says too little.
        """
        self._groups = [group for chunk in chunks for group in statistics.bucket_groups(chunk)]
        self._remember = functools.cache(remember)
        self._attempt = attempt
        self._orders: Counter[Runs] = Counter()
        self._made: list[Sum] = []
        self._ranges: list[_Range] = []
        self._unknown = unknown
        self._nested = False

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Record the step that runs in this context."""
        with wrapped(
            (g, "start_grad_sync", functools.partial(self._start, g)) for g in self._groups
        ):
            yield

    def counting(self) -> Counting | None:
        """What was reduced, and what was not; ``None`` without buckets."""
        if not self._groups:
            return None
        own: list[Term] = []
        for group in self._groups:
            for bucket in group.buckets:
                own += self._parts(bucket.grad_data)
        sums = sorted({span.made for span in self._ranges if span.made != _ELSEWHERE})
        return Counting(
            Statistic.REDUCED,
            tuple(self._made),
            tuple(own),
            tuple(map(Term, sums)),
            unknown=self._unknown,
        )

    def _start(self, group: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        scope = sys.modules[type(group).__module__]
        places = (dist, "all_reduce"), (scope, statistics.REDUCE_SCATTER)
        with wrapped((owner, name, self._run) for owner, name in places):
            return original(*args, **kwargs)

    def _run(self, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # One that is made of others, as the reduce-scatter with sums in float32 is.
        if self._nested:
            return collective(*args, **kwargs)
        self._nested = True
        try:
            self._attempt(lambda: self._note(*args, **kwargs))
            return collective(*args, **kwargs)
        finally:
            self._nested = False

    def _note(self, *args: Any, **kwargs: Any) -> None:
        """Arguments as of ``all_reduce`` and ``reduce_scatter_tensor``: tensors, operation, group.

        The output is first.
        """
        named = map(kwargs.get, ("tensor", "output", "input"))
        output, *inputs = filter(torch.is_tensor, (*args, *named))
        taken = inputs[0] if inputs else output
        _, group, *_ = *(given for given in args if not torch.is_tensor(given)), None, None
        start, end = _addresses(taken)
        before = [span for span in self._ranges if span.start < end and start < span.end]
        if any(span.start < start or end < span.end for span in before):
            self._unknown = "a collective over a part of a bucket that was reduced"
            return
        sums = sorted({span.made for span in before if span.made != _ELSEWHERE})
        ranks = group_ranks(kwargs.get("group", group))
        made = Sum(ranks, self._orders[ranks], tuple(self._parts(taken)), tuple(map(Term, sums)))
        self._orders[ranks] += 1
        self._ranges = [span for span in self._ranges if span not in before]
        first, last = _addresses(output)
        for low, high in ((start, min(first, end)), (max(last, start), end)):
            if low < high:
                self._ranges.append(_Range(low, high, _ELSEWHERE))
        self._ranges.append(_Range(first, last, len(self._made)))
        self._made.append(made)

    def _parts(self, tensor: torch.Tensor) -> list[Term]:
        """The parts in a contiguous tensor that no collective has taken."""
        start, end = _addresses(tensor)
        flat, size = tensor.view(-1), tensor.element_size()
        taken = sorted(span for span in self._ranges if span.start < end and start < span.end)
        terms: list[Term] = []
        for span in (*taken, _Range(end, end, _ELSEWHERE)):
            if start < span.start:
                gap = flat[-((end - start) // size) :][: (span.start - start) // size]
                terms += map(Term, self._remember().find(gap))
            start = max(start, span.end)
        return terms


def _addresses(tensor: torch.Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.numel() * tensor.element_size()
