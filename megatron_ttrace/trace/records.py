# SPDX-License-Identifier: Apache-2.0
"""The typed records that the steps exchange; terminal, HTML, W&B and JSONL only render them.

The field names of :class:`Verdict` and :class:`Summary` are a contract (docs/flags-and-files.md).
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Self

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.blamed import Blame
from megatron_ttrace.trace.codec import Bounds, Count, Rank, Record, Size
from megatron_ttrace.trace.collectives import CollectiveRow, LedgerFinding
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.executed import ChangedCode
from megatron_ttrace.trace.findings import Cause
from megatron_ttrace.trace.outcomes import NotExercised, Reason
from megatron_ttrace.trace.places import Place


class Direction(StrEnum):
    """Where in a training step a module went wrong."""

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    UPDATE = "update"


class Kind(StrEnum):
    """What a traced tensor is. Order is the order in which a training step produces them.

    ``direction``: that of the computation in which a fault of this kind first shows.
    """

    direction: Direction

    def __new__(cls, value: str, direction: Direction) -> Self:
        """A kind and its direction."""
        kind = str.__new__(cls, value)
        kind._value_, kind.direction = value, direction
        return kind

    INITIAL = "initial", Direction.START
    LOADED = "loaded", Direction.START
    TOKENS = "tokens", Direction.START
    PARAM = "param", Direction.START
    INPUT = "input", Direction.FORWARD
    OUTPUT = "output", Direction.FORWARD
    PRECISION = "precision", Direction.FORWARD
    ROUTING = "routing", Direction.FORWARD
    DROPOUT = "dropout", Direction.FORWARD
    LOSS = "loss", Direction.FORWARD
    GRAD_OUTPUT = "grad_output", Direction.BACKWARD
    GRAD_INPUT = "grad_input", Direction.BACKWARD
    MAIN_GRAD = "main_grad", Direction.GRADIENT
    COUNTED = "counted", Direction.GRADIENT
    GRAD_NORM = "grad_norm", Direction.GRADIENT
    HYPERPARAMETERS = "hyperparameters", Direction.UPDATE
    PARAM_DELTA = "param_delta", Direction.UPDATE
    EXP_AVG = "exp_avg", Direction.UPDATE
    EXP_AVG_SQ = "exp_avg_sq", Direction.UPDATE
    BUFFER = "buffer", Direction.UPDATE
    METRIC = "metric", Direction.UPDATE


MOMENTS = (Kind.EXP_AVG, Kind.EXP_AVG_SQ)
"""What optimizers keep of earlier gradients."""

FLOW = (Kind.INPUT, Kind.OUTPUT, Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)
"""Activations and their gradients."""

ROOT = "model"
"""Name of the whole model where a name is needed for it."""


class Outcome(StrEnum):
    """What was found out about one tensor. No tensor is dropped: each has one of these."""

    PASS = "pass"  # noqa: S105 - a verdict, not a password
    DIVERGED = "diverged"
    REPLICA_CONFLICT = "replica_conflict"
    MISSING = "missing"
    EXTRA = "extra"
    UNCOVERED = "uncovered"
    SHAPE = "shape"
    NONFINITE = "nonfinite"
    UNCHECKED = "unchecked"

    @property
    def is_failure(self) -> bool:
        """Whether a run with such a tensor is not equivalent to its reference."""
        return self not in (Outcome.PASS, Outcome.UNCHECKED)


STEP_LEVEL = -1
"""Microbatch number of tensors that belong to the whole step (parameters, gradients, moments)."""

Microbatch = Annotated[int, Bounds(STEP_LEVEL, (1 << 63) - 1)]
"""Number of a microbatch in the global batch, or :data:`STEP_LEVEL`."""

_RUN_ID = re.compile(r"[0-9a-f]{16}")


class ParamIndex(IntEnum):
    """Index of a ``param``: when it is read."""

    BEFORE = 0
    AFTER = 1


class RoutingIndex(IntEnum):
    """Index of a router's ``routing``."""

    SCORES = 0
    """By which experts are chosen."""
    CHOICE = 1
    KEPT = 2
    """What is left of the choice within the experts' capacity."""


class LoadedIndex(IntEnum):
    """Index of a ``loaded`` tensor or number."""

    ONE_DEVICE = 0
    """The weights, which must be what one device loads from the checkpoint."""
    ROUNDED = 1
    """The optimizer's main weights, rounded, which must equal these."""
    AGREED = 2
    """Weights that could be read in no other way, which must be the main weights."""
    WEIGHT = 3
    """The weights, which must be what is stored."""
    MAIN = 4
    """Likewise the main weights, as of the optimizer."""
    EXP_AVG = 5
    """Likewise the mean of the gradient."""
    EXP_AVG_SQ = 6
    """Likewise the mean of its square."""
    BUFFER = 7
    """Likewise a module's buffer."""
    OTHER = 8
    """Likewise other state of the optimizer; its name follows the parameter's."""
    NUMBER = 9
    """Likewise a number: the position in the data, of the scheduler, of a parameter group."""


