# SPDX-License-Identifier: Apache-2.0
"""Recorded runs (``trace/recorded.py``): logical state, steps, and how far rounding moves both."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from megatron_ttrace.compare.quantiles import few_samples
from megatron_ttrace.compare.tolerance import SAFETY, epsilon
from megatron_ttrace.saved.whole import Tensors
from megatron_ttrace.trace.recorded import FOLDER, Point, RankRecord, Step, read_ranks
from megatron_ttrace.trace.records import LoadedIndex
from megatron_ttrace.trace.resumed import What
from megatron_ttrace.trace.store import TraceReader

VOCABULARY = ("word_embeddings.weight", "output_layer.weight", "output_layer.bias")
"""Ends of names of parameters with a row per token, the last ones padding that depends on the
layout."""


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A recorded run."""

    folder: Path
    ranks: tuple[RankRecord, ...]

    @classmethod
    def open(cls, run: Path) -> Recorded:
        """Of a run's directory. Raises ``TTraceError`` when it is incomplete."""
        folder = run / FOLDER
        return cls(folder, read_ranks(folder))

    def state(self, point: Point) -> State:
        """The tensors at a point. Raises ``TTraceError`` when they are missing or damaged."""
        return State(TraceReader(self.folder / point))

    def numbers(self, point: Point) -> dict[str, frozenset[float]]:
        """The values that each number has on the ranks."""
        return merged(rank.numbers[point] for rank in self.ranks)

    @functools.cached_property
    def steps(self) -> list[tuple[Step, ...]]:
        """Each step as the ranks recorded it."""
        return list(zip(*(rank.steps for rank in self.ranks), strict=True))

    def samples(self, number: int) -> list[str]:
        """Digests of a step's samples in the order of the global batch.

        Megatron deals microbatches to data-parallel ranks in turns
        (``MegatronPretrainingSampler``).
        """
        by_rank: dict[int, tuple[tuple[str, ...], ...]] = {}
        for rank in self.ranks:
            if samples := rank.steps[number].samples:
                by_rank.setdefault(rank.mesh.at("dp"), samples)
        turns = zip(*(by_rank[at] for at in sorted(by_rank)), strict=True)
        return [sample for turn in turns for part in turn for sample in part]

    def logged(self, number: int) -> tuple[dict[str, float], float | None]:
        """Losses and gradient norm of a step, of the last rank that has them."""
        step = self.steps[number]
        losses = next((record.losses for record in reversed(step) if record.losses), {})
        norms = (record.grad_norm for record in reversed(step) if record.grad_norm is not None)
        return losses, next(norms, None)

    def scalar(self, kind: What, name: str, number: int) -> float | None:
        """A loss of a step, or its gradient norm."""
        losses, norm = self.logged(number)
        return losses.get(name) if kind is What.LOSS else norm

    def any(self, attribute: str) -> bool:
        """Whether something is true of any rank."""
        return any(getattr(rank, attribute) for rank in self.ranks)


class State(Tensors[tuple[What, str]]):
    """The logical tensors of a recorded state, by what they are and by name."""

    def __init__(self, trace: TraceReader) -> None:
        # What is read from a checkpoint has the same names in both.
        super().__init__(trace, lambda key: (What[LoadedIndex(key.index).name], key.name))

    def parts(self, item: tuple[What, str]) -> dict[int, torch.Tensor]:
        """What each rank has of a tensor, as it has it."""
        return {rank: self._trace.tensor(entry) for rank, entry in self.entries(item)}

    def shape(self, item: tuple[What, str]) -> tuple[int, ...]:
        """The logical shape, as the first rank has it."""
        return self.entries(item)[0][1].logical_shape

    def part(self, item: tuple[What, str], rank: int) -> str:
        """What a rank has of a tensor, as slices; empty if it has all."""
        entry = next(entry for holder, entry in self.entries(item) if holder == rank)
        has_all = all(box.extent == entry.logical_shape for box in entry.boxes)
        shown = " ".join(map(str, entry.boxes[:2]))
        return "" if has_all else shown + " ..." * (len(entry.boxes) > 2)


def merged(all_numbers: Iterable[Mapping[str, float]]) -> dict[str, frozenset[float]]:
    """All values that each number has."""
    values_of: dict[str, set[float]] = {}
    for numbers in all_numbers:
        for name, value in numbers.items():
            # Two values that are not a number are unequal, but one object is in a set once.
            values_of.setdefault(name, set()).add(math.nan if math.isnan(value) else value)
    return {name: frozenset(values) for name, values in values_of.items()}


@dataclasses.dataclass(frozen=True)
class Moves:
    """How far perturbed steps move what the steps of a restart give."""

    perturbed: Recorded
    restarted: Recorded

    def scalar(self, kind: What, name: str) -> float:
        """The tolerance of a number that is logged."""
        moved = []
        for number in range(len(self.restarted.steps)):
            before = self.restarted.scalar(kind, name, number)
            after = self.perturbed.scalar(kind, name, number)
            if before and after is not None:
                moved.append(change(before, after))
        # Sums over all elements, whose terms are added in another order.
        floor = epsilon(torch.float32) * 16
        return SAFETY * max(max(moved, default=math.inf) * few_samples(len(moved)), floor)

    @functools.cached_property
    def _ends(self) -> tuple[State, State]:
        """Both states after the last step."""
        return self.restarted.state(Point.END), self.perturbed.state(Point.END)

    def tensor(self, item: tuple[What, str], whole: torch.Tensor) -> float:
        """The tolerance of a tensor after the last step."""
        restarted, perturbed = self._ends
        if item not in restarted or item not in perturbed:
            return math.inf
        a, b = restarted.tensor(item), perturbed.tensor(item)
        if a is None or b is None:
            return math.inf
        moved = distance(b, a) * few_samples(whole.numel())
        return SAFETY * max(moved, epsilon(whole.dtype) / 2)


def change(before: float, after: float) -> float:
    """``|after - before| / |before|``, infinite where it is not finite."""
    ratio = abs(after - before) / abs(before) if before else math.inf
    return ratio if math.isfinite(ratio) else math.inf


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements are equal, or both not a number."""
    return a.shape == b.shape and not differing(a, b).any()


def differing(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Which elements are neither equal nor both not a number."""
    return (a != b) & ((a == a) | (b == b))


def distance(data: torch.Tensor, right: torch.Tensor) -> float:
    """``||found - whole|| / ||whole||``, infinite where it is not finite."""
    norm = float(right.double().norm())
    error = float((data.double() - right.double()).norm())
    ratio = error / norm if norm else (math.inf if error else 0.0)
    return ratio if math.isfinite(ratio) else math.inf
