# SPDX-License-Identifier: Apache-2.0
"""The typed records that travel between the steps, and the words they are made of.

Every line of output is one of these records; terminal, HTML, W&B and JSONL only render them. The
field names of :class:`Verdict` and :class:`Summary` are a contract (docs/flags-and-files.md).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Self

from megatron_ttrace.errors import ExitCode
from megatron_ttrace.unexercised import NotExercised


class Kind(StrEnum):
    """What a traced tensor is. Order is the order in which a training step produces them."""

    INITIAL = "initial"
    TOKENS = "tokens"
    PARAM = "param"
    INPUT = "input"
    OUTPUT = "output"
    ROUTING = "routing"
    LOSS = "loss"
    GRAD_OUTPUT = "grad_output"
    GRAD_INPUT = "grad_input"
    MAIN_GRAD = "main_grad"
    GRAD_NORM = "grad_norm"
    PARAM_DELTA = "param_delta"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    BUFFER = "buffer"

    @property
    def direction(self) -> Direction:
        """The direction of computation in which a fault of this kind first shows."""
        return _DIRECTION[self]


class Direction(StrEnum):
    """Where in a training step a module went wrong."""

    START = "start"
    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    UPDATE = "update"


_DIRECTION = {
    Kind.INITIAL: Direction.START,
    Kind.TOKENS: Direction.START,
    Kind.PARAM: Direction.START,
    Kind.INPUT: Direction.FORWARD,
    Kind.OUTPUT: Direction.FORWARD,
    Kind.ROUTING: Direction.FORWARD,
    Kind.LOSS: Direction.FORWARD,
    Kind.GRAD_OUTPUT: Direction.BACKWARD,
    Kind.GRAD_INPUT: Direction.BACKWARD,
    Kind.MAIN_GRAD: Direction.GRADIENT,
    Kind.GRAD_NORM: Direction.GRADIENT,
    Kind.PARAM_DELTA: Direction.UPDATE,
    Kind.EXP_AVG: Direction.UPDATE,
    Kind.EXP_AVG_SQ: Direction.UPDATE,
    Kind.BUFFER: Direction.UPDATE,
}


def direction_of(kind: Kind, index: int) -> Direction:
    """The direction of a tensor: its kind's, but for parameters after the step (index 1)."""
    return Direction.UPDATE if kind is Kind.PARAM and index else kind.direction


class Outcome(StrEnum):
    """What was found out about one tensor. Nothing is dropped: every key ends in one of these."""

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


