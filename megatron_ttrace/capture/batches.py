# SPDX-License-Identifier: Apache-2.0
"""The microbatches of a step, fetched before it starts.

A traced step must match its microbatches to the reference's *before* the first forward pass. So
the traced iteration's batches are fetched first and then served to Megatron: the data loader sees
the same calls in the same order, only earlier.
"""

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from megatron_ttrace.trace.captured import Batch
from megatron_ttrace.trace.errors import TTraceError


class Served:
    """Puts fetched microbatches in front of Megatron's data iterator(s) for one iteration.

    Megatron passes ``train_step`` nothing (a rank without data), an iterator, or one per
    virtual-pipeline chunk, each wrapped in a ``RerunDataIterator``. Only its ``iterable`` is
    replaced, so that Megatron's own replays still work.
    """

    def __init__(self, data_iterator: Any, count: int) -> None:
        iterators = data_iterator if isinstance(data_iterator, list) else [data_iterator]
        self._wrappers = [iterator for iterator in iterators if iterator is not None]
        if not all(hasattr(wrapper, "iterable") for wrapper in self._wrappers):
            # Each traced step would read batches of its own, and training would miss them.
            raise TTraceError(
                "the batches of the script's own data iterator cannot be read twice: wrap it in "
                "megatron.core.rerun_state_machine.RerunDataIterator"
            )
        self._sources = [wrapper.iterable for wrapper in self._wrappers]
        self._fetched: list[list[Any]] = [[] for _ in self._sources]
        try:
            for source, items in zip(self._sources, self._fetched, strict=True):
                for _ in range(count):
                    items.append(next(source))
        except BaseException as error:
            self.serve()  # what was fetched is not lost to training
            if not isinstance(error, StopIteration):
                raise
            fetched = min(map(len, self._fetched))
            raise TTraceError(
                f"the data ends after {fetched} of the {count} microbatches of the traced "
                "iterations: trace fewer, or give more data"
            ) from None

    @property
    def batches(self) -> list[Batch]:
        """The tensors of each microbatch, as the loader made them; empty on a rank without data."""
        if not self._fetched:
            return []
        return [tensors_of(item) for item in self._fetched[0]]

    def serve(
        self,
        change: Callable[[Any], Any] | None = None,
        *,
        in_rehearsal: bool = False,
        later: bool = False,
    ) -> None:
        """(Re)start serving from the first microbatch, each passed through ``change``.

        What a rehearsal reads beyond these, as a script does that takes several for a microbatch,
        is served again, too. With ``later`` each is the one after it, if there is one.
        """
        for number, (wrapper, source, items) in enumerate(
            zip(self._wrappers, self._sources, self._fetched, strict=True)
        ):
            rest = _kept(source, items) if in_rehearsal else source
            if later:
                rest = self._endless(rest, number)
            wrapper.iterable = _serve(items[later:], rest, change)

    def _endless(self, rest: Iterator[Any], number: int) -> Iterator[Any]:
        """What is left, then the last item: training did not ask for more than were fetched.

        An error is raised where training reads that far itself.
        """
        try:
            yield from rest
        except Exception as error:  # noqa: BLE001 - it is raised later
            self._sources[number] = _failing(error)
        while True:
            yield _copied(self._fetched[number][-1])


def _failing(error: Exception) -> Iterator[Any]:
    raise error
    yield


def _kept(source: Iterator[Any], items: list[Any]) -> Iterator[Any]:
    for item in source:
        items.append(item)
        yield _copied(item)


def _copied(item: Any) -> Any:
    try:
        return copy.deepcopy(item)
    except Exception:  # noqa: BLE001 - what holds a file or a lock has no copy
        return copy.copy(item)


def _serve(
    items: list[Any], source: Iterator[Any], change: Callable[[Any], Any] | None
) -> Iterator[Any]:
    # A script may replace values in what it is given, or write into tensors: hand out copies.
    for item in itertools.chain(map(_copied, items), source):
        yield item if change is None else change(item)


def tensors_of(item: Any) -> Batch:
    """The tensors of a loader's item by name (or position)."""
    if not isinstance(item, Mapping):
        item = dict(enumerate(item if isinstance(item, tuple | list) else (item,)))
    return {str(name): value for name, value in item.items() if torch.is_tensor(value)}
