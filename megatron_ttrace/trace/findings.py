# SPDX-License-Identifier: Apache-2.0
"""What is found out about a failed tensor, as enums and numbers; ``report/`` makes all text."""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import NamedTuple, dataclass_transform

from megatron_ttrace.trace.collectives import Citation
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.places import Place


class Cause(StrEnum):
    """What sort of fault a finding is."""

    INITIAL_VALUES = "initial_values"
    DIVISION = "division"
    RANDOM_STATE = "random_state"
    LAYERS = "missing_layers"
    LAYER_NUMBERS = "layer_numbers"
    ZERO = "zero"
    FACTOR = "factor_per_rank"
    TOO_LARGE = "too_large"
    TOO_SMALL = "too_small"
    SIGN = "sign"
    SOFTMAX_SCALE = "softmax_scale"
    CAST = "cast"
    PRECISION = "precision"
    PARTIAL = "partial_sums"
    PARTS = "sum_of_parts"
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
    SAMPLES = "samples"
    COPY = "copy"
    ATTENTION_MASK = "attention_mask"
    ATTENTION_BLOCK = "attention_block"
    COUNTED_TWICE = "counted_twice"
    NEVER_COUNTED = "never_counted"
    OTHER_NORM = "other_norm"
    HYPERPARAMETERS = "hyperparameters"
    NUMBER = "number"
    SETTING = "setting"
    CUT_OFF = "cut_off"
    FROZEN = "frozen"
    THAWED = "thawed"
    RECOMPUTED = "recomputed"
    NOT_GATHERED = "not_gathered"


class Remark(StrEnum):
    """What else than a reason belongs to an outcome; report/wording.py has the sentences."""

    EXTRA = "extra"
    EMPTY = "empty"
    MISSING = "missing"
    NONFINITE = "nonfinite"
    UNCOVERED = "uncovered"
    UNEVEN = "uneven"
    ELEMENT = "element"
    REPLICAS = "replicas"
    REPLICAS_ROUNDED = "replicas_rounded"
    ROUTED = "routed"
    DROPPED = "dropped"
    AT_THE_MEAN = "at_the_mean"
    SHAPE = "shape"
    DTYPE = "dtype"
    NOT_BITWISE = "not_bitwise"
    OTHER_SHAPE = "other_shape"
    REFERENCE_NONFINITE = "reference_nonfinite"
    UNINITIALISED = "uninitialised"
    OVERLAP = "overlap"
    INCOMPLETE = "incomplete"
    FEW_VALUES = "few_values"
    ONE_VALUE = "one_value"
    INITIAL_REPLICAS = "initial_replicas"
    SAME_START = "same_start"
    DISTRIBUTION = "distribution"
    DISPLACED = "displaced"
    LOST = "lost"
    NOT_THE_REFERENCES = "not_the_references"
    CLAIMED = "claimed"
    LACKING = "lacking"
    HYPERPARAMETERS = "hyperparameters"
    PARTIAL = "partial"
    SCALED = "scaled"
    ADDED_UP_LATER = "added_up_later"
    UNDECIDED = "undecided"
    UNUSED = "unused"
    CUT_OFF = "cut_off"
    RECOMPUTED = "recomputed"
    NOT_GATHERED = "not_gathered"


class Sample(NamedTuple):
    """Mean and standard deviation of some values; ``std`` is 0 for equal ones."""

    mean: float
    std: float


