# SPDX-License-Identifier: Apache-2.0
"""Why does it differ? A cause is reported only when the repair it names makes every part right.

The shards of failed tensors were kept (gather.py). Compositions of repairs are applied to them, and
the measure that failed the tensor is taken again (search.py, evidence.py). The simplest one is the
explanation. A pattern of the error that no repair was tested for (which rows, which copies) is a
hint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence

from megatron_ttrace.compare import initial
from megatron_ttrace.compare.measured import Problem
from megatron_ttrace.diagnose import losses, ran, region, replicas, start
from megatron_ttrace.diagnose.evidence import Evidence, ExhaustedError, Work, axes_of
from megatron_ttrace.diagnose.gather import Traces, sort_of
from megatron_ttrace.diagnose.scaling import FACTORS
from megatron_ttrace.diagnose.search import Composition, alternative, repeated, search
from megatron_ttrace.trace.captured import Separate, Share
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.collectives import Ledger, Numbers, pattern
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.findings import (
    Cause,
    ConstantFactor,
    Explanation,
    FailingRanks,
    Finding,
    LossShare,
    Miscounted,
    Note,
    OtherSetting,
    Remark,
    Rounded,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import ROOT, Kind, LoadedIndex, Outcome, TraceKey

STRICT = "TTRACE_STRICT"
"""Environment variable: when set, as in tests, an error in the test of a repair is raised."""

WORK = 2e9
"""What all searches of a run may compute together, in elements."""

UNKNOWN_LAYERS = 2
"""Layers in which nothing was found for a tensor, after which no more are searched."""

_LATER = {Remark.RECOMPUTED: Cause.RECOMPUTED, Remark.NOT_GATHERED: Cause.NOT_GATHERED}
"""What was right at first, and wrong when it was used again."""

_log = logging.getLogger(__name__)


class Explainer:
    """Explains failed tensors, each once; what explains a tensor is tried first in other layers."""

    def __init__(
        self,
        traces: Traces,
        ledger: Ledger,
        counted: Mapping[TraceKey, Finding],
        trained: Container[str] = (),
    ) -> None:
        """Prepare.

        ``counted``: what was found out about elements that are counted, and about updates;
        ``trained``: names of parameters that require a gradient on some rank.
        """
        self._trained = trained
        self._traces = traces
        self._ledger = ledger
        self._counted = counted
        self._work = Work(WORK)
        self._repairs: dict[tuple[Kind, str, int], Composition] = {}
        self._unknown: Counter[tuple[Kind, str, int]] = Counter()
        self._explanations: dict[TraceKey, Explanation] = {}
        self._shares: Mapping[TraceKey, Sequence[Share]] = {}
        self.unexplained: list[TraceKey] = []
        """Gradients for which nothing was found."""

    def explain(self, verdict: Judged) -> Explanation:
        """What was found out about the cause of a failure. Raises only where ``STRICT`` is set."""
        if verdict.key in self._explanations and verdict.key not in self._shares:
            return self._explanations[verdict.key]
        why = Explanation()
        with self._optional(f"explanation of {verdict.key}"):
            why = self._explain(verdict)
        with self._optional(f"what ran in {verdict.key}"):
            collectives = ran.cite(verdict, why.finding, self._ledger)
            argument = self._argument(verdict)
            why = dataclasses.replace(why, collectives=collectives, argument=argument)
        self._explanations[verdict.key] = why
        return why

    def evidence(self, key: TraceKey) -> Evidence | None:
        """What is known of a failed tensor; ``None`` if its shards were not kept."""
        return self._traces.evidence(key, self._work)

    def separate(self, shares: Separate) -> None:
        """Find the losses' shares of the unexplained gradients, so that these can be explained."""
        with self._optional("the losses' shares of gradients"):
            self._shares = shares(self.unexplained)

    def _explain(self, verdict: Judged) -> Explanation:
        key = verdict.key
        if key in self._counted:
            world = len(self._traces.meshes)
            return Explanation(self._counted[key], ranks=FailingRanks(verdict.ranks, world, world))
        if verdict.kind is Kind.INITIAL:
            cause = initial.cause(verdict)
            return Explanation(Finding(cause) if cause else None)
        if verdict.verdict is Outcome.MISSING and verdict.kind is Kind.GRAD_INPUT:
            return Explanation(observed=Finding(Cause.CUT_OFF))
        # What requires a gradient and is in no optimizer has an update: it never changes.
        update = dataclasses.replace(key, kind=Kind.PARAM_DELTA, index=0)
        if verdict.verdict is Outcome.MISSING and verdict.kind is Kind.MAIN_GRAD:
            is_frozen = update in self._traces.reference and not any(self._traces.of(update))
            is_frozen = is_frozen and key.name not in self._trained
            return Explanation(Finding(Cause.FROZEN) if is_frozen else None)
        if verdict.verdict in (Outcome.MISSING, Outcome.EXTRA):
            expected = [other.name for other in self._traces.reference if start.is_start(other)]
            # An optimizer that loads state for it trains it.
            is_state = verdict.kind is Kind.LOADED and key.index not in start.WEIGHTS
            is_known = (is_state or verdict.kind is Kind.MAIN_GRAD) and key.name in expected
            if is_known and update not in self._traces.reference:
                return Explanation(Finding(Cause.THAWED))
            stages = start.stages_of(self._traces.started, self._traces.meshes)
            chunks = self._traces.meshes[0].vpp if self._traces.meshes else 1
            return Explanation(start.misplaced_layers(verdict.name, expected, stages, chunks))
        if dtype := next((note.text for note in verdict.notes if note.what is Remark.DTYPE), ""):
            return Explanation(Rounded(Cause.PRECISION, dtype=dtype, own=True))
        if key.kind is Kind.PRECISION:
            return Explanation(Finding(Cause.PRECISION))
        for remark, cause in _LATER.items():
            if Note(remark) in verdict.notes:
                return Explanation(Finding(cause))
        if verdict.verdict is Outcome.SHAPE and start.is_start(key):
            return Explanation(self._divided(key))
        if verdict.verdict not in (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT, Outcome.NONFINITE):
            return Explanation()
        try:
            evidence = self.evidence(key)
        except (TTraceError, CodecError) as error:  # the files may be damaged
            _log.warning("cannot read what was kept of %s: %s", key, error)
            return Explanation()
        if evidence is not None and key.kind is Kind.DROPOUT:
            return Explanation(ConstantFactor(Cause.RANDOM_STATE, ratio=evidence.factor()))
        if evidence is not None and (key.kind, key.index) == (Kind.LOADED, LoadedIndex.NUMBER):
            return Explanation(start.other_number(evidence))
        return Explanation() if evidence is None else self._repaired(verdict, evidence)

    def _repaired(self, verdict: Judged, evidence: Evidence) -> Explanation:
        key = verdict.key
        finding = other = None
        # Of a rank whose part was not kept, or of which the first elements pass, nothing is known.
        is_known = {part.rank for part in evidence.parts}.issuperset(verdict.ranks)
        if is_known:
            finding, other = self._repair(key, evidence)
        if finding is None:
            if verdict.kind in losses.KINDS:
                self.unexplained.append(key)
            numbers = self._ledger.numbers, self._traces.reference.reference.numbers
            setting = differing_setting(module_of(verdict.name), *numbers)
            pattern = is_known and (region.extent(evidence) or replicas.some_copies(evidence))
            return Explanation(observed=setting or pattern or None)
        ranks, alike = evidence.failing_ranks(), self._alike_in(key, finding)
        if key.kind is Kind.PARAM_DELTA and finding.cause is Cause.ZERO:
            # Why it did not change, if no optimizer steps any of it: the earlier fault.
            stepped = dataclasses.replace(key, kind=Kind.COUNTED, index=Statistic.STEPPED.number)
            miscounted = self._counted.get(stepped)
            if isinstance(miscounted, Miscounted) and not miscounted.most:
                finding = miscounted
        return Explanation(finding, ranks=ranks, alike=alike, other=other)

    def _repair(self, key: TraceKey, evidence: Evidence) -> tuple[Finding | None, Finding | None]:
        """The simplest repair, and another one; first that of the same tensor of another layer."""
        if shares := self._shares.get(key):
            return losses.miscounted(dataclasses.replace(evidence, work=Work(WORK)), shares), None
        sort = sort_of(key)
        if sort in self._repairs:
            with contextlib.suppress(ExhaustedError):
                if (finding := repeated(evidence, self._repairs[sort])) is not None:
                    return finding, None
        if self._unknown[sort] >= UNKNOWN_LAYERS:
            return None, None
        repairs = search(evidence, self._failed)
        if not repairs:
            self._unknown[sort] += 1
            return None, None
        self._repairs.setdefault(sort, repairs[0])
        return repairs[0].finding, alternative(repairs)

    @contextlib.contextmanager
    def _optional(self, test: str) -> Iterator[None]:
        """A report can do without what is found out in it."""
        try:
            yield
        except ExhaustedError:
            pass
        except Exception as error:  # noqa: BLE001
            self._failed(test, error)

    def _failed(self, test: str, error: Exception) -> None:
        if os.environ.get(STRICT):
            raise error
        _log.warning("%s could not be tested: %s: %s", test, type(error).__name__, error)

    def _argument(self, verdict: Judged) -> str:
        """The name of an input of the model."""
        names = self._ledger.sources.inputs
        is_input = verdict.kind is Kind.INPUT and verdict.name == ROOT
        return names[verdict.index] if is_input and verdict.index < len(names) else ""

    def _divided(self, key: TraceKey) -> Finding | None:
        traces = self._traces
        measured = [m for _, m in traces.of(key) if m.problem is Problem.SHAPE]
        taken = [m.logical_shape for m in measured]
        axes = [axis for axis in axes_of(key.name) if axis in start.DIVIDING]
        return start.other_division(traces.reference.entry(key).shape, taken, traces.meshes, axes)

    def _alike_in(self, key: TraceKey, finding: Finding) -> tuple[int, int] | None:
        """How many of the failing main gradients are off by this very factor, if others are."""
        is_factor = finding.cause in FACTORS and not isinstance(finding, LossShare)
        if key.kind is not Kind.MAIN_GRAD or not is_factor:
            return None
        ratios = self._traces.ratios(key.iteration)
        if key not in ratios:
            return None
        near, ratio = max(1e-2, 2 * self._traces.tolerances.of(key).value), ratios[key][0]
        alike = sum(all(abs(r / ratio - 1) < near for r in ranks) for ranks in ratios.values())
        return (alike, len(ratios)) if alike > 1 else None


def differing_setting(module: str, ours: Numbers, expected: Numbers) -> OtherSetting | None:
    """A number of a module, or of one in it, that only some layers have as the reference does.

    A layout may build modules differently. Then it does so in every layer.
    """
    for name in (name for name in expected if f"{name}.".startswith(f"{module}.")):
        others = [other for other in expected if other != name and pattern(other) == pattern(name)]
        for attribute, right in expected[name].items():
            values = _of_ranks(name, attribute, ours)
            if values and values.isdisjoint(right):
                alike = (_of_ranks(other, attribute, ours) for other in others)
                equal = (expected[other].get(attribute, ()) for other in others)
                if any(not a.isdisjoint(b) for a, b in zip(alike, equal, strict=True)):
                    return OtherSetting(
                        cause=Cause.SETTING,
                        module=name,
                        attribute=attribute,
                        value=min(values),
                        expected=min(right),
                    )
    return None


def _of_ranks(name: str, attribute: str, numbers: Numbers) -> set[float]:
    """What ranks have; a number that all layers of a rank have is noted once."""
    places = (numbers.get(at, {}) for at in (name, pattern(name)))
    return {value for named in places for value in named.get(attribute, ())}
