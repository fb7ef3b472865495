# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.assay plant``: errors of a known size in a saved candidate.

An error is planted into a random box of a random tensor on a random rank. Its size is in tolerances
of that rank's part (:func:`megatron_ttrace.compare.measure.relative_error`). The rounding error of
the run stays in, and the sum is rounded to the stored dtype, as a real error would be. Tensors are
measured and judged as in every check.
"""

import argparse
import dataclasses
import functools
import math
import random
from collections.abc import Callable
from pathlib import Path

import torch

from megatron_ttrace.cli import command
from megatron_ttrace.compare import tolerance as tolerances_of
from megatron_ttrace.compare.gathered import of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.measure import measure, scale_of
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.offline import epsilon_of, measure_saved
from megatron_ttrace.jobs import flags
from megatron_ttrace.saved import api
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader
from tests.assay import harness
from tests.assay.harness import Row

SIZES = (0.5, 0.9, 1.1, 2.0, 5.0)
BAR = 0.99
_MOST_TRIALS = 1_000_000
_EPILOG = """\
examples:
  ttrace check --nproc-per-node 2 --ttrace-save-candidate -- launch/pretrain_gpt.py ...
  python -m tests.assay plant ttrace-out/reference ttrace-out/candidate

One error at a time is put into a random box of a random tensor on a random rank, and judged as in
every check. Sizes are in tolerances; some shapes also have a size of their own.

exit code: 0 if at least 99 % of the errors of 2 tolerances and more of each shape are found, and at
most 1 % of those of half a tolerance are flagged; 2 if not, or if no tensor is suitable
"""

Shape = Callable[[torch.Tensor, torch.Generator], torch.Tensor]
"""From a box of a rank's tensor (float64) to the direction of an error in it, of any length."""


