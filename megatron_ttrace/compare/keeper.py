# SPDX-License-Identifier: Apache-2.0
"""Which of a candidate's tensors are stored: the failed ones to be explained, or all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import Entry, TraceWriter


class Keeper:
    """Stores what one rank found, for explanations and for ``ttrace compare``."""

    def __init__(
        self,
        writer: TraceWriter | None,
        tolerances: Tolerances | None,
        factor: Callable[[TraceKey], float],
        *,
        keep_all: bool,
    ) -> None:
        """Prepare.

        Args:
            writer: where tensors are stored; without one nothing is.
            tolerances: to tell which tensors failed.
            factor: expected candidate/reference ratio of a tensor.
            keep_all: store the others too.
        """
        self._writer = writer
        self._tolerances = tolerances
        self._factor = factor
        self._keep_all = keep_all
        self._kept: dict[TraceKey, int] = {}

    @property
    def waits_for_sums(self) -> bool:
        """Whether a tensor waits for its sums before it is stored."""
        return self._writer is not None and self._tolerances is not None

    def keep(self, found: Measured, data: torch.Tensor, same_as: int | None = None) -> int | None:
        """Store a tensor if it is worth it.

        Args:
            found: what was found out about it.
            data: this rank's tensor.
            same_as: its line if it was stored already, for another piece of it.

        Returns:
            Its line, if it is stored.
        """
        if found.problem:
            if self._keep_all:
                self._add(found, data, data, misfit=found.note.text if found.note else "")
            return same_as
        suspect = (
            not found.partial_over  # a partial sum alone proves nothing
            and self._tolerances is not None
            and fails(found.sums, self._tolerances, found.key)
        )
        if self._writer is None or not (self._keep_all or suspect):
            return same_as
        if same_as is not None:
            self._add(found, data, None, same_as=same_as)
            return same_as
        self._kept[found.key] = self._add(found, data, data)
        return self._kept[found.key]

    def keep_again(self, first: TraceKey, found: Measured, data: torch.Tensor) -> None:
        """Store another name of ``first``, if that was stored."""
        if first in self._kept:
            self._add(found, data, None, same_as=self._kept[first])

    def keep_sums(self, found: Measured) -> None:
        """Store a finding that no stored tensor would give again."""
        if self._keep_all and found.sums is not None:
            self._add(found, torch.empty(0), None, sums=dataclasses.astuple(found.sums))

    def _add(
        self, found: Measured, like: torch.Tensor, data: torch.Tensor | None, **more: Any
    ) -> int:
        """Write a line about a tensor ``like`` this, with its data if given."""
        if self._writer is None:
            return -1
        entry = Entry.of(
            found.key,
            like,
            logical_shape=found.logical_shape,
            placement=found.placement,
            boxes=found.boxes,
            factor=self._factor(found.key),
            partial_over=found.partial_over,
            **more,
        )
        return self._writer.add(entry, data)