class DropoutIndex(IntEnum):
    """Of a ``dropout``: elements with own masks; 1 if right. Plus 3 for each call."""

    ELEMENTS = 0
    RECOMPUTED = 1
    """0: a recomputation drew another mask; 2: the mask is that of an earlier call."""
    PROBABILITY = 2


class MetricIndex(IntEnum):
    """Index of a ``metric``."""

    VALUE = 0
    """Given, or computed in float32."""
    ELEMENTS = 1
    """How many elements have a property."""
    CHOSEN = 2
    """How many choices (the largest of several numbers) are right."""
    LOSS = 3
    """A mean over tokens that is rounded to the dtype of the model (z loss)."""
    LEFT = 4
    """What is logged once more without another step."""


class BufferIndex(IntEnum):
    """Index of a ``buffer``."""

    AFTER = 0
    """Its value after the step."""
    LOADS = 1
    """Of the bias of a router: the tokens of each expert relative to the mean, which change it."""
    BEFORE = 2
    """Of the bias of a router: its value before the step."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class TraceKey:
    """Names one logical tensor; ``microbatch``: in the reference's order, or :data:`STEP_LEVEL`."""

    iteration: Count
    microbatch: Microbatch
    kind: Kind
    name: str
    index: Count = 0

    @property
    def is_before(self) -> bool:
        """Whether this is a parameter, or the bias of a router, before the step."""
        before = (Kind.PARAM, ParamIndex.BEFORE), (Kind.BUFFER, BufferIndex.BEFORE)
        return (self.kind, self.index) in before

    @property
    def direction(self) -> Direction:
        """Where in the step the tensor is: some are read both before the step and after it."""
        if self.is_before:
            return Direction.START
        return Direction.UPDATE if self.kind is Kind.PARAM else self.kind.direction

    def __str__(self) -> str:
        where = "" if self.microbatch == STEP_LEVEL else f" microbatch {self.microbatch}"
        return f"{self.name} {self.kind}.{self.index} (iteration {self.iteration}{where})"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OfTensor(Record):
    """A record about one tensor, with the fields of its key."""

    iteration: Count
    microbatch: Microbatch
    kind: Kind
    name: str
    index: Count

    @property
    def key(self) -> TraceKey:
        """The tensor that this is about."""
        return TraceKey(self.iteration, self.microbatch, self.kind, self.name, self.index)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TensorResult(OfTensor):
    """A verdict without its texts; the fields are explained in :class:`Verdict`."""

    verdict: Outcome
    rel_err: Size | None
    rel_err_eps: Size | None
    tolerance: Size | None
    margin: Size | None
    ranks: tuple[Rank, ...]
    placement: str
    shape: tuple[Count, ...]

    @property
    def direction(self) -> Direction:
        """Where in the step the tensor is."""
        return self.key.direction

    @property
    def is_luck(self) -> bool:
        """Whether the margin of a pass depends on random numbers, not on how near a fault is."""
        return self.kind is Kind.INITIAL and self.verdict is Outcome.PASS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict(TensorResult):
    """One line of ``verdicts.jsonl``.

    ``rel_err`` to ``margin`` are those of the worst rank; ``None`` where nothing could be measured.
    ``ranks`` are the worst ones of a failure, or all holders of a pass. ``shape`` is the logical
    shape. ``note`` is for people, ``reason`` for programs.
    """

    note: str = ""
    reason: Reason | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Culprit(Record):
    """A module in which an error originates.

    ``explanation`` (of sort ``cause``, over ``axes``) was tested on the shards, or is "unknown";
    ``hint`` was not tested. ``collectives`` ran in the module in this direction. Culprits with the
    same ``group`` (0: not known) have one cause, or are the same module of several layers.
    """

    name: str
    kind: Kind
    direction: Direction
    reason: str
    explanation: str
    iteration: Count
    microbatch: Microbatch
    index: Count
    verdict: Outcome
    ranks: tuple[Rank, ...]
    rel_err: Size | None
    rel_err_eps: Size | None
    tolerance: Size | None
    margin: Size | None
    hint: str = ""
    where: str = ""
    cause: Cause | None = None
    axes: tuple[str, ...] = ()
    collectives: str = ""
    group: Count = 0
    places: tuple[Place, ...] = ()

    def shown_by[T: TensorResult](self, verdicts: Iterable[T]) -> T | None:
        """The failure that represents this module: its own tensor's, or its parameter's."""
        inside = f"{self.name}."
        return max(
            (
                result
                for result in verdicts
                if result.verdict.is_failure
                and (result.kind, result.index) == (self.kind, self.index)
                and (
                    f"{result.name}.".startswith(inside)
                    # An input of the model has the name of its argument.
                    or (self.direction is Direction.START and inside.startswith(f"{result.name}."))
                )
            ),
            key=lambda result: (
                (result.iteration, result.microbatch) == (self.iteration, self.microbatch),
                result.margin == self.margin,
                result.name == self.name,
                result.margin or 0.0,
            ),
            default=None,
        )


class Result(StrEnum):
    """The one answer of a check."""

    EQUIVALENT = "equivalent"
    DIVERGED = "diverged"
    COULD_NOT_CHECK = "could not check"

    @property
    def exit_code(self) -> ExitCode:
        """The contract's exit code for this answer."""
        return ExitCode[self.name]


