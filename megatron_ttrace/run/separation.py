# SPDX-License-Identifier: Apache-2.0
"""The share of each loss in a gradient, from replays of the reference with other coefficients.

A gradient is linear in the coefficients of the losses, because the forward pass, and with it the
routing, does not depend on them. So a loss's share is the difference between a replay with
:data:`FACTOR` times its coefficient and one with its own, divided by ``FACTOR - 1``. The factor is
large so that the rounding of a 16-bit gradient does not hide a small share, and a power of two so
that it rounds nothing.

Replays are made only for a check that diverged, for gradients that no other repair explains.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from megatron_ttrace.trace.captured import Share
from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal

FACTOR = 64.0

Gradients = Mapping[TraceKey, torch.Tensor]
Replay = Callable[[Loss | None, bool, TraceWriter], None]
"""Replays the step with one loss's coefficient changed, isolated or not, into a writer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """What is to be separated.

    Attributes:
        reference: directory of the reference's trace.
        checksum: of its ``meta.json``.
        keys: of the gradients; all are of one iteration.
        losses: beside the main loss.
        isolated: whether the candidate was isolated: then only what a module adds itself counts.
    """

    reference: str
    checksum: str
    keys: tuple[TraceKey, ...]
    losses: tuple[Loss, ...]
    isolated: bool

    @property
    def iteration(self) -> int:
        """The iteration of the step that is replayed."""
        return self.keys[0].iteration

    @property
    def shares(self) -> list[tuple[Loss, bool]]:
        """Each loss, with whether modules are isolated: then a gradient is each module's own."""
        return [*itertools.product(self.losses, (True,) if self.isolated else (False, True))]

    def write(self, reference: TraceReader, replay: Replay, directory: Path) -> None:
        """Make the replays; each share is written as a trace of a rank of its own."""
        names: dict[TraceKey, list[TraceKey]] = {}
        primaries = {reference.primary(key) for key in self.keys}
        for key in reference:
            if (primary := reference.primary(key)) in primaries:
                names.setdefault(primary, []).append(key)
        wanted = set(itertools.chain(*names.values()))

        def gradients(loss: Loss | None, isolated: bool) -> Gradients:
            memory = _Memory(directory, wanted)
            replay(loss, isolated, memory)
            return memory.tensors

        normal = {isolated: gradients(None, isolated) for isolated in {i for _, i in self.shares}}
        for number, (loss, isolated) in enumerate(self.shares):
            writer = TraceWriter(directory, number)
            changed = gradients(loss, isolated)
            for key in self.keys:
                share = _share(names[reference.primary(key)], normal[isolated], changed)
                if share is not None and tuple(share.shape) == reference.entry(key).shape:
                    writer.add(Entry.of(key, share), share)
            writer.close()
        seal(directory, {"role": "shares"})

    def read(self, directory: Path) -> dict[TraceKey, list[Share]]:
        """What :meth:`write` wrote."""
        shares: dict[TraceKey, list[Share]] = {}
        reader = TraceReader(directory)
        for number, (loss, isolated) in enumerate(self.shares):
            for entry in reader.ranks[number]:
                value = reader.tensor(entry).clone()
                shares.setdefault(entry.key, []).append(Share(loss, isolated, value))
        return shares


def _share(names: Iterable[TraceKey], normal: Gradients, changed: Gradients) -> torch.Tensor | None:
    """Of a gradient with several names: an isolated module's own is under one of them only."""
    shares = [
        (changed[name].float() - normal[name].float()) / (FACTOR - 1)
        for name in names
        if name in normal and name in changed and changed[name].shape == normal[name].shape
    ]
    return max(shares, key=lambda share: float(share.norm()), default=None)


class _Memory(TraceWriter):
    """Keeps some tensors in memory, and writes none."""

    def __init__(self, directory: Path, keys: Iterable[TraceKey]) -> None:
        super().__init__(directory, 0)
        self._keys = frozenset(keys)
        self.tensors: dict[TraceKey, torch.Tensor] = {}

    def add(self, entry: Entry, data: torch.Tensor | None) -> int:
        """Keep a tensor with one of the keys."""
        if data is not None and entry.key in self._keys:
            self.tensors[entry.key] = data.detach().to("cpu", copy=True)
        return 0
