# SPDX-License-Identifier: Apache-2.0
"""What the steps of a campaign hand to each other."""

import dataclasses
from enum import StrEnum
from typing import Any

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.records import Culprit


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A piece of source; as in ``ast``, lines count from 1 and columns (bytes) from 0."""

    first_line: int
    first_column: int
    last_line: int
    last_column: int


@dataclasses.dataclass(frozen=True, slots=True)
class Mutant:
    """One single fault.

    Attributes:
        id: does not change while the changed statement stays in its function.
        module: e.g. ``megatron.core.tensor_parallel.mappings``.
        qualname: of the outermost function around it.
        operator: name of the operator.
        span: what is replaced.
        fragment: its text.
        replacement: the new text.
        statement: the first line of the statement around it.
        classes: those that the statement names, or the branch of an ``if`` that it is in.
    """

    id: str
    module: str
    qualname: str
    operator: str
    span: Span
    fragment: str
    replacement: str
    statement: str = ""
    classes: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The part of Megatron it is in: what the module's name has after ``megatron.core``."""
        words = self.module.split(".")[2:]
        return ".".join(words[:2] if words[:1] == ["transformer"] else words[:1])

    @property
    def lines(self) -> range:
        """The lines it changes."""
        return range(self.span.first_line, self.span.last_line + 1)

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        found: dict[str, Any] = codec.encode(self)
        return {**found, "line": found.pop("span")["first_line"]}


class Fate(StrEnum):
    """The result of a mutant in one layout."""

    DIVERGED = "diverged"
    """The check found it: killed, and nothing else would have shown it."""
    CRASHED = "crashed"
    """The run or its check ended with an error: killed, and visible without a check."""
    HUNG = "hung"
    """The run did not end in time: likewise."""
    SURVIVED = "survived"
    """Found equivalent to the reference."""


class Phase(StrEnum):
    """The part of a training step that code outside of any module belongs to."""

    SETUP = "setup"
    """Before the first forward pass."""
    SCHEDULE = "schedule"
    """Microbatches, pipeline stages, and what is sent between them."""
    GRADIENTS = "gradients"
    """Reduction of gradients, and gathering of parameters."""
    OPTIMIZER = "optimizer"
    LOGGING = "logging"
    """None of the others."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ran:
    """Where a mutated function runs without the mutant.

    ``modules`` are those in whose forward pass, backward pass or constructor it runs; layers are
    not numbered (``decoder.layers.*.mlp``). ``phases`` are those in which it runs outside of them.
    """

    modules: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class MutantTrial:
    """One mutant in one layout; ``told`` are the first culprits in words, or the error."""

    layout: str
    fate: Fate
    seconds: float
    told: str = ""
    culprits: tuple[Culprit, ...] = ()
    ran: Ran = Ran()

    @property
    def explained(self) -> str:
        """The explanation of the first culprit."""
        return self.culprits[0].explanation if self.culprits else ""


class Explanation(StrEnum):
    """Why a mutant survives."""

    EQUIVALENT = "equivalent"
    """Proven: in no configuration does a number of a training step depend on the change."""
    DORMANT = "dormant"
    """A fault, with a reason why it has no effect in the jobs of the campaign."""
    UNSEEN = "unseen"
    """The fault is real, and the check does not see it."""


@dataclasses.dataclass(frozen=True, slots=True)
class MutantRow:
    """One mutant after its trials; ``explanation`` and ``why`` are from survivors.toml.

    ``inert``: it survived, and no job that runs its line trains differently with it.
    """

    mutant: Mutant
    trials: tuple[MutantTrial, ...]
    explanation: Explanation | None = None
    why: str = ""
    inert: bool = False

    def contradiction(self) -> str:
        """Why it cannot be a row, for the codec."""
        return "" if self.trials else "a row has at least one trial"

    @property
    def fate(self) -> Fate:
        """The last trial's: trials end with the first that kills."""
        return self.trials[-1].fate

    @property
    def column(self) -> str:
        """What it counts as: its fate, or why it survived if the checker is not to blame."""
        if self.fate is Fate.SURVIVED and self.explanation is Explanation.EQUIVALENT:
            return "equivalent"
        return "inert" if self.inert else str(self.fate)

    @property
    def disproved(self) -> bool:
        """Whether the check found a mutant that is listed as equivalent."""
        return self.fate is Fate.DIVERGED and self.explanation is Explanation.EQUIVALENT

    def to_json(self) -> dict[str, Any]:
        """For machines."""
        return {
            **self.mutant.to_json(),
            "fate": self.fate.value,
            "explanation": codec.encode(self.explanation),
            "why": self.why,
            "inert": self.inert,
            "trials": codec.encode(self.trials),
        }