def _noise(box: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(box.shape, generator=generator, dtype=torch.float64)


def _element(box: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    planted = torch.zeros_like(box)
    planted.view(-1)[int(torch.randint(box.numel(), (1,), generator=generator))] = 1.0
    return planted


def _shift(box: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    dim = max(range(box.dim()), key=lambda d: box.shape[d]) if box.dim() else 0
    return box.roll(1, dim) - box if box.dim() else box.clone()


SHAPES: dict[str, Shape] = {
    "noise": _noise,
    "offset": lambda box, _: torch.ones_like(box),
    "scaling": lambda box, _: box.clone(),
    "element": _element,
    "shift": _shift,
}
"""Errors of a chosen size: as from another order of summation; a bias added twice; a wrong divisor;
one element, as from a race; an offset off by one."""
WHOLE_SIZE: dict[str, Shape] = {
    "double": lambda box, _: box.clone(),
    "zero": lambda box, _: -box,
    "shift": _shift,
}
"""Errors whose size is their own: counted twice; never written; an offset off by one."""


@dataclasses.dataclass(frozen=True, slots=True)
class PlantedError:
    """The verdict on one error.

    Attributes:
        found: whether the verdict is a failure.
        right_rank: whether the verdict names the rank first.
        margin: of the verdict; NaN without one.
    """

    found: bool
    right_rank: bool
    margin: float


class Field:
    """A saved run to plant errors into."""

    def __init__(self, reference: Path, candidate: Path) -> None:
        """Open and measure the run.

        Raises:
            TTraceError: when there is no tensor to plant into, or no complete trace.
        """
        self._reference = TraceReader(reference)
        self._candidate = TraceReader(candidate)
        if not self._candidate.meta.get("complete"):
            raise TTraceError(
                f"{candidate} holds failed tensors only: trace with --ttrace-save-candidate"
            )
        self._tolerances = tolerances_of.of_reference(self._reference)
        self._epsilon = epsilon_of(self._reference)
        self._measured: dict[TraceKey, dict[int, list[Measured]]] = {}
        for rank, tensors in measure_saved(self._reference, self._candidate).items():
            for measured in tensors:
                self._measured.setdefault(measured.key, {}).setdefault(rank, []).append(measured)
        entries = [
            (rank, entry) for rank, entries in self._candidate.ranks.items() for entry in entries
        ]
        self._factors = {(rank, entry.key): entry.factor for rank, entry in entries}
        self._spots = [spot for spot in entries if self._is_fertile(*spot)]
        if not self._spots:
            raise TTraceError(f"{candidate} has no tensor with a tolerance that is not blind")

    def __len__(self) -> int:
        """Number of (rank, tensor) pairs that errors can be planted into."""
        return len(self._spots)

    def verdict(self, key: TraceKey, rank: int = -1, local: torch.Tensor | None = None) -> Judged:
        """The verdict on a tensor, with ``local`` in place of what ``rank`` saved of it."""
        entry = self._reference.entry(key)
        holders = self._measured[key]
        if local is not None:
            kept = holders[rank][0]
            factor = self._factors[rank, key]
            sums = measure(local, self._reference.tensor(entry), kept.boxes, factor)
            holders = {**holders, rank: [dataclasses.replace(kept, sums=sums)]}
        return judge([(key, entry.shape)], of_ranks(holders), self._tolerances, self._epsilon)[0]

    def whole(self, key: TraceKey) -> torch.Tensor:
        """The reference's tensor."""
        return self._reference.data(key)

    def plant(self, shape: str, size: float, generator: torch.Generator) -> PlantedError:
        """Plant one error of a shape, ``size`` tolerances large (NaN: its own size), anywhere."""
        make = WHOLE_SIZE[shape] if math.isnan(size) else SHAPES[shape]
        while True:
            chosen = int(torch.randint(len(self._spots), (1,), generator=generator))
            rank, entry = self._spots[chosen]
            local = self._candidate.tensor(entry).clone()
            box = random_box(local, generator)
            values = box.to(torch.float64)
            direction = make(values, generator)
            length = float(direction.norm())
            if length > 0.0:
                break
        if not math.isnan(size):
            unit = self._unit(rank, entry) / length
            if size < 1.0:
                # What is no error of the part is none of an element either.
                unit = min(unit, self._element(entry) / float(direction.abs().max()))
            direction *= size * unit * entry.factor
        box.copy_((values + direction).to(local.dtype))
        verdict = self.verdict(entry.key, rank, local)
        found = verdict.verdict.is_failure
        margin = math.nan if verdict.margin is None else verdict.margin
        return PlantedError(found, found and verdict.ranks[:1] == (rank,), margin)

    def _unit(self, rank: int, entry: Entry) -> float:
        """Norm of a difference that is one tolerance of this rank's part."""
        tolerance = self._tolerances.of(entry.key)
        sums = self._measured[entry.key][rank][0].sums
        assert sums is not None
        return tolerance.value * scale_of(sums, tolerance.rms) * math.sqrt(sums.n)

    def _element(self, entry: Entry) -> float:
        """How far one element may be off; infinite if that is not judged."""
        tolerance = self._tolerances.of(entry.key)
        return tolerance.element * tolerance.rms * math.sqrt(tolerance.n) or math.inf

    def _is_fertile(self, rank: int, entry: Entry) -> bool:
        """Whether a size in tolerances has a meaning: not if the tolerance is zero or blind."""
        holders = self._measured.get(entry.key, {}).get(rank, [])
        if len(holders) != 1 or entry.misfit or entry.key not in self._reference:
            return False
        # Routing has sums of its own; a partial sum of experts' outputs is no part of a tensor.
        if entry.sums or entry.partial_over:
            return False
        # Copies of an updated weight must be equal to the bit.
        if tolerances_of.is_updated(entry.key) and any(
            other.region == holders[0].region
            for holder, each in self._measured[entry.key].items()
            for other in each
            if holder != rank
        ):
            return False
        sums = holders[0].sums
        tolerance = self._tolerances.of(entry.key)
        return (
            sums is not None
            and sums.n > 0
            and tolerance.value > 0.0
            and not tolerance.blind
            and self._unit(rank, entry) > 0.0
            and not self.verdict(entry.key).verdict.is_failure
        )


def random_box(local: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A view of a random block of a tensor: a random range of every dim."""
    for dim, size in enumerate(local.shape):
        length = 1 + int(torch.randint(size, (1,), generator=generator))
        start = int(torch.randint(size - length + 1, (1,), generator=generator))
        local = local.narrow(dim, start, length)
    return local


@dataclasses.dataclass(frozen=True, slots=True)
class Kind:
    """Errors of one shape and size (NaN: their own) in a run."""

    field: Field
    shape: str
    size: float

    @property
    def id(self) -> str:
        """As the table calls it."""
        size = "own size" if math.isnan(self.size) else f"{self.size:g} tolerances"
        return f"{self.shape}, {size}"


def kinds(field: Field) -> list[Kind]:
    """All kinds of errors; those with a size of their own come last."""
    sized = [Kind(field, shape, size) for shape in SHAPES for size in SIZES]
    return sized + [Kind(field, shape, math.nan) for shape in WHOLE_SIZE]


def attempt(trials: int, seed: int, kind: Kind) -> Row:
    """Plant errors of one kind, and count those that are found."""
    bits = random.Random(f"{seed} {kind.shape} {kind.size}").getrandbits(32)
    generator = torch.Generator().manual_seed(bits)
    errors = [kind.field.plant(kind.shape, kind.size, generator) for _ in range(trials)]
    found = sum(error.found for error in errors) / trials
    right_rank = sum(error.right_rank for error in errors) / trials
    marks = {}
    if kind.size >= 2.0:
        marks["at least 99 % found"] = found >= BAR
    if kind.size <= 0.5:
        marks["at most 1 % flagged"] = found <= 1.0 - BAR
    details = {"found": found, "right rank": right_rank, "size": kind.size}
    note = f"{found:.1%} found, {right_rank:.1%} on the right rank"
    return Row(kind.id, kind.shape, marks, note, details=details)


def add_parser(subparsers: command.Subparsers) -> None:
    """Add the ``plant`` command."""
    parser = harness.add(
        *(subparsers, "plant", _run),
        summary="plant errors in a saved run and count how many are found",
        epilog=_EPILOG,
        seed="of the random places (default 1)",
        only=False,
    )
    parser.add_argument("reference", type=flags.path, metavar="REFERENCE_DIR")
    parser.add_argument(
        "candidate",
        type=flags.path,
        metavar="CANDIDATE_DIR",
        help="of a run that was checked with --ttrace-save-candidate",
    )
    parser.add_argument(
        "--trials",
        type=flags.integer(1, _MOST_TRIALS),
        default=500,
        metavar="N",
        help="number of errors of each kind (default 500)",
    )


def _run(args: argparse.Namespace) -> int:
    """Plant, judge, count."""
    saved = args.reference, args.candidate
    with api.consistent(*saved):
        field = Field(*saved)
        print(f"{len(field)} places (a tensor on a rank)")
        attempted = functools.partial(attempt, args.trials, args.seed or 1)
        rows = harness.execute(kinds(field), attempted, args)
    for row in rows:
        print(f"{row.id:<28} {row.note}")
    return harness.finish(rows, dict.fromkeys(("at least 99 % found", "at most 1 % flagged"), 1.0))
