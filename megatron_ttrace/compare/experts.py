# SPDX-License-Identifier: Apache-2.0
"""Which rows of the reference the rows of a rank's expert tensors are.

Each dispatch announces which tokens it sends to the experts (megatron_ttrace/capture/experts.py).
Every tensor of those experts, forward and backward, then consists of parts of the reference's
tensors of several microbatches.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.mcore.roles import expert_and_module, is_partial
from megatron_ttrace.placement.boxes import Box, DimMap, length, product, whole
from megatron_ttrace.placement.infer import NoPlacementError
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import describe_partial
from megatron_ttrace.placement.token_index import NOBODY, TokenIndex, expert_boxes, match
from megatron_ttrace.trace.findings import Note
from megatron_ttrace.trace.modules import is_within, module_of
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import Entry


@dataclasses.dataclass(frozen=True, slots=True)
class Match:
    """A part of a rank's tensor and the part of the reference's tensor that it must equal.

    Attributes:
        key, logical_shape: of the reference's tensor.
        placement: for reports.
        boxes: the local elements and the logical ones, pair by pair.
        factor: expected candidate/reference ratio.
        partial_over: the axis whose ranks' tensors add up to the reference's; empty for a tensor
            that is compared as it is.
        partial_ranks: number of ranks along that axis that have the same elements.
        copies: number of tensor-parallel ranks that have these elements of an activation.
    """

    key: TraceKey
    placement: str
    boxes: tuple[Box, ...]
    logical_shape: tuple[int, ...]
    factor: float = 1.0
    partial_over: str = ""
    partial_ranks: int = 1
    copies: int = 1

    @property
    def share(self) -> float:
        """What the reference's values are multiplied by to become this rank's."""
        return self.factor / self.partial_ranks

    def measured(self, sums: Sums, note: Note | None = None) -> Measured:
        """What is found out about this part of the rank's tensor."""
        return Measured(
            self.key,
            self.placement,
            self.boxes,
            self.logical_shape,
            sums,
            note=note,
            partial_over=self.partial_over,
        )


def entry_of(part: Match | Measured, like: torch.Tensor, factor: float = 1.0, **more: Any) -> Entry:
    """The line of a part of a tensor ``like`` this in a rank's trace."""
    return Entry.of(
        part.key,
        like,
        logical_shape=part.logical_shape,
        placement=part.placement,
        boxes=part.boxes,
        factor=factor,
        partial_over=part.partial_over,
        **more,
    )


def encode_rows(index: TokenIndex) -> torch.Tensor:
    """[rows, 2]: position and expert of each row; padding is left out."""
    real = index.microbatch != NOBODY
    columns = [torch.from_numpy(index.position[real]), torch.from_numpy(index.expert[real])]
    return torch.stack(columns, dim=1)