@dataclasses.dataclass(frozen=True, slots=True)
class Note:
    """A remark on a tensor: ``value`` and its ``limit``, a name or message, both runs' samples."""

    what: Remark | Reason
    value: float = 0.0
    limit: float = 0.0
    ranks: tuple[int, ...] = ()
    text: str = ""
    samples: tuple[Sample, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultNote(Note):
    """A remark on a fault that has further numbers."""

    finding: Finding


@dataclass_transform(frozen_default=True, kw_only_default=True)
class _Fault:
    """Subclasses are frozen dataclasses, whose fields are given by name."""

    def __init_subclass__(cls, *, kw_only: bool = True) -> None:
        dataclasses.dataclass(frozen=True, kw_only=kw_only)(cls)


class Finding(_Fault, kw_only=False):
    """A repair that passed its test, and the mesh axes (or ``microbatches``) involved."""

    cause: Cause
    axes: tuple[str, ...] = ()


class Composed(Finding):
    """Several repairs, one applied to what the one before it left."""

    steps: tuple[Finding, ...]


class MisplacedLayers(Finding):
    """Layers are on no pipeline stage, on several (``twice``) or not the reference's (``strange``).

    Stages have ``held`` of ``total``: without the remainder of a division by ``divisor``, if not 0.
    """

    missing: tuple[int, ...]
    total: int
    held: tuple[int, ...]
    twice: tuple[int, ...] = ()
    strange: tuple[int, ...] = ()
    divisor: int = 0


class OtherSetting(Finding):
    """``module`` has a number as an ``attribute`` that differs from the reference's."""

    module: str
    attribute: str
    value: float
    expected: float


class OtherDivision(Finding):
    """Ranks take ``held`` of ``total`` elements of a dim for all of it; ``inverse``: vice versa."""

    dim: int
    held: int
    total: int
    inverse: bool = False


class ConstantFactor(Finding):
    """All values are ``ratio`` times what they should be; ``unscaled``: those of the reference.

    It (``root``: its square) equals one of ``sizes`` of the layout, or a product of several.
    """

    ratio: float
    sizes: tuple[tuple[str, ...], ...] = ()
    root: bool = False
    unscaled: bool = False


class GradientFactor(ConstantFactor):
    """The gradient is ``ratio`` times too large where the optimizer adds it to a moment."""


class RankFactors(Finding):
    """Each rank's values are off by a factor of its own: ``(rank, ratio)``."""

    factors: tuple[tuple[int, float], ...]


class CastOperand(StrEnum):
    """The tensor whose cast has a certain scale."""

    INPUT = "input"
    OWN_PART = "own_part"
    EITHER = "either"


class ProductFactors(RankFactors):
    """The product of a linear layer is off by a factor; its bias, if it has one, is not.

    If the factors are a scale (or its inverse) of the cast of ``operand``, ``dtype`` is its format.
    """

    has_bias: bool
    dtype: str = ""
    inverse: bool = False
    operand: CastOperand = CastOperand.INPUT


class Rounded(Finding):
    """The reference rounded to ``dtype``: its ``own``, or ``scaled`` with one scale for it."""

    dtype: str
    scaled: bool = False
    own: bool = False


class PartialSums(Finding):
    """The ranks' values along the axes add up to the reference; ``mean``: their mean is it."""

    mean: bool = False


class WrongCopies(Finding):
    """Of ranks that hold the same elements, ``wrong`` fail and ``right`` pass."""

    wrong: tuple[int, ...]
    right: tuple[int, ...]


class ShareWeights(NamedTuple):
    """How often a gradient's shares through ``module`` count, if not once, by rank of ``axis``."""

    module: str
    axis: str
    counts: tuple[tuple[int, float], ...]
    missing: bool


class UnequalShares(Finding):
    """Shares of a gradient do not count once each: by group of ranks, by module."""

    by_ranks: tuple[tuple[tuple[int, ...], tuple[ShareWeights, ...]], ...]


class Loss(StrEnum):
    """A loss whose gradient is a share of the whole gradient."""

    MAIN = "main loss"
    AUXILIARY = "auxiliary loss"
    SEQUENCE = "sequence auxiliary loss"
    GLOBAL = "global auxiliary loss"
    Z = "z loss"
    MTP = "MTP loss"
    INDEXER = "indexer loss"


class LossShare(Finding):
    """The share that ``losses`` together have in a gradient has a ``fault``; the rest is right."""

    losses: tuple[Loss, ...]
    fault: Finding


class Addend(Finding):
    """A bias (or the module's input) is added ``1 + surplus`` times instead of once."""

    bias: bool
    surplus: float


class Term(StrEnum):
    """A term of the cross entropy, or of its gradient."""

    LOGARITHM = "logarithm"
    LABEL = "label"
    SOFTMAX = "softmax"
    ONE = "one"


class LossTerm(Finding):
    """A term of the loss has a ``fault``; the others are right."""

    term: Term
    fault: Finding


class Shift(Finding):
    """``constant`` is added to all values: the logarithm of one of ``sizes``, or minus it."""

    constant: float
    sizes: tuple[tuple[str, ...], ...]


class OtherTime(Finding):
    """The value of another microbatch or iteration; of neither: from before the step."""

    microbatch: int | None = None
    iteration: int | None = None


class OtherTensor(Finding):
    """The reference's value of another tensor."""

    kind: str
    name: str


class WrongOperand(Finding):
    """A weight gradient made with the input of another module."""

    module: str


Span = tuple[int, int]
"""First and last index."""


class InPart(Finding):
    """Consecutive elements have a ``fault``: by rank, first and last, and how many it holds."""

    fault: Finding
    spans: tuple[tuple[int, Span, int], ...]


class OffsetRows(Finding):
    """``rank`` holds indices ``held`` of a dim where ``own`` belong; ``dim`` is what they are.

    ``shift`` is the distance if it is that of all ranks; without one the values are another rank's.
    """

    dim: str
    rank: int
    held: Span
    own: Span
    shift: int | None = None


class RowOrder(StrEnum):
    """The order that right rows are in."""

    REPEATED = "repeated"
    HALVES = "halves"
    REVERSED = "reversed"
    BLOCKS = "blocks"


class ReorderedRows(Finding):
    """``moved`` of ``total`` rows are not in their place; they form ``blocks``."""

    order: RowOrder
    dim: str
    moved: int
    total: int
    blocks: int


class Transposed(Finding):
    """Two dims are exchanged."""

    dims: tuple[int, int]


class WrongTokens(Finding):
    """All positions with token ids in ``ids``, rows of ranks ``owners``, and no others are wrong.

    They hold zeros, or other ``rows`` of the table, instead of or (``added``) beside their own.
    """

    ids: Span
    owners: Span | None = None
    zero: bool = False
    rows: Span | None = None
    added: bool = False


class WrongRows(Finding):
    """Some rows along dim ``at`` have a ``fault``; ``slice_of``: one rank's, by its axis."""

    dim: str
    at: int
    indices: tuple[int, ...]
    total: int
    fault: Finding | None = None
    slice_of: tuple[str, int] | None = None


class MaskOrder(StrEnum):
    """Under which causal masks attention's blocks of keys were computed."""

    NONE = "none"
    REVERSED = "reversed"
    SHIFTED = "shifted"
    OWN = "own"


class WrongMasks(Finding):
    """The gradient of ``tensor`` (q, k or v) was computed with other causal masks."""

    tensor: str
    order: MaskOrder
    shift: int = 0


class BlockWeight(Finding):
    """Blocks of keys count ``weight`` times in a gradient; they are of ``steps`` of a ring."""

    tensor: str
    steps: tuple[int, ...]
    ring: int
    weight: float
    missing: bool


class Lack(StrEnum):
    """Why a statistic does not have some elements: the first that is true."""

    UNGROUPED = "ungrouped"
    """They are in no optimizer's parameter groups."""
    UNFILLED = "unfilled"
    """No optimizer has a gradient of them."""
    LEFT_OUT = "left_out"
    """No rank puts them in, or none that has to."""
    LOST = "lost"
    """Ranks put in their own, and not all of them come together."""


class Miscounted(Finding):
    """Elements of ``names`` are ``least`` to ``most`` times in a statistic; ``lack``: why never."""

    statistic: Statistic
    least: int
    most: int
    names: tuple[str, ...]
    lack: Lack | None = None


class OtherHyperparameters(Finding):
    """Of a parameter, in this step or the ``following`` one: name, value, reference's."""

    values: tuple[tuple[str, float, float], ...]
    following: bool = False


class OtherNumber(Finding):
    """A rank holds other numbers than the one that is stored."""

    values: tuple[float, ...]
    stored: float


class FailingRanks(NamedTuple):
    """The ranks on which a tensor fails; ``shared``: a coordinate that no others have."""

    ranks: tuple[int, ...]
    holders: int
    world: int
    shared: tuple[str, int] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """What is known about the cause of a culprit.

    Attributes:
        finding: the simplest repair that passed its test, if one did.
        places: functions to look at, most likely first.
        ranks: where the tensor fails.
        alike: how many failing main gradients are off by this very factor, and how many fail.
        collectives: what the ledger has of the module.
        other: another repair that passed and is nearly as simple.
        observed: a pattern of the error that no repair was tested for.
        argument: the name of what the model is given, if it is that.
    """

    finding: Finding | None = None
    places: tuple[Place, ...] = ()
    ranks: FailingRanks | None = None
    alike: tuple[int, int] | None = None
    collectives: Citation | None = None
    other: Finding | None = None
    observed: Finding | None = None
    argument: str = ""
