# SPDX-License-Identifier: Apache-2.0
"""Evidence of failed tensors, from two traces: the reference's, and the shards that were kept."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.measured import Measured, fails
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.diagnose.evidence import ELEMENTS, Evidence, FailedPart, Work
from megatron_ttrace.diagnose.start import is_start
from megatron_ttrace.mcore.numbers import numbers
from megatron_ttrace.mcore.roles import any_layer
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.findings import Cause, Finding, OtherTensor, OtherTime
from megatron_ttrace.trace.records import STEP_LEVEL, BufferIndex, Kind, ParamIndex, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader

_SEARCH = 400
_WHOLE = 1 << 22
"""Elements of the largest tensor that other tensors are read to be compared with."""
_BEFORE = {Kind.PARAM: ParamIndex.BEFORE, Kind.BUFFER: BufferIndex.BEFORE}
_FORWARD, _BACKWARD = (Kind.INPUT, Kind.OUTPUT), (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT)
_SAME_SORT = dict.fromkeys(_FORWARD, _FORWARD) | dict.fromkeys(_BACKWARD, _BACKWARD)


@dataclasses.dataclass(frozen=True)
class Traces:
    """What two runs left.

    Attributes:
        measured: what each rank measured; it shows which ranks hold which tensors.
        kept: the shards that were kept of the candidate, if there are any.
        meshes: of the candidate's ranks.
        run: the candidate's configuration.
    """

    reference: TraceReader
    tolerances: Tolerances
    measured: Mapping[int, Sequence[Measured]]
    kept: TraceReader | None = None
    meshes: tuple[Mesh, ...] = ()
    run: RunConfig = dataclasses.field(default_factory=RunConfig)

    @classmethod
    def read(
        cls,
        reference: TraceReader,
        candidate: Path,
        tolerances: Tolerances,
        measured: Mapping[int, Sequence[Measured]],
    ) -> Traces:
        """With the directory of the shards that were kept, which may be absent or damaged."""
        # Explanations are optional: the verdict does not depend on them.
        with contextlib.suppress(Exception):
            kept = TraceReader(candidate)
            meshes = kept.candidate.meshes
            run = RunConfig.from_json(kept.candidate.config)
            return cls(reference, tolerances, measured, kept, meshes, run)
        return cls(reference, tolerances, measured)

    @functools.cached_property
    def started(self) -> dict[int, list[str]]:
        """The parameters that each rank holds before the step."""
        return {
            rank: [measured.key.name for measured in tensors if is_start(measured.key)]
            for rank, tensors in self.measured.items()
        }

    def of(self, key: TraceKey) -> Iterator[tuple[int, Measured]]:
        """Each rank that measured a tensor, with its measurements."""
        for rank, tensors in self.measured.items():
            yield from ((rank, measured) for measured in tensors if measured.key == key)

    def evidence(self, key: TraceKey, work: Work) -> Evidence | None:
        """What is known of a failed tensor; ``None`` if its shards were not kept.

        Raises:
            TTraceError, CodecError: the files are damaged.
        """
        if self.kept is None or key not in self.reference or key.kind is Kind.INITIAL:
            return None
        entry = self.reference.entry(key)
        reference = self.reference.tensor(entry)
        if not reference.is_floating_point() and key.kind not in (Kind.TOKENS, Kind.INPUT):
            return None  # choices
        ranks, parts = (self.meshes[0].size(axis) if self.meshes else 1 for axis in ("dp", "cp"))
        known = numbers(self.reference.reference, key.iteration, ranks * parts)
        evidence = Evidence(
            key=key,
            reference=reference,
            parts=list(self._parts(self.kept, key)),
            tolerance=self.tolerances.of(key),
            meshes=self.meshes,
            held={rank: measured.boxes for rank, measured in self.of(key) if measured.boxes},
            microbatches=max(1, self.reference.reference.microbatches // ranks),
            seq_length=self.run.seq_length,
            numbers={
                **known,
                "shards": self.run.weight_shards,
                "passes": 1 + self.run.recomputes,
            },
            work=work,
            others=lambda: self._others(key, entry.shape),
            whole=lambda other: self.reference.data(other) if other in self.reference else None,
            alike=lambda module: self._alike(key.iteration, module),
        )
        return evidence if evidence.parts else None

    def ratios(self, iteration: int) -> dict[TraceKey, list[float]]:
        """The factor of each rank's part of each main gradient that fails."""
        ratios: dict[TraceKey, list[float]] = {}
        for measured in itertools.chain(*self.measured.values()):
            key, sums = measured.key, measured.sums
            if key.kind is not Kind.MAIN_GRAD or key.iteration != iteration or sums is None:
                continue
            if sums.reference and fails(sums, self.tolerances, key):
                ratios.setdefault(key, []).append(sums.dot / sums.reference)
        return ratios

    @functools.cached_property
    def _shards(self) -> dict[TraceKey, list[tuple[int, Entry]]]:
        """The shards that were kept of each tensor, with their ranks."""
        shards: dict[TraceKey, list[tuple[int, Entry]]] = {}
        for rank, entries in (self.kept.ranks if self.kept else {}).items():
            for entry in entries:
                shards.setdefault(entry.key, []).append((rank, entry))
        return shards

    def _parts(self, kept: TraceReader, key: TraceKey) -> Iterator[FailedPart]:
        shards = self._shards.get(key, [])
        limit = max(1, ELEMENTS // max(1, len(shards)))
        for rank, entry in shards:
            if not (entry.partial_over or entry.sums) and (entry.boxes or not entry.logical_shape):
                local = kept.tensor(entry)
                yield FailedPart.of(local, self.meshes[rank], entry.boxes, entry.factor, limit)

    def _others(self, key: TraceKey, shape: tuple[int, ...]) -> Iterator[tuple[Finding, TraceKey]]:
        """Tensors that may be in this one's place: other times first, then other modules."""
        if math.prod(shape) > _WHOLE:
            return
        before = dataclasses.replace(key, index=_BEFORE.get(key.kind, key.index))
        if key != before and before in self.reference:
            yield OtherTime(Cause.OTHER_TIME), before
        near: dict[TraceKey, list[TraceKey]] = {}
        primary = self.reference.primary
        for other in self.reference:
            same_step = other.iteration == key.iteration
            same_batch = other.microbatch == key.microbatch
            if (other.kind, other.name, other.index) == (key.kind, key.name, key.index):
                if same_step and not same_batch:
                    yield OtherTime(Cause.OTHER_TIME, microbatch=other.microbatch), other
                elif same_batch and not same_step:
                    yield OtherTime(Cause.OTHER_TIME, iteration=other.iteration), other
            elif (
                (same_step and same_batch)
                and other.kind in _SAME_SORT.get(key.kind, (key.kind,))
                and self.reference.entry(other).shape == shape
                and primary(other) != primary(key)
                # A main weight that equals its weight was rounded.
                and (other.name != key.name or key.kind is not Kind.LOADED)
            ):
                near.setdefault(primary(other), []).append(other)

        def unlike(other: TraceKey) -> int:
            return 0 if sort_of(other) == sort_of(key) else 1 if other.kind is key.kind else 2

        # One tensor has many names: the one most like the culprit's is the most informative.
        named = [min(names, key=unlike) for names in near.values()]
        for other in sorted(named, key=unlike)[:_SEARCH]:
            yield OtherTensor(Cause.OTHER_MODULE, kind=other.kind.value, name=other.name), other

    def _alike(self, iteration: int, module: str) -> Iterator[str]:
        """Other linear layers that are given a tensor of this shape, in execution order."""
        fed = TraceKey(iteration, 0, Kind.INPUT, module, 0)
        if fed not in self.reference:
            return
        shape = self.reference.entry(fed).shape
        for other in self.reference:
            weight = TraceKey(iteration, STEP_LEVEL, Kind.PARAM, f"{other.name}.weight", 0)
            if (
                other == dataclasses.replace(fed, name=other.name) != fed
                and weight in self.reference
                and self.reference.entry(other).shape == shape
            ):
                yield other.name


def sort_of(key: TraceKey) -> tuple[Kind, str, int]:
    """What a tensor has in common with the same tensor of other layers."""
    return key.kind, any_layer(key.name), key.index
