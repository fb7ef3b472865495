# SPDX-License-Identifier: Apache-2.0
"""Why does it differ? A hypothesis counts only when the repair it names brings the error down.

The shards of failed tensors were kept; each hypothesis names a repair (sum over tp, divide by cp,
take the other half), which is applied to them, and the measure that failed the tensor is taken
again (evidence.py). The first hypothesis that mends every failing part is the explanation; when
none does, the answer is "unknown". What it suggests beyond what was tested is a hint, kept apart.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_ttrace.compare import initial
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.diagnose import (
    absent,
    attention,
    position,
    products,
    region,
    replicas,
    scaling,
    shares,
    sources,
)
from megatron_ttrace.diagnose.evidence import ELEMENTS, Evidence, Part, parts_of, where
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.places import location
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.codec import CodecError
from megatron_ttrace.trace.findings import FACTORS, Cause, Explanation, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Outcome, TraceKey, Verdict
from megatron_ttrace.trace.store import TraceReader

HYPOTHESES: tuple[Callable[[Evidence], Finding | None], ...] = (
    scaling.zero,
    products.cast,
    scaling.factor,
    replicas.partial,
    products.factor,
    scaling.factor_per_rank,
    sources.addend,
    sources.elsewhere,
    position.transposed,
    position.rows,
    scaling.rounded,
    sources.operand,
    shares.weighted,
    attention.blocks,
    region.token_ids,
    region.some_rows,
    replicas.some_copies,
)
"""Special ones first: that some rows are wrong is also true of rows in a wrong order."""

MOST = 12
"""Culprits that are explained; many culprits have one cause."""

_SECONDS = 2.0
_SEARCH = 400
_SAME_SORT = {
    Kind.INPUT: (Kind.INPUT, Kind.OUTPUT),
    Kind.OUTPUT: (Kind.INPUT, Kind.OUTPUT),
    Kind.GRAD_INPUT: (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT),
    Kind.GRAD_OUTPUT: (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT),
}


class Explainer:
    """Explains failed tensors from the shards that were kept of them."""

    def __init__(
        self,
        reference: TraceReader,
        candidate: Path,
        tolerances: Tolerances,
        *,
        measured: Mapping[int, Sequence[Measured]] | None = None,
    ) -> None:
        """Prepare.

        Args:
            reference: the trusted trace.
            candidate: directory of the shards that were kept; it may be absent.
            tolerances: of the reference.
            measured: what each rank found out, which tells who holds what.
        """
        self._reference = reference
        self._tolerances = tolerances
        self._measured = measured or {}
        self._explained = 0
        self._ends = math.inf
        self._seq_length = 0
        try:
            self._candidate: TraceReader | None = TraceReader(candidate)
            self._seq_length = RunConfig.from_json(self._candidate.meta["config"]).seq_length
        except (TTraceError, OSError, KeyError, CodecError):
            self._candidate = None
        self._where: dict[TraceKey, list[tuple[int, int]]] | None = None

    def explain(self, verdict: Verdict) -> Explanation:
        """What was tested, what that suggests, where to look. Never raises."""
        finding: Finding | None = None
        if self._explained < MOST:
            if not self._explained:
                self._ends = time.monotonic() + _SECONDS
            self._explained += 1
            # An explanation is a service: the verdict stands without it.
            with contextlib.suppress(Exception):
                finding = self._explain(verdict)
        place = location(verdict, finding)
        if finding is None:
            return Explanation(where=place)
        return Explanation(finding.text, finding.hint, place, finding.cause, finding.axes)

    def _explain(self, verdict: Verdict) -> Finding | None:
        if verdict.kind is Kind.INITIAL:
            return Finding(verdict.note, initial.cause(verdict))
        if verdict.verdict is Outcome.MISSING:
            return self._missing(verdict)
        if verdict.verdict not in (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT, Outcome.NONFINITE):
            return None
        evidence = self.evidence(verdict.key)
        if evidence is None:
            return None
        finding = test(evidence)
        if finding is None:
            return None
        failing = [part.rank for part in evidence.parts]
        text = finding.text + self._shared(verdict.key, finding)
        if finding.cause is not Cause.COPY:
            who = where(failing, evidence.meshes, evidence.holders)
            text += f", {who}" if who else ""
        return dataclasses.replace(finding, text=text)

    def evidence(self, key: TraceKey) -> Evidence | None:
        """What is known of a failed tensor; ``None`` when its shards were not kept."""
        if self._candidate is None or key not in self._reference or key.kind is Kind.INITIAL:
            return None
        meshes = self._meshes()
        entry = self._reference.entry(key)
        reference = self._reference.tensor(entry)
        if not reference.is_floating_point():
            return None
        evidence = Evidence(
            key=key,
            reference=reference,
            parts=[],
            tolerance=self._tolerances.of(key),
            meshes=meshes,
            held={
                rank: one.boxes
                for rank, found in self._measured.items()
                for one in found
                if one.key == key and one.boxes
            },
            microbatches=self._microbatches(meshes),
            seq_length=self._seq_length,
            ends=self._ends,
            others=lambda: self._others(key, entry.shape),
            whole=self._whole,
            alike=lambda module: self._alike(key.iteration, module),
        )
        for part in self._parts(key, meshes):
            if not evidence.fits(part, part.pieces):
                evidence.parts.append(part)
        return evidence if evidence.parts else None

    def _parts(self, key: TraceKey, meshes: Sequence[Mesh]) -> Iterator[Part]:
        assert self._candidate is not None
        if self._where is None:
            self._where = {}
            for rank, entries in self._candidate.ranks.items():
                for number, entry in enumerate(entries):
                    self._where.setdefault(entry.key, []).append((rank, number))
        kept = self._where.get(key, [])
        limit = max(1, ELEMENTS // max(1, len(kept) // 8))
        for rank, number in kept:
            entry = self._candidate.resolve(rank, number)
            if entry.partial_over or entry.sums:
                continue
            if entry.boxes or not entry.logical_shape:
                local = self._candidate.tensor(entry)
                yield parts_of(local, meshes[rank], entry.boxes, entry.factor, limit)

    def _meshes(self) -> list[Mesh]:
        assert self._candidate is not None
        return list(codec.decode(tuple[Mesh, ...], self._candidate.meta["meshes"]))

    def _microbatches(self, meshes: Sequence[Mesh]) -> int:
        total = int(self._reference.meta.get("microbatches", 1))
        return max(1, total // meshes[0].size("dp")) if meshes else total

    def _whole(self, key: TraceKey) -> torch.Tensor | None:
        if key not in self._reference:
            return None
        return self._reference.tensor(self._reference.entry(key))

    def _others(
        self, key: TraceKey, shape: tuple[int, ...]
    ) -> Iterator[tuple[str, Cause, TraceKey]]:
        """Tensors that may stand in this one's place: other times first, then other modules."""
        if math.prod(shape) > ELEMENTS:
            return
        near: dict[TraceKey, list[TraceKey]] = {}
        for other in self._reference:
            if (other.kind, other.name, other.index) == (key.kind, key.name, key.index):
                if other.iteration == key.iteration and other.microbatch != key.microbatch:
                    yield (
                        f"holds the value of microbatch {other.microbatch}",
                        Cause.OTHER_TIME,
                        other,
                    )
                elif other.iteration != key.iteration and other.microbatch == key.microbatch:
                    yield (
                        f"holds the value of iteration {other.iteration}",
                        Cause.OTHER_TIME,
                        other,
                    )
            elif (
                other.kind in _SAME_SORT.get(key.kind, (key.kind,))
                and (other.iteration, other.microbatch) == (key.iteration, key.microbatch)
                and self._reference.entry(other).shape == shape
                and self._reference.primary(other) != self._reference.primary(key)
            ):
                near.setdefault(self._reference.primary(other), []).append(other)
        own = _sort_of(key)
        # One tensor has many names: the one that is most like the culprit's says most.
        named = [min(names, key=lambda name: _unlike(name, own)) for names in near.values()]
        for other in sorted(named, key=lambda name: _unlike(name, own))[:_SEARCH]:
            what = f"the reference's {other.kind} of {other.name}"
            yield f"is {what} instead of its own", Cause.OTHER_MODULE, other

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

    def _missing(self, verdict: Verdict) -> Finding | None:
        expected = [key.name for key in self._reference if _is_start(key)]
        held = {
            rank: [one.key.name for one in found if _is_start(one.key)]
            for rank, found in self._measured.items()
        }
        meshes = self._meshes() if self._candidate else []
        return absent.missing_layers(verdict.name, expected, held, meshes)

    def _shared(self, key: TraceKey, finding: Finding) -> str:
        """Whether all failing main gradients are off by this very factor."""
        if key.kind is not Kind.MAIN_GRAD or finding.cause not in FACTORS:
            return ""
        ratios: dict[TraceKey, list[float]] = {}
        for one in (one for found in self._measured.values() for one in found):
            sums = one.sums
            if one.key.kind is not Kind.MAIN_GRAD or one.key.iteration != key.iteration:
                continue
            if sums is None or not fails(sums, self._tolerances, one.key) or not sums.reference:
                continue
            ratios.setdefault(one.key, []).append(sums.dot / sums.reference)
        own = ratios.get(key, [])
        if len(ratios) < 2 or not own:
            return ""
        near = max(1e-2, 2 * self._tolerances.of(key).value)
        alike = [all(abs(ratio / own[0] - 1) < near for ratio in each) for each in ratios.values()]
        if all(alike):
            return f", as are all {len(ratios)} main gradients that fail"
        if sum(alike) > 1:
            return f", as are {sum(alike)} of the {len(ratios)} main gradients that fail"
        return ""


def test(evidence: Evidence) -> Finding | None:
    """The first hypothesis that mends the tensor; one that cannot be tested does not count."""
    found = (_tested(hypothesis, evidence) for hypothesis in HYPOTHESES)
    return next((finding for finding in found if finding is not None), None)


def _tested(hypothesis: Callable[[Evidence], Finding | None], evidence: Evidence) -> Finding | None:
    try:
        return hypothesis(evidence)
    except Exception:  # noqa: BLE001 - the next hypothesis may be testable
        return None


def _sort_of(key: TraceKey) -> tuple[Kind, str, int]:
    """What a tensor has in common with its like in other layers."""
    return key.kind, re.sub(r"\d+", "*", key.name), key.index


def _unlike(key: TraceKey, own: tuple[Kind, str, int]) -> int:
    """How little a tensor has in common with another, by its :func:`_sort_of`."""
    sort = _sort_of(key)
    return 0 if sort == own else 1 if sort[0] is own[0] else 2


def _is_start(key: TraceKey) -> bool:
    return key.kind is Kind.PARAM and key.index == 0 and key.microbatch == STEP_LEVEL
