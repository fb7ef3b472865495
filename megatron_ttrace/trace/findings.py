# SPDX-License-Identifier: Apache-2.0
"""What is found out about a failed tensor: tested hypotheses, what they suggest, and notes."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

UNKNOWN = "unknown"
"""The explanation of a culprit for which no tested hypothesis holds."""


class Cause(StrEnum):
    """The sort of a finding."""

    INITIAL_VALUES = "initial_values"
    RANDOM_STATE = "random_state"
    LAYERS = "missing_layers"
    ZERO = "zero"
    FACTOR = "factor_per_rank"
    TOO_LARGE = "too_large"
    TOO_SMALL = "too_small"
    SIGN = "sign"
    SOFTMAX_SCALE = "softmax_scale"
    CAST = "cast"
    PRECISION = "precision"
    PARTIAL = "partial_sums"
    TIED = "tied_embedding"
    WEIGHTS = "microbatch_weights"
    ADDEND = "addend"
    OTHER_TIME = "other_time"
    OTHER_MODULE = "other_module"
    OPERAND = "operand"
    OFFSET = "offset"
    ORDER = "order"
    HALVES = "halves"
    TOKEN_IDS = "token_ids"  # noqa: S105 - tokens of text
    ROWS = "rows"
    COPY = "copy"
    ATTENTION_MASK = "attention_mask"
    ATTENTION_BLOCK = "attention_block"


class Remark(StrEnum):
    """What is said of a tensor beside its outcome; report/wording.py has the sentences."""

    DISPATCHED = "dispatched"
    EXTRA = "extra"
    EMPTY = "empty"
    MISSING = "missing"
    NONFINITE = "nonfinite"
    UNCOVERED = "uncovered"
    UNEVEN = "uneven"
    REPLICAS = "replicas"
    REPLICAS_ROUNDED = "replicas_rounded"
    UNDEFINED = "undefined"
    BLIND = "blind"
    ROUTED = "routed"
    SHAPE = "shape"
    NOT_BITWISE = "not_bitwise"
    ONE_RUN = "one_run"
    OTHER_SHAPE = "other_shape"
    REFERENCE_NONFINITE = "reference_nonfinite"
    OVERLAP = "overlap"
    INCOMPLETE = "incomplete"
    FEW_VALUES = "few_values"
    ONE_VALUE = "one_value"
    INITIAL_REPLICAS = "initial_replicas"
    SAME_START = "same_start"
    DISTRIBUTION = "distribution"
    LOST = "lost"
    NOT_THE_REFERENCES = "not_the_references"


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """Mean and standard deviation of some values; ``std`` is 0 for equal ones."""

    mean: float
    std: float


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A remark with what belongs to it.

    Attributes:
        what: the remark.
        value: what was counted or measured.
        limit: what that is to be compared with.
        ranks: the ranks concerned.
        text: a name, or the message of an error.
        samples: the candidate's and the reference's values.
    """

    what: Remark
    value: float = 0.0
    limit: float = 0.0
    ranks: tuple[int, ...] = ()
    text: str = ""
    samples: tuple[Sample, ...] = ()


FACTORS = (Cause.FACTOR, Cause.TOO_LARGE, Cause.TOO_SMALL)


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A tested hypothesis.

    Attributes:
        text: what is wrong, as far as it was tested or seen in the shards.
        cause: its sort.
        axes: the mesh axes (or ``microbatches``) it speaks of.
        hint: what such a finding suggests. It was not tested.
    """

    text: str
    cause: Cause
    axes: tuple[str, ...] = ()
    hint: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What is said about the cause of a culprit.

    Attributes:
        text: what was tested on the shards, or :data:`UNKNOWN`.
        hint: what that suggests; not tested.
        where: file, line and function of Megatron that are the common location of such faults.
        cause: the sort of the finding; ``None`` where nothing was found.
        axes: of the finding.
    """

    text: str = UNKNOWN
    hint: str = ""
    where: str = ""
    cause: Cause | None = None
    axes: tuple[str, ...] = ()