class ExpertRows:
    """The token indexes of one iteration on one rank.

    ``all_rows`` returns those of all ranks by the key of :meth:`rows_key`. ``whole`` returns the
    logical shape of a tensor, from its key, its shape here, and the rows' key and expert that are
    its own. Both return ``None`` for what is unknown.
    """

    def __init__(
        self,
        iteration: int,
        mesh: Mesh,
        all_rows: Callable[[TraceKey], TokenIndex | None],
        whole: Callable[[TraceKey, tuple[int, ...], TraceKey, int | None], tuple[int, ...] | None],
    ) -> None:
        self._iteration = iteration
        self._mesh = mesh
        self._all_rows = all_rows
        self._whole = whole
        self._here: dict[tuple[int, str], TokenIndex] = {}
        self._numbers: dict[tuple[int, str], list[int]] = {}
        self._matched: dict[tuple[TraceKey, int | None, int], tuple[DimMap, int]] = {}
        self._layers: set[str] = set()

    def __contains__(self, call: tuple[int, str]) -> bool:
        """Whether a microbatch's rows in a layer's experts are known."""
        return call in self._here

    def announce(
        self, microbatch: int, experts: str, index: TokenIndex, others: Sequence[int] = ()
    ) -> list[Measured]:
        """Record a dispatch; returns how its rows agree with the reference's routing.

        A row that the reference does not have is an error of one; rows that no rank has are found
        by coverage. ``others`` are microbatches that have a part of each tensor, maybe an empty
        one, also where no row is theirs.
        """
        self._here[microbatch, experts] = index
        numbers = [*dict.fromkeys([microbatch, *index.microbatches, *others])]
        self._numbers[microbatch, experts] = numbers
        self._layers.add(experts)
        measured = []
        for number in numbers:
            key = self.rows_key(number, experts)
            there = self._all_rows(key)
            if there is None:
                continue
            rows, strangers = self._match(index, key)
            shape = (len(there.microbatch), 2)
            total = 2 * (length(rows) + strangers)
            sums = Sums(
                n=total,
                diff=float(2 * strangers),
                reference=float(total),
                candidate=float(total),
                dot=float(2 * length(rows)),
                worst=float(strangers > 0),
            )
            measured.append(Measured(key, "TokenIndex(0)", product([rows, whole(2)]), shape, sums))
        return measured

    def rows_key(self, microbatch: int, experts: str) -> TraceKey:
        """The key under which a reference stores which tokens its experts' rows are."""
        return TraceKey(self._iteration, microbatch, Kind.ROUTING, experts, 0)

    def holds(self, key: TraceKey) -> str:
        """The experts that ``key`` lies in, if their rows were announced; else empty."""
        for layer in self._layers:
            if is_within(key.name, layer):
                return layer if (key.microbatch, layer) in self._here else ""
        return ""

    def parts(
        self, key: TraceKey, local: tuple[int, ...], blocks: int | tuple[int, ...], *, factor: float
    ) -> list[Match | Measured]:
        """The parts of an experts' tensor of shape ``local``, one per microbatch.

        ``blocks`` are stacked in its last dim.

        Raises:
            NoPlacementError: when rows or columns do not fit.
        """
        layer = self.holds(key)
        expert, module = within(module_of(key.name), layer)
        index = self._here[key.microbatch, layer]
        if expert is not None:
            index = index.of_expert(expert)
        if not local:
            raise NoPlacementError("a scalar within experts has no rows")
        index = index.fitted(local[0])
        etp = self._mesh.size("etp")
        over = "etp" if etp > 1 and is_partial(key.kind, module) else ""
        parts: list[Match | Measured] = []
        for number in self._numbers[key.microbatch, layer]:
            there = dataclasses.replace(key, microbatch=number)
            shape = self._whole(there, local, self.rows_key(number, layer), expert)
            if shape is None:
                # Where the dispatch is wrong, the number may be any: it names no tensor.
                parts.append(Measured.stranger(key, local))
                continue
            rows, _ = self._match(index, self.rows_key(number, layer), expert)
            words, boxes = expert_boxes(rows, local, shape, self._mesh, blocks)
            words, ranks = describe_partial(words, over), etp if over else 1
            part = Match(there, words, boxes, shape, factor, partial_over=over, partial_ranks=ranks)
            parts.append(part)
        return parts

    def _match(
        self, index: TokenIndex, key: TraceKey, expert: int | None = None
    ) -> tuple[DimMap, int]:
        """Match with the reference's rows, all or an expert's.

        A microbatch goes through a layer's experts once, so the number of rows tells the padded
        form of its index from the other.
        """
        memo = (key, expert, len(index.microbatch))
        if memo not in self._matched:
            there = self._all_rows(key)
            if there is None:
                raise NoPlacementError(f"which tokens the rows of {key} are is unknown")
            if expert is not None:
                there = there.of_expert(expert)
            self._matched[memo] = match(index, there, key.microbatch)
        return self._matched[memo]


def within(name: str, layer: str) -> tuple[int | None, str]:
    """The expert's number, if ``name`` is within one expert, and the module's name in it."""
    return expert_and_module(name.removeprefix(layer).removeprefix("."))
