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
    """Stores what one rank found, for explanations and for ``ttrace compare``.

    These are the tensors that failed by ``tolerances``; with ``keep_all`` the others too; nothing
    without a ``writer``. ``factor`` is the expected candidate/reference ratio of a tensor.
    """

    def __init__(
        self,
        writer: TraceWriter | None,
        tolerances: Tolerances | None,
        factor: Callable[[TraceKey], float],
        *,
        keep_all: bool,
    ) -> None:
        self._writer = writer
        self._tolerances = tolerances
        self._factor = factor
        self._keep_all = keep_all
        self._kept: dict[TraceKey, int] = {}

    @property
    def waits_for_sums(self) -> bool:
        """Whether a tensor waits for its sums before it is stored."""
        return self._writer is not None and self._tolerances is not None

    def keep(
        self, measured: Measured, data: torch.Tensor, same_as: int | None = None
    ) -> int | None:
        """Store a tensor if it is worth it.

        ``same_as`` is its line if it was stored already, for another piece of it; returned is its
        line, if it is stored.
        """
        if measured.problem:
            if self._keep_all:
                misfit = measured.note.text if measured.note else ""
                self._add(measured, data, data, misfit=misfit)
            return same_as
        suspect = (
            not measured.partial_over  # a partial sum alone proves nothing
            and self._tolerances is not None
            and fails(measured.sums, self._tolerances, measured.key)
        )
        if self._writer is None or not (self._keep_all or suspect):
            return same_as
        if same_as is not None:
            self._add(measured, data, None, same_as=same_as)
            return same_as
        self._kept[measured.key] = self._add(measured, data, data)
        return self._kept[measured.key]

    def keep_again(self, first: TraceKey, measured: Measured, data: torch.Tensor) -> None:
        """Store another name of ``first``, if that was stored."""
        if first in self._kept:
            self._add(measured, data, None, same_as=self._kept[first])

    def keep_sums(self, measured: Measured) -> None:
        """Store a finding that no stored tensor would give again."""
        if self._keep_all and measured.sums is not None:
            self._add(measured, torch.empty(0), None, sums=dataclasses.astuple(measured.sums))

    def _add(
        self, measured: Measured, like: torch.Tensor, data: torch.Tensor | None, **more: Any
    ) -> int:
        """Write a line about a tensor ``like`` this, with its data if given."""
        if self._writer is None:
            return -1
        entry = Entry.of(
            measured.key,
            like,
            logical_shape=measured.logical_shape,
            placement=measured.placement,
            boxes=measured.boxes,
            factor=self._factor(measured.key),
            partial_over=measured.partial_over,
            **more,
        )
        return self._writer.add(entry, data)
