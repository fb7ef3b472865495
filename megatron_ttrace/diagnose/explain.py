# SPDX-License-Identifier: Apache-2.0
"""Why does it differ? A cause is told only when the repair that it names makes every part right.

The shards of failed tensors were kept. Compositions of repairs are applied to them, and the measure
that failed the tensor is taken again (search.py, evidence.py). The simplest one is the explanation.
A pattern of the error that no repair was tested for (which rows, which copies) is a hint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import torch

from megatron_ttrace.compare import initial
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.measured import Measured, Problem, fails
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.diagnose import absent, losses, ran, region, replicas, start
from megatron_ttrace.diagnose.evidence import (
    ELEMENTS,
    Evidence,
    ExhaustedError,
    FailedPart,
    Work,
    axes_of,
)
from megatron_ttrace.diagnose.losses import Separate, Share
from megatron_ttrace.diagnose.search import Found, alternative, repeated, search
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.numbers import numbers
from megatron_ttrace.mcore.roles import any_layer
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.collectives import UNRECORDED, Ledger
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import (
    FACTORS,
    BeforeStep,
    Cause,
    Explanation,
    FailingRanks,
    Finding,
    LossShare,
    Miscounted,
    OtherIteration,
    OtherMicrobatch,
    OtherTensor,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, Outcome, TraceKey
from megatron_ttrace.trace.store import TraceReader

STRICT = "TTRACE_STRICT"
"""Environment variable: when set, as in tests, an error in the test of a repair is raised."""

WORK = 2e9
"""What all searches of a run may compute together, in elements."""

UNKNOWN_LAYERS = 2
"""Layers in which nothing was found for a tensor, after which no more are searched."""

_SEARCH = 400
_WHOLE = 1 << 22
"""Elements of the largest tensor that other tensors are read to be compared with."""
_SAME_SORT = {
    Kind.INPUT: (Kind.INPUT, Kind.OUTPUT),
    Kind.OUTPUT: (Kind.INPUT, Kind.OUTPUT),
    Kind.GRAD_INPUT: (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT),
    Kind.GRAD_OUTPUT: (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT),
}
_log = logging.getLogger(__name__)


class Explainer:
    """Explains failed tensors from the shards that were kept of them."""

    def __init__(
        self,
        reference: TraceReader,
        candidate: Path,
        tolerances: Tolerances,
        *,
        measured: Mapping[int, Sequence[Measured]] | None = None,
        ledger: Ledger = UNRECORDED,
        counted: Mapping[TraceKey, Finding] = MappingProxyType({}),
    ) -> None:
        """Prepare.

        Args:
            reference: the trusted trace.
            candidate: directory of the shards that were kept; it may be absent.
            tolerances: of the reference.
            measured: what each rank measured; it shows which ranks hold which tensors.
            ledger: the collectives of the traced steps, and the code that ran in them.
            counted: what was found out about elements that are counted, and about updates.
        """
        self._reference = reference
        self._tolerances = tolerances
        self._measured = measured or {}
        self._ledger = ledger
        self._counted = counted
        self._work = Work(WORK)
        self._found: dict[tuple[Kind, str, int], Found] = {}
        self._unknown: Counter[tuple[Kind, str, int]] = Counter()
        self._told: dict[TraceKey, Explanation] = {}
        self._shares: Mapping[TraceKey, Sequence[Share]] = {}
        self.unexplained: list[TraceKey] = []
        """Gradients for which nothing was found."""
        self._candidate: TraceReader | None = None
        self._meshes: list[Mesh] = []
        self._seq_length = 0
        # Explanations are optional: the verdict does not depend on them.
        with contextlib.suppress(Exception):
            found = TraceReader(candidate)
            self._meshes = [*codec.decode(tuple[Mesh, ...], found.meta["meshes"])]
            self._seq_length = RunConfig.from_json(found.meta["config"]).seq_length
            self._candidate = found

    @functools.cached_property
    def _kept(self) -> dict[TraceKey, list[tuple[int, int]]]:
        """Rank and number of the shards that were kept of each tensor."""
        kept: dict[TraceKey, list[tuple[int, int]]] = {}
        for rank, entries in (self._candidate.ranks if self._candidate else {}).items():
            for number, entry in enumerate(entries):
                kept.setdefault(entry.key, []).append((rank, number))
        return kept

    def explain(self, verdict: Judged) -> Explanation:
        """What was found out about the cause of a failure. Raises only where ``STRICT`` is set."""
        if verdict.key in self._told and verdict.key not in self._shares:
            return self._told[verdict.key]
        found = Explanation(self._counted.get(verdict.key))
        if found.finding is not None:
            world = len(self._meshes)
            found = dataclasses.replace(found, ranks=FailingRanks(verdict.ranks, world, world))
        try:
            if found.finding is None:
                found = self._explain(verdict)
        except ExhaustedError:
            pass
        except Exception as error:  # noqa: BLE001 - explanations are optional
            self._failed(f"explanation of {verdict.key}", error)
        try:
            found = dataclasses.replace(
                found,
                where=ran.where(verdict, found.finding, self._ledger, alone=found.alike is None),
                collectives=ran.cite(verdict, found.finding, self._ledger),
                argument=self._argument(verdict),
            )
        except Exception as error:  # noqa: BLE001 - so is what ran
            self._failed(f"what ran in {verdict.key}", error)
        self._told[verdict.key] = found
        return found

    def _argument(self, verdict: Judged) -> str:
        """The name of an input of the model."""
        names = self._ledger.sources.inputs
        is_input = verdict.kind is Kind.INPUT and verdict.name == ROOT
        return names[verdict.index] if is_input and verdict.index < len(names) else ""

    def separate(self, shares: Separate) -> None:
        """Find the losses' shares of the unexplained gradients; these can be explained again.

        Args:
            shares: finds them, by replays of the reference.
        """
        try:
            self._shares = shares(self.unexplained)
        except Exception as error:  # noqa: BLE001 - explanations are optional
            self._failed("the losses' shares of gradients", error)

    def _explain(self, verdict: Judged) -> Explanation:
        if verdict.kind is Kind.INITIAL:
            cause = initial.cause(verdict)
            return Explanation(Finding(cause) if cause else None)
        if verdict.verdict in (Outcome.MISSING, Outcome.EXTRA):
            return Explanation(self._misplaced(verdict))
        if verdict.verdict is Outcome.SHAPE and start.is_start(verdict.key):
            return Explanation(self._divided(verdict.key))
        if verdict.verdict not in (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT, Outcome.NONFINITE):
            return Explanation()
        try:
            evidence = self.evidence(verdict.key)
        except (TTraceError, CodecError) as error:  # the files may be damaged
            _log.warning("cannot read what was kept of %s: %s", verdict.key, error)
            return Explanation()
        if evidence is None:
            return Explanation()
        # Of a rank whose part was not kept, or of which the first elements pass, nothing is known.
        failing = {part.rank for part in evidence.parts}
        finding = other = None
        if failing.issuperset(verdict.ranks):
            finding, other = self._repair(verdict.key, evidence)
        if finding is None:
            if verdict.kind in losses.KINDS:
                self.unexplained.append(verdict.key)
            seen = region.extent(evidence) or replicas.some_copies(evidence)
            return Explanation(observed=seen)
        ranks, alike = evidence.failing_ranks(), self._alike_in(verdict.key, finding)
        return Explanation(
            self._not_stepped(verdict.key, finding) or finding,
            ranks=ranks,
            alike=alike,
            other=other,
        )

    def _not_stepped(self, key: TraceKey, finding: Finding) -> Finding | None:
        """Why a parameter did not change, if no optimizer steps any of it: the earlier fault."""
        if key.kind is not Kind.PARAM_DELTA or finding.cause is not Cause.ZERO:
            return None
        number = Statistic.STEPPED.number
        found = self._counted.get(dataclasses.replace(key, kind=Kind.COUNTED, index=number))
        return found if isinstance(found, Miscounted) and not found.most else None

    def _repair(self, key: TraceKey, evidence: Evidence) -> tuple[Finding | None, Finding | None]:
        """The simplest repair, and another one; first that of the same tensor of another layer."""
        if shares := self._shares.get(key):
            return losses.miscounted(dataclasses.replace(evidence, work=Work(WORK)), shares), None
        sort = _sort_of(key)
        if sort in self._found:
            with contextlib.suppress(ExhaustedError):
                if (again := repeated(evidence, self._found[sort])) is not None:
                    return again, None
        if self._unknown[sort] >= UNKNOWN_LAYERS:
            return None, None
        found = search(evidence, self._failed)
        if not found:
            self._unknown[sort] += 1
            return None, None
        self._found.setdefault(sort, found[0])
        return found[0].finding, alternative(found)

    def _failed(self, what: str, error: Exception) -> None:
        if os.environ.get(STRICT):
            raise error
        _log.warning("%s could not be tested: %s: %s", what, type(error).__name__, error)

    def evidence(self, key: TraceKey) -> Evidence | None:
        """What is known of a failed tensor; ``None`` if its shards were not kept."""
        if self._candidate is None or key not in self._reference or key.kind is Kind.INITIAL:
            return None
        entry = self._reference.entry(key)
        reference = self._reference.tensor(entry)
        if not reference.is_floating_point() and key.kind not in (Kind.TOKENS, Kind.INPUT):
            return None  # choices
        microbatches = codec.decode(int, self._reference.meta.get("microbatches", 1))
        ranks = self._meshes[0].size("dp") if self._meshes else 1
        evidence = Evidence(
            key=key,
            reference=reference,
            parts=list(self._parts(self._candidate, key)),
            tolerance=self._tolerances.of(key),
            meshes=self._meshes,
            held={
                rank: one.boxes
                for rank, found in self._measured.items()
                for one in found
                if one.key == key and one.boxes
            },
            microbatches=max(1, microbatches // ranks),
            seq_length=self._seq_length,
            numbers=numbers(self._reference.meta),
            work=self._work,
            others=lambda: self._others(key, entry.shape),
            whole=self._whole,
            alike=lambda module: self._alike(key.iteration, module),
        )
        return evidence if evidence.parts else None

    def _parts(self, candidate: TraceReader, key: TraceKey) -> Iterator[FailedPart]:
        kept = self._kept.get(key, [])
        limit = max(1, ELEMENTS // max(1, len(kept)))
        for rank, number in kept:
            entry = candidate.resolve(rank, number)
            if not (entry.partial_over or entry.sums) and (entry.boxes or not entry.logical_shape):
                local = candidate.tensor(entry)
                yield FailedPart.of(local, self._meshes[rank], entry.boxes, entry.factor, limit)

    def _whole(self, key: TraceKey) -> torch.Tensor | None:
        if key not in self._reference:
            return None
        return self._reference.data(key)

    def _others(self, key: TraceKey, shape: tuple[int, ...]) -> Iterator[tuple[Finding, TraceKey]]:
        """Tensors that may be in this one's place: other times first, then other modules."""
        if math.prod(shape) > _WHOLE:
            return
        before = dataclasses.replace(key, index=0)
        if key.kind is Kind.PARAM and key != before:
            yield BeforeStep(Cause.OTHER_TIME), before
        near: dict[TraceKey, list[TraceKey]] = {}
        for other in self._reference:
            now, here = other.iteration == key.iteration, other.microbatch == key.microbatch
            if (other.kind, other.name, other.index) == (key.kind, key.name, key.index):
                if now and not here:
                    microbatch = other.microbatch
                    yield OtherMicrobatch(Cause.OTHER_TIME, microbatch=microbatch), other
                elif here and not now:
                    yield OtherIteration(Cause.OTHER_TIME, iteration=other.iteration), other
            elif (
                (now and here)
                and other.kind in _SAME_SORT.get(key.kind, (key.kind,))
                and self._reference.entry(other).shape == shape
                and self._reference.primary(other) != self._reference.primary(key)
            ):
                near.setdefault(self._reference.primary(other), []).append(other)

        def unlike(other: TraceKey) -> int:
            return 0 if _sort_of(other) == _sort_of(key) else 1 if other.kind is key.kind else 2

        # One tensor has many names: the one most like the culprit's is the most informative.
        named = [min(names, key=unlike) for names in near.values()]
        for other in sorted(named, key=unlike)[:_SEARCH]:
            yield OtherTensor(Cause.OTHER_MODULE, kind=other.kind.value, name=other.name), other

    def _alike(self, iteration: int, module: str) -> Iterator[str]:
        """Other linear layers that are given a tensor of this shape, in execution order."""
        own = TraceKey(iteration, 0, Kind.INPUT, module, 0)
        if own not in self._reference:
            return
        shape = self._reference.entry(own).shape
        for other in self._reference:
            like = dataclasses.replace(own, name=other.name)
            weight = TraceKey(iteration, STEP_LEVEL, Kind.PARAM, f"{other.name}.weight", 0)
            if (
                other == like != own
                and weight in self._reference
                and self._reference.entry(other).shape == shape
            ):
                yield other.name

    def started(self, verdicts: Sequence[Judged]) -> list[Judged]:
        """The verdicts, with those of a start that failed apart from its consequences."""
        return start.without_consequences(start.claims(verdicts, self._measured, self._meshes))

    def _misplaced(self, verdict: Judged) -> Finding | None:
        expected = [key.name for key in self._reference if start.is_start(key)]
        held = {
            rank: [one.key.name for one in found if start.is_start(one.key)]
            for rank, found in self._measured.items()
        }
        return absent.misplaced_layers(verdict.name, expected, held, self._meshes)

    def _divided(self, key: TraceKey) -> Finding | None:
        taken = [
            one.logical_shape
            for found in self._measured.values()
            for one in found
            if one.key == key and one.problem is Problem.SHAPE
        ]
        axes = [axis for axis in axes_of(key.name) if axis in start.DIVIDING]
        return start.other_division(self._reference.entry(key).shape, taken, self._meshes, axes)

    def _alike_in(self, key: TraceKey, finding: Finding) -> tuple[int, int] | None:
        """How many of the failing main gradients are off by this very factor, if others are."""
        if (
            key.kind is not Kind.MAIN_GRAD
            or finding.cause not in FACTORS
            or isinstance(finding, LossShare)
        ):
            return None
        ratios: dict[TraceKey, list[float]] = {}
        for one in (one for found in self._measured.values() for one in found):
            sums = one.sums
            if one.key.kind is not Kind.MAIN_GRAD or one.key.iteration != key.iteration:
                continue
            if sums is None or not fails(sums, self._tolerances, one.key) or not sums.reference:
                continue
            ratios.setdefault(one.key, []).append(sums.dot / sums.reference)
        own = ratios.get(key, [])
        if not own:
            return None
        near = max(1e-2, 2 * self._tolerances.of(key).value)
        alike = sum(
            all(abs(ratio / own[0] - 1) < near for ratio in each) for each in ratios.values()
        )
        return (alike, len(ratios)) if alike > 1 else None


def _sort_of(key: TraceKey) -> tuple[Kind, str, int]:
    """What a tensor has in common with the same tensor of other layers."""
    return key.kind, any_layer(key.name), key.index