SCORES, CHOICE = 0, 1
"""Indices of a router's ``routing`` tensors: scores that experts are chosen by, and the choice."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class TraceKey:
    """Names one logical tensor of a run.

    ``microbatch`` counts over the whole global batch, in the reference's order;
    :data:`STEP_LEVEL` for tensors that belong to the step.
    """

    iteration: int
    microbatch: int
    kind: Kind
    name: str
    index: int = 0

    def __str__(self) -> str:
        where = "" if self.microbatch == STEP_LEVEL else f" microbatch {self.microbatch}"
        return f"{self.name} {self.kind}.{self.index} (iteration {self.iteration}{where})"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """One line of ``verdicts.jsonl``.

    ``rel_err`` is the relative error of the worst rank, ``rel_err_eps`` the same in machine
    epsilons of the compute dtype, ``tolerance`` what rounding alone may cause, ``margin`` their
    ratio; all four are ``None`` where nothing could be measured. ``ranks`` are those the verdict
    speaks of (the worst ones of a failure, all holders of a pass). ``shape`` is the logical shape.
    """

    iteration: int
    microbatch: int
    kind: Kind
    name: str
    index: int
    verdict: Outcome
    rel_err: float | None
    rel_err_eps: float | None
    tolerance: float | None
    margin: float | None
    ranks: tuple[int, ...]
    placement: str
    shape: tuple[int, ...]
    note: str = ""

    @property
    def key(self) -> TraceKey:
        """The tensor this verdict is about."""
        return TraceKey(self.iteration, self.microbatch, self.kind, self.name, self.index)

    @property
    def direction(self) -> Direction:
        """Where in the step the tensor stands; a parameter is read before the step and after it."""
        return direction_of(self.kind, self.index)

    @classmethod
    def of(cls, key: TraceKey, **said: Any) -> Self:
        """What is said of one tensor."""
        return cls(key.iteration, key.microbatch, key.kind, key.name, key.index, **said)

    @property
    def is_luck(self) -> bool:
        """Whether the margin of a pass says how random numbers fell, not how near a fault is."""
        return self.kind is Kind.INITIAL and self.verdict is Outcome.PASS

    def to_json(self) -> dict[str, Any]:
        """A JSON object in the contract's field order; infinities and NaN become strings."""
        return {f.name: _json(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`. Raises ``KeyError``/``ValueError`` on a foreign line."""
        values = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        values["kind"] = Kind(values["kind"])
        values["verdict"] = Outcome(values["verdict"])
        for name in ("rel_err", "rel_err_eps", "tolerance", "margin"):
            values[name] = None if values[name] is None else float(values[name])
        values["ranks"] = tuple(values["ranks"])
        values["shape"] = tuple(values["shape"])
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """A localised module: where the error is born, as opposed to where it is merely seen.

    ``reason`` is the chain of evidence in one sentence, ``explanation`` a tested hypothesis about
    the cause or "unknown".
    """

    name: str
    kind: Kind
    direction: Direction
    reason: str
    explanation: str
    iteration: int
    microbatch: int
    index: int
    verdict: Outcome
    ranks: tuple[int, ...]
    rel_err: float | None
    rel_err_eps: float | None
    tolerance: float | None
    margin: float | None

    def shown_by(self, verdicts: Iterable[Verdict]) -> Verdict | None:
        """The failure that stands for this module: its own tensor's, or its parameter's."""
        inside = f"{self.name}."
        return max(
            (
                one
                for one in verdicts
                if one.verdict.is_failure
                and (one.kind, one.index) == (self.kind, self.index)
                and (one.name == self.name or one.name.startswith(inside))
            ),
            key=lambda one: (
                (one.iteration, one.microbatch) == (self.iteration, self.microbatch),
                one.margin == self.margin,
                one.name == self.name,
                one.margin or 0.0,
            ),
            default=None,
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON object for ``summary.json``."""
        return {f.name: _json(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        values = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        values["kind"] = Kind(values["kind"])
        values["direction"] = Direction(values["direction"])
        values["verdict"] = Outcome(values["verdict"])
        for name in ("rel_err", "rel_err_eps", "tolerance", "margin"):
            values[name] = None if values[name] is None else float(values[name])
        values["ranks"] = tuple(values["ranks"])
        return cls(**values)


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
class Exactness:
    """Whether what this layout computes in the reference's order is bitwise the reference's.

    ``expected`` tensors must be equal to the last bit, ``lost`` are not; ``first`` of these is
    named with its ranks and its relative error. No tolerance enters: rounding is no excuse here.
    """

    expected: int
    lost: int
    first: str = ""
    ranks: tuple[int, ...] = ()
    rel_err: float | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object for ``summary.json``."""
        return {f.name: _json(getattr(self, f.name)) for f in dataclasses.fields(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        error = data.get("rel_err")
        return cls(
            expected=data["expected"],
            lost=data["lost"],
            first=data.get("first", ""),
            ranks=tuple(data.get("ranks", ())),
            rel_err=None if error is None else float(error),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Element:
    """One element of a failed tensor: its logical index, both values, and who holds it."""

    index: tuple[int, ...]
    reference: float
    candidate: float
    rank: int


@dataclasses.dataclass(frozen=True, slots=True)
class Residual:
    """What the error of a failed tensor looks like.

    Attributes:
        key: of the tensor.
        total: number of elements looked at, over the ranks that fail.
        exact: how many of them are equal.
        lowest: decade of the first count.
        counts: number of elements whose error, in units of the reference's root mean square, lies
            in ``[10^d, 10^(d+1))``, by decade ``d``; the outer ones hold what lies beyond.
        worst: the elements with the largest errors, the largest first.
        boxes: rank, and the logical slices that it holds.
    """

    key: TraceKey
    total: int
    exact: int
    lowest: int
    counts: tuple[int, ...]
    worst: tuple[Element, ...]
    boxes: tuple[tuple[int, str], ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON object for ``summary.json``."""
        key = dataclasses.asdict(self.key) | {"kind": self.key.kind.value}
        worst = [
            {f.name: _json(getattr(one, f.name)) for f in dataclasses.fields(one)}
            for one in self.worst
        ]
        return key | {
            "total": self.total,
            "exact": self.exact,
            "lowest": self.lowest,
            "counts": list(self.counts),
            "worst": worst,
            "boxes": [list(box) for box in self.boxes],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(
            TraceKey(
                data["iteration"],
                data["microbatch"],
                Kind(data["kind"]),
                data["name"],
                data["index"],
            ),
            data["total"],
            data["exact"],
            data["lowest"],
            tuple(data["counts"]),
            tuple(
                Element(
                    tuple(one["index"]),
                    float(one["reference"]),
                    float(one["candidate"]),
                    one["rank"],
                )
                for one in data["worst"]
            ),
            tuple((rank, text) for rank, text in data["boxes"]),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Code:
    """A package as it was imported: its version, where it lies, and its commit in a git checkout.

    ``commit`` is empty outside a checkout; ``dirty`` says that tracked files differ from it.
    """

    version: str
    path: str
    commit: str = ""
    dirty: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Enough to know which run this was and to repeat it.

    Attributes:
        id: 16 hexadecimal digits; every file of the run carries it.
        command: the whole command line, as words.
        script: path of the training script.
        script_sha256: of the script's content.
        megatron: the Megatron that ran.
        ttrace: this package.
        host: name of the host of the rank that wrote the summary.
        user: who ran it.
        date: UTC, ISO 8601, when the run began.
        environment: those environment variables that can change a number or a path.
        seed: Megatron's ``--seed``.
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

    def to_json(self) -> dict[str, Any]:
        """A JSON object for ``summary.json``."""
        return dataclasses.asdict(self) | {"command": list(self.command)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        values = {f.name: data[f.name] for f in dataclasses.fields(cls)}
        values["command"] = tuple(values["command"])
        values["megatron"] = Code(**values["megatron"])
        values["ttrace"] = Code(**values["ttrace"])
        return cls(**values)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """The content of ``summary.json``.

    ``counts`` maps each :class:`Outcome` to its number of tensors, ``config`` holds the layout and
    the settings of the check, ``execution_order`` the modules in the order the reference ran them.
    ``exactness`` is ``None`` where nothing is known of it. ``residuals`` are those of failed
    tensors, as far as their shards were kept. ``unexercised`` is what a pass says nothing about.
    """

    verdict: Result
    counts: dict[str, int]
    culprits: tuple[Culprit, ...]
    config: dict[str, Any]
    versions: dict[str, str]
    timings: dict[str, float]
    execution_order: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    exactness: Exactness | None = None
    residuals: tuple[Residual, ...] = ()
    run: Run | None = None
    unexercised: tuple[NotExercised, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A JSON object for ``summary.json``."""
        return {
            "run": self.run.to_json() if self.run else None,
            "verdict": self.verdict.value,
            "counts": dict(self.counts),
            "culprits": [culprit.to_json() for culprit in self.culprits],
            "config": self.config,
            "versions": self.versions,
            "timings": self.timings,
            "execution_order": list(self.execution_order),
            "notices": list(self.notices),
            "not_exercised": [one.to_json() for one in self.unexercised],
            "exactness": self.exactness.to_json() if self.exactness else None,
            "residuals": [residual.to_json() for residual in self.residuals],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(
            verdict=Result(data["verdict"]),
            counts=data["counts"],
            culprits=tuple(Culprit.from_json(c) for c in data["culprits"]),
            config=data["config"],
            versions=data["versions"],
            timings=data["timings"],
            execution_order=tuple(data.get("execution_order", ())),
            notices=tuple(data.get("notices", ())),
            exactness=Exactness.from_json(data["exactness"]) if data.get("exactness") else None,
            residuals=tuple(Residual.from_json(one) for one in data.get("residuals", ())),
            run=Run.from_json(data["run"]) if data.get("run") else None,
            unexercised=tuple(NotExercised.from_json(one) for one in data.get("not_exercised", ())),
        )


def _json(value: Any) -> Any:
    """JSON has no infinities: they travel as the strings that ``float()`` reads back."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, tuple):
        return list(value)
    return value
