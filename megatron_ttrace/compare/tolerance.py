# SPDX-License-Identifier: Apache-2.0
"""How far rounding may move a tensor, estimated from how far perturbed replays moved it.

The reference is replayed with every parameter, the embedding's output and the loss perturbed by
about one machine epsilon of the compute dtype (paper: arXiv 2506.09280, section 4). ``moved`` is
``||replay - reference|| / ||reference||``. Then

    tolerance = SAFETY * max(moved over seeds and microbatches * few_samples, floor)

docs/tolerance.md derives the rule, its floors, and when the replays are enough.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron_ttrace.compare.measure import Sums, relative_error
from megatron_ttrace.compare.moved import Moved, moves_of
from megatron_ttrace.compare.quantiles import few_samples
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.records import (
    FLOW,
    MOMENTS,
    ROOT,
    Kind,
    MetricIndex,
    ParamIndex,
    RoutingIndex,
    TraceKey,
)
from megatron_ttrace.trace.store import TraceReader

SAFETY = 4.0
SAFETY_MODULE = 2.5
"""The factor where replays give every module exact inputs. Then no error spreads, and a replay
changes a module (another scale for each FP8 number) as much as a layout can."""
_ONE = 5.0
"""Times the estimate for one element of an activation or gradient."""
BLIND = 0.10
"""Above this a tolerance would hide bugs of interest: the tensor is ``unchecked: blind``."""
BLIND_FP8 = 0.50
"""The same for products in FP8, whose steps are an eighth (E4M3) or a quarter (E5M2) of a value:
smaller errors cannot be seen; a lost, doubled or misplaced part can."""

FEWEST_REPLAYS, MOST_REPLAYS = 2, 4
"""How many replays are made by default."""
CONFIRMED = 0.5
"""The largest margin of a replay, judged by the other replays, with which these are enough."""

NOISE = 0.5
"""An unperturbed replay that moves a tensor by more than this share of what the perturbed ones do
shows that the tolerance is not rounding's."""
_TOGETHER = 0.1
"""From this share on, noise decides how far replays differ. Elements then move together: each
replay is one sample, and so is the unperturbed one."""

_BY_ELEMENT = (*FLOW, Kind.MAIN_GRAD, Kind.ROUTING)
"""Kinds of tensors of which a single element is judged, too."""
_OF_GRADIENT = (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ)

_SUMMED_INTO = {
    (Kind.MAIN_GRAD, ""): Kind.GRAD_NORM,
    (Kind.OUTPUT, ROOT): Kind.LOSS,
    (Kind.PARAM_DELTA, ""): Kind.METRIC,
}
"""Which tensors' elements the scalars of a step are sums of."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """How far rounding may move a tensor.

    Attributes:
        value: tolerated relative error.
        bound: a tolerance above it is blind.
        unit: the machine epsilon of what a module computes, in whose multiples errors are printed;
            0 if that is the job's. Gradients and optimizer state are wider than what they were
            computed from: theirs is the job's.
        repeated: how far the step itself moves the tensor, without perturbation.
        is_noise: whether that, and not rounding, decides ``value``.
        peak: the part of ``value`` that rounding may move one element by.
        row: the same of one row; 0 if only elements were measured.
        element: how far one element may be off, relative to the norm; 0 if that is not judged. A
            wrong token is lost in the error of a tensor of many.
    """

    value: float
    rms: float
    bound: float = BLIND
    unit: float = 0.0
    repeated: float = 0.0
    is_noise: bool = False
    n: int = 0
    peak: float = 0.0
    element: float = 0.0
    row: float = 0.0

    def part(self, n: int) -> float:
        """Tolerated relative error of ``n`` of the tensor's elements.

        The squared error of a part is its share of the whole one's, except for the element or row
        that rounding moves most, which may lie in this part. With bf16 gradients, one rounding of
        the largest element is most of the error of the second moments; of an embedding's gradient,
        a frequent token's row is.
        """
        if not 0 < n < self.n:
            return self.value
        most = max(self.peak, min(self.row, self.peak * math.sqrt(n)))
        return math.hypot(self.value, most * math.sqrt(self.n / n - 1))

    def error_of(self, sums: Sums) -> PartError:
        """What a rank's part has, or its worst element, if only that is too far off."""
        error, limit = relative_error(sums, self.rms), self.part(sums.n)
        part = PartError(margin_of(error, limit), error, limit)
        if self.element and self.rms and part.margin <= 1.0:
            worst = sums.worst / (self.rms * math.sqrt(self.n))
            if worst > self.element:
                return PartError(margin_of(worst, self.element), worst, self.element, True)
        return part

    @property
    def blind(self) -> bool:
        """Whether rounding alone moves this tensor so far that a bug would not show."""
        return self.value > self.bound


