# SPDX-License-Identifier: Apache-2.0
"""What ``ttrace resume`` finds out: the records of ``resume.json``."""

import dataclasses
from enum import StrEnum

from megatron_ttrace.trace.codec import Count, Rank, Record, Size
from megatron_ttrace.trace.records import Result


class What(StrEnum):
    """What a restart does not have as it was."""

    WEIGHT = "weight"
    MAIN = "main weight"
    EXP_AVG = "exp_avg"
    EXP_AVG_SQ = "exp_avg_sq"
    BUFFER = "buffer"
    OTHER = "optimizer state"
    NUMBER = "number"
    RANDOM = "random state"
    SAMPLES = "samples"
    LOSS = "loss"
    GRAD_NORM = "grad norm"

    @property
    def is_tensor(self) -> bool:
        """Whether it is the state of a parameter, or a buffer."""
        weights, moments = (What.WEIGHT, What.MAIN), (What.EXP_AVG, What.EXP_AVG_SQ)
        return self in (*weights, *moments, What.BUFFER, What.OTHER)


class How(StrEnum):
    """In which way."""

    DIFFERENT = "different"
    MISSING = "missing"
    EXTRA = "extra"
    SHAPE = "another shape"
    INCOMPLETE = "incomplete"
    CONFLICT = "replicas differ"


class Blame(StrEnum):
    """What went wrong, as far as it can be distinguished."""

    SAVING = "saving"
    LOADING = "loading"
    EITHER = "saving or loading"
    TRAINING = "training on"
    """All compared state was restored, and the following steps differ nevertheless."""


def code_of(place: str) -> tuple[str, str]:
    """The file and the function of ``file:line (function)``."""
    where, _, function = place.partition(" ")
    return where.partition(":")[0], function


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Record):
    """One tensor or number that is not what it was.

    Attributes:
        name: of the parameter, buffer or number; of a step its iteration.
        rel_err: ``||restarted - uninterrupted|| / ||uninterrupted||``, where both are there.
        tolerance: tolerated ``rel_err``; 0 where it must be equal.
        wrong: elements that differ, of ``total``.
        before: the number in the uninterrupted run, where it is one; ``after``: in the restarted.
        ranks: of the restarted run that have a wrong part; all of the saving run if saving is to
            blame and nothing wrong was loaded.
        part: that the first of these ranks has of the tensor.
        where: the code that describes the state to the checkpoint.
        changed: the user's changes that ran while it was saved or loaded, the nearest first.
    """

    what: What
    name: str
    how: How
    blame: Blame
    rel_err: Size | None = None
    tolerance: Size = 0.0
    wrong: Count = 0
    total: Count = 0
    before: float | None = None
    after: float | None = None
    ranks: tuple[Rank, ...] = ()
    part: str = ""
    where: str = ""
    changed: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Logged:
    """What is logged of one step after the restart, in both runs."""

    iteration: Count
    loss: tuple[float | None, float | None]
    grad_norm: tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Restart(Record):
    """The answer for one layout.

    Attributes:
        layout: the flags by which it differs from the job's own; empty for that.
        compared: tensors of the loaded state that were compared.
        stored: of them, those that were also read from the checkpoint.
        otherwise: of them, those that were loaded as they were, although the checkpoint has other
            values: it may be right for this layout alone.
        differences: what is not as it was, the cause first. If the loaded state differs, the
            following steps do so as a consequence and are not listed.
        notices: what was not compared, and why.
    """

    layout: str
    verdict: Result
    reason: str = ""
    compared: Count = 0
    stored: Count = 0
    otherwise: Count = 0
    differences: tuple[Difference, ...] = ()
    steps: tuple[Logged, ...] = ()
    notices: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Record):
    """The content of ``resume.json``.

    Attributes:
        verdict: of all restarts: the worst.
        command: the job, without values that may be secret.
        restarts: the same layout first.
        notices: how the runs differ from the command.
    """

    verdict: Result
    command: tuple[str, ...]
    iteration: Count
    checkpoint: str
    restarts: tuple[Restart, ...]
    notices: tuple[str, ...] = ()
    seconds: Size = 0.0

    @property
    def reason(self) -> str:
        """Why something could not be checked; empty if there is an answer for every layout."""
        return next((restart.reason for restart in self.restarts if restart.reason), "")


def worst(verdicts: list[Result]) -> Result:
    """The one answer for several restarts."""
    order = (Result.DIVERGED, Result.COULD_NOT_CHECK, Result.EQUIVALENT)
    return min(verdicts, key=order.index)