@dataclasses.dataclass(frozen=True, slots=True)
class Exactness(Record):
    """Whether what this layout computes in the reference's order is bitwise equal to it.

    ``expected`` tensors must be bitwise equal, ``lost`` of them are not; ``first`` is the first of
    these, with its ranks and its relative error. There is no tolerance.
    """

    expected: Count
    lost: Count
    first: str = ""
    ranks: tuple[Rank, ...] = ()
    rel_err: Size | None = None

    def contradiction(self) -> str:
        """Why these numbers cannot be true; empty if they can."""
        return f"{self.lost} lost of {self.expected} expected" if self.lost > self.expected else ""


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """One element of a failed tensor: its logical index, both values, and who holds it."""

    index: tuple[Count, ...]
    reference: float
    candidate: float
    rank: Rank


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Residual(OfTensor):
    """What the error of a failed tensor looks like.

    On the ranks that fail, ``exact`` of ``total`` elements are equal. ``counts`` are the numbers of
    elements whose error, in units of the reference's root mean square, is in ``[10^d, 10^(d+1))``,
    by decade ``d`` from ``lowest`` on; the outer ones count larger and smaller ones. ``worst`` has
    the largest errors first, each element as all failing ranks that hold it have it. ``boxes``:
    rank, and the logical slices that it holds.
    """

    total: Count
    exact: Count
    lowest: int
    counts: tuple[Count, ...]
    worst: tuple[Element, ...]
    boxes: tuple[tuple[Rank, str], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A package as it was imported: its version, its place, and its commit in a git checkout.

    ``commit`` is empty outside a checkout; ``dirty`` says that tracked files differ from it.
    """

    version: str
    path: str
    commit: str = ""
    dirty: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run(Record):
    """Enough to know which run this was and to repeat it; it began at ``date`` (UTC, ISO 8601).

    Every file of the run carries its ``id``, 16 hexadecimal digits. ``environment`` are variables
    that can change a number or a path.
    """

    id: str
    command: tuple[str, ...]
    script: str
    script_sha256: str
    megatron: Code
    ttrace: Code
    host: str
    user: str
    date: str
    environment: dict[str, str]
    seed: int

    def contradiction(self) -> str:
        """Why this names no run; empty if it does."""
        return "" if _RUN_ID.fullmatch(self.id) else "id: expected 16 hexadecimal digits"


@dataclasses.dataclass(frozen=True, slots=True)
class Summary(Record):
    """The content of ``summary.json``.

    ``config`` holds layout and settings of the check. ``exactness``, ``changed_code`` and ``blame``
    may be unknown. ``too_blind``: rounding in 16 bits hides too much, which isolation may show. The
    verdict does not depend on what follows ``run``.
    """

    verdict: Result
    counts: dict[str, Count]
    culprits: tuple[Culprit, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    timings: dict[str, Annotated[float, Bounds(0.0, nan=True)]]
    execution_order: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    exactness: Exactness | None = None
    residuals: tuple[Residual, ...] = ()
    run: Run | None = None
    not_exercised: tuple[NotExercised, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    collective_findings: tuple[LedgerFinding, ...] = ()
    changed_code: ChangedCode | None = None
    blame: Blame | None = None
    known_fault: str = ""
    too_blind: bool = False

    @property
    def reason(self) -> str:
        """Why the run could not be checked: the last notice; empty if there is an answer."""
        undecided = self.verdict is Result.COULD_NOT_CHECK and self.notices
        return self.notices[-1] if undecided else ""

    @property
    def leaves_doubt(self) -> bool:
        """Whether a module is blamed for its result and no cause was found.

        Its inputs may be off too, though within their tolerance: isolation would show it.
        """
        computed = Direction.FORWARD, Direction.BACKWARD, Direction.GRADIENT
        return not self.config.get("isolate") and any(
            culprit.cause is None
            and culprit.direction in computed
            and culprit.verdict is Outcome.DIVERGED
            for culprit in self.culprits
        )

    def contradiction(self) -> str:
        """Why this summary cannot be true; empty if it can."""
        outcomes = {outcome.value: outcome for outcome in Outcome}
        unknown = [name for name in self.counts if name not in outcomes]
        if unknown:
            return f"counts: no outcome is called {codec.shown(unknown[0])}"
        failed = sum(n for name, n in self.counts.items() if outcomes[name].is_failure)
        if self.verdict is Result.EQUIVALENT and (failed or self.culprits):
            return f"verdict: equivalent, with {failed} failures and {len(self.culprits)} culprits"
        return ""

    def disagreement(self, verdicts: Iterable[Verdict]) -> str:
        """Why these verdicts are not those that were counted; empty if they are."""
        outcomes = Counter(verdict.verdict.value for verdict in verdicts)
        for name in sorted(outcomes.keys() | self.counts.keys()):
            if self.counts and outcomes[name] != (counted := self.counts.get(name, 0)):
                return f"{outcomes[name]} verdicts are {name!r}, {counted} were counted"
        return ""