class PartError(NamedTuple):
    """The relative error of one rank's part of a tensor; the largest is the worst.

    ``error`` (:func:`relative_error`) and ``tolerance`` are those of the part, or of an element.
    """

    margin: float
    error: float
    tolerance: float
    is_element: bool = False


@functools.cache
def epsilon(dtype: torch.dtype | str) -> float:
    """Machine epsilon of a dtype or its name; 0 for discrete dtypes. FP8 counts as bf16."""
    resolved = getattr(torch, dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not resolved.is_floating_point:
        return 0.0
    if resolved.itemsize == 1:
        resolved = torch.bfloat16
    return float(torch.finfo(resolved).eps)


_Group = tuple[int, Kind, str, int]


def _group(key: TraceKey) -> _Group:
    """What the microbatches of a tensor have in common."""
    return key.iteration, key.kind, key.name, key.index


class Tolerances:
    """Tolerances of all tensors of a reference."""

    def __init__(
        self,
        moved: dict[TraceKey, Moved],
        dtypes: dict[TraceKey, str],
        *,
        safety: float = SAFETY,
        bound: float = BLIND,
        rounding: float = 0.0,
        compute: float = 0.0,
    ) -> None:
        """Prepare.

        Args:
            moved: what the replays did.
            dtypes: of the stored tensors.
            safety: times the estimate.
            bound: above which a tolerance is blind.
            rounding: epsilon with which gradients were rounded before they were accumulated in a
                wider dtype, where replays do not show it: they give every module exact inputs, but
                never divide the tokens that a gradient is summed over differently.
            compute: epsilon with which the step was computed.
        """
        self._safety = safety
        self._bound = bound
        self._rounding = rounding
        self._compute = compute
        self._moved = moved
        self._dtypes = dtypes
        self._known: dict[TraceKey, Tolerance] = {}
        self._pooled: dict[_Group, list[float]] = {}
        self._samples: Counter[_Group] = Counter()
        self._repeated: dict[_Group, float] = {}
        self._noise: dict[_Group, float] = {}
        self._peaks: dict[_Group, float] = {}
        self._rows: dict[_Group, float] = {}
        self._terms: Counter[tuple[int, Kind]] = Counter()
        self._iterations = {key.iteration for key in moved}
        for key, value in moved.items():
            total = _SUMMED_INTO.get((key.kind, key.name)) or _SUMMED_INTO.get((key.kind, ""))
            if total is not None:
                self._terms[key.iteration, total] += value.n
            group = _group(key)
            # A replay that became NaN is a tensor that cannot be judged.
            moves = (math.inf if math.isnan(move) else move for move in value.moved)
            pooled = itertools.zip_longest(self._pooled.get(group, ()), moves, fillvalue=0.0)
            self._pooled[group] = [max(pair) for pair in pooled]
            self._samples[group] += value.n * len(value.moved)
            self._peaks[group] = max(value.peak, self._peaks.get(group, 0.0))
            self._rows[group] = max(value.row, self._rows.get(group, 0.0))
            if value.repeated:
                repeated = math.inf if math.isnan(value.repeated) else value.repeated
                self._repeated[group] = max(repeated, self._repeated.get(group, 0.0))
        for key in moved:
            repeated = self._repeated.get(group := _group(key), 0.0)
            # Another order of sums on a GPU moves a tensor by less than an epsilon.
            if repeated > max(epsilon(dtypes[key]), compute):
                farthest = max(self._pooled[group], default=0.0)
                self._noise[group] = repeated / farthest if farthest else math.inf
                if self._noise[group] > _TOGETHER:
                    self._samples[group] = 1 + len(self._pooled[group])

    def of(self, key: TraceKey) -> Tolerance:
        """The tolerance of one tensor. Raises ``KeyError`` for a key the reference lacks."""
        if key not in self._known:
            self._known[key] = self._of(key)
        return self._known[key]

    def _of(self, key: TraceKey) -> Tolerance:
        if key.kind is Kind.ROUTING and key.index in (RoutingIndex.CHOICE, RoutingIndex.KEPT):
            # What a choice costs is bounded by its scores' error (compare/routing.py).
            return self.of(dataclasses.replace(key, index=RoutingIndex.SCORES))
        moved = self._moved.get(key)
        n, norm = (moved.n, moved.norm) if moved else (0, 0.0)
        rms = norm / math.sqrt(n) if n else 0.0
        eps = epsilon(self._dtypes[key])
        if eps == 0.0 or (is_exact(key) and self._is_given(key)):
            return Tolerance(0.0, rms)
        seeds = self._pooled.get(group := _group(key), ())
        floor = SAFETY * self._floor(key, norm, eps)
        repeated = self._repeated.get(group, 0.0)
        estimated = self._estimated(group, seeds, len(seeds))
        farther = self._farther(key, estimated)
        peak, row = (
            farther * self._estimated(group, (farthest.get(group, 0.0),), len(seeds))
            for farthest in (self._peaks, self._rows)
        )
        has_elements = key.kind in _BY_ELEMENT and n and not repeated
        value = max(farther * estimated, floor)
        # Where replays round few elements, they need not have rounded the largest.
        top = floor * moved.top if moved and floor > farther * estimated else 0.0
        return Tolerance(
            value=value,
            peak=peak,
            row=row,
            # Nor less than what each has on average.
            element=max(_ONE * max(peak, value / math.sqrt(n)), top) if has_elements else 0.0,
            n=n,
            rms=rms,
            bound=self._bound,
            unit=eps if key.kind in FLOW else 0.0,  # a module's dtype may differ from the job's
            repeated=repeated,
            is_noise=self._noise.get(group, 0.0) > NOISE,
        )

    @property
    def repeated(self) -> list[TraceKey]:
        """The tensors that an unperturbed replay moved, in execution order."""
        return [key for key, value in self._moved.items() if value.repeated]

    def is_repeated(self, weight: TraceKey) -> bool:
        """Whether an unperturbed replay gave a weight's gradient and update the same bits.

        The first step of Adam is nearly the same for any gradient.
        """
        kinds = (Kind.MAIN_GRAD, Kind.PARAM_DELTA)
        return not any(
            self._repeated.get((weight.iteration, kind, weight.name, 0)) for kind in kinds
        )

    def _estimated(self, group: _Group, seeds: Sequence[float], replays: int) -> float:
        """From what some replays did, as if there had been this number of replays."""
        samples = self._samples[group] * replays // max(len(self._pooled.get(group, ())), 1)
        return self._safety * max(seeds, default=0.0) * few_samples(samples)

    def _farther(self, key: TraceKey, estimated: float) -> float:
        """How much farther than replays rounding may move what is computed from a gradient.

        The replays' sums of a gradient in 16 bits may round to the same numbers, while one rounding
        of each element is tolerated. What is computed from it moves in proportion, but, as a square
        at most, not by more than twice that rounding: a replay also moves it by clipping.
        """
        if key.kind not in _OF_GRADIENT:
            return 1.0
        gradient = dataclasses.replace(key, kind=Kind.MAIN_GRAD, index=0)
        moved = self._moved.get(gradient)
        seeds = self._pooled.get(_group(gradient), ())
        of_gradient = self._estimated(_group(gradient), seeds, len(seeds))
        if moved is None or not (of_gradient > 0.0 < estimated):
            return 1.0
        floor = SAFETY * self._floor(gradient, moved.norm, epsilon(self._dtypes[gradient]))
        return max(1.0, min(floor / of_gradient, 2 * floor / estimated))

    def suffice(self) -> bool:
        """Whether no more replays are needed (docs/tolerance.md, "How many replays")."""
        return all(self._suffice(key) for key in self._moved)

    def _suffice(self, key: TraceKey) -> bool:
        seeds = self._pooled[group := _group(key)]
        eps = epsilon(self._dtypes[key])
        if eps == 0.0 or len(seeds) < FEWEST_REPLAYS:
            return eps == 0.0
        floor = SAFETY * self._floor(key, self._moved[key].norm, eps)
        for number, distance in enumerate(seeds):
            others = seeds[:number] + seeds[number + 1 :]
            allowed = max(self._estimated(group, others, len(others)), floor)
            if allowed <= self._bound and distance > CONFIRMED * allowed:
                return False
        now = max(self._estimated(group, seeds, len(seeds)), floor)
        then = max(self._estimated(group, seeds, len(seeds) + 1), floor)
        return now <= 2.0 * then and not now > self._bound >= then

    def _is_given(self, key: TraceKey) -> bool:
        """Whether nothing was computed yet: later steps start from updated parameters."""
        return not key.is_before or key.iteration - 1 not in self._iterations

    def _floor(self, key: TraceKey, norm: float, eps: float) -> float:
        """One rounding of every element, relative to the tensor's norm.

        Replays add up the terms of the loss and of the gradient norm in one order and make the
        same error again, so the bound for pairwise summation counts, eps/2 * log2(n) (Higham,
        Accuracy and Stability of Numerical Algorithms, section 4.2).
        """
        terms = self._terms[key.iteration, key.kind]
        if key.kind is Kind.METRIC and key.index == MetricIndex.ELEMENTS:
            # A sum of rounded numbers is zero by accident with a probability of about epsilon,
            # and in another order others are.
            return (1 + max(eps, self._compute) / 2 * terms) / norm if norm else math.inf
        if key.kind is Kind.METRIC and key.index == MetricIndex.CHOSEN:
            return math.inf  # rounding alone decides between equals
        if key.kind is Kind.METRIC and key.index == MetricIndex.LOSS:
            # The router's z loss is rounded to the dtype of the logits after the mean over a rank's
            # tokens. A replay has the same tokens in its mean, and often rounds to the same number.
            return max(eps, self._compute) / 2
        if terms > 1:
            return eps / 2 * math.log2(terms)
        if key.kind is Kind.MAIN_GRAD:
            eps = max(eps, self._rounding)
        size = norm
        if key.kind is Kind.PARAM_DELTA:
            before = self._moved.get(
                dataclasses.replace(key, kind=Kind.PARAM, index=ParamIndex.BEFORE)
            )
            size = max(size, before.norm if before else 0.0)
        return eps / 2 * (size / norm if norm else 1.0)


def margin_of(error: float, tolerance: float) -> float:
    """Error ÷ tolerance: above 1 it fails."""
    if tolerance == math.inf:
        return 0.0  # also of an infinite error: another number than 0
    return error / tolerance if tolerance else (math.inf if error else 0.0)


def is_exact(key: TraceKey) -> bool:
    """Whether the tensor is given, not computed: equal to the last bit or wrong."""
    return key.kind in (Kind.TOKENS, Kind.LOADED) or key.is_before


def is_updated(key: TraceKey) -> bool:
    """Whether copies of the tensor are gathered, or computed from the same numbers."""
    return key.kind in MOMENTS or is_stepped(key)


def is_stepped(key: TraceKey) -> bool:
    """Whether the tensor is an update, or a weight after it."""
    return key.kind is Kind.PARAM_DELTA or (key.kind is Kind.PARAM and not key.is_before)


def of_reference(reference: TraceReader) -> Tolerances:
    """The tolerances of a reference trace. Raises as :func:`read` does."""
    return Tolerances(moves_of(reference), dtypes_of(reference), **parameters(reference.reference))


def dtypes_of(reference: TraceReader) -> dict[TraceKey, str]:
    """Of all tensors of a reference."""
    entries = itertools.chain.from_iterable(reference.ranks.values())
    return {entry.key: entry.dtype for entry in entries}


def parameters(meta: ReferenceMeta) -> dict[str, float]:
    """The parameters of :class:`Tolerances` for a reference with this meta data."""
    compute = meta.epsilon
    if not (meta.fp8 or meta.by_module):
        return {"compute": compute}
    return {
        "safety": SAFETY_MODULE if meta.by_module else SAFETY,
        "bound": BLIND_FP8 if meta.fp8 else BLIND,
        "rounding": compute,
        "compute": compute,
    }
