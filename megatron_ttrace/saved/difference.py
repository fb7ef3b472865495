# SPDX-License-Identifier: Apache-2.0
"""Two saved runs against each other: the first one's trace takes the place of the reference.

Its shards are put together to whole tensors (``whole.py``) and written as a reference is, in the
order in which its own reference ran. Then they are compared as by ``ttrace compare``. A tolerance
is what the replays of either run's reference allow, the larger one: both runs round.
"""

import contextlib
import dataclasses
import itertools
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.moved import Moved, moves_of, write_moves
from megatron_ttrace.compare.offline import config_of, meshes_of
from megatron_ttrace.saved.known import Difference
from megatron_ttrace.saved.whole import WholeTensors
from megatron_ttrace.trace import files, owned
from megatron_ttrace.trace.errors import TTraceError, reported
from megatron_ttrace.trace.findings import Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.outcomes import Reason, Unexercised
from megatron_ttrace.trace.records import (
    ROOT,
    Direction,
    Kind,
    Outcome,
    ParamIndex,
    Summary,
    TraceKey,
)
from megatron_ttrace.trace.sanitise import some_of
from megatron_ttrace.trace.store import META, Entry, TraceReader, TraceWriter, read_meta, seal

_ASIDE, _DAY = ".against-", 86400.0
_NAMED = 4
"""Names of modules that a notice lists."""
_ASKED = {"iterations traced": "iterations", "start values": "init"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs.

    Attributes:
        candidate: its saved tensors, if it is more than a reference.
        reference: its reference, if that is there.
        summary: how it compares with its own reference, if that is known.
    """

    directory: Path
    candidate: TraceReader | None
    reference: TraceReader | None
    summary: Summary | None = None

    @property
    def trace(self) -> TraceReader:
        """The run's own tensors."""
        trace = self.candidate or self.reference
        assert trace is not None, "a side has a trace"
        return trace

    @property
    def epsilon(self) -> float:
        """Machine epsilon of the compute dtype, 0 if unknown."""
        return self.reference.reference.epsilon if self.reference else 0.0

    @property
    def version(self) -> str:
        """Of megatron-core; empty if unknown."""
        return str((_identity(self).get("versions") or {}).get("megatron-core", ""))

    def asked(self, field: str) -> Any:
        """How the run was traced; of a reference alone what it was made for, if it is known."""
        if self.candidate:
            return getattr(self.config, field)
        value = (_identity(self).get("ttrace") or {}).get(field)
        return tuple(value) if isinstance(value, list) else value

    @property
    def config(self) -> RunConfig:
        """Of the candidate; all defaults without one."""
        return config_of(self.candidate) if self.candidate else RunConfig()


def open_side(folder: Path) -> Side:
    """A run from the directory of a check or a record, or of one of its two traces.

    Raises:
        TTraceError: when it holds no complete trace.
    """
    if not folder.is_dir():
        raise TTraceError(f"{folder}: no such directory: give a trace (ttrace record) or a command")
    home = folder
    if (folder / META).exists():
        if read_meta(folder).get("role") == "reference":
            return Side(directory=folder, candidate=None, reference=TraceReader(folder))
        home = folder.parent
    else:
        folder = folder / "candidate"
    if not (folder / META).exists() or not (candidate := TraceReader(folder)).candidate.complete:
        raise TTraceError(
            f"{home} holds no complete trace of a run: make one with ttrace record -- COMMAND"
        )
    has_reference = (home / "reference" / META).exists()
    reference = TraceReader(home / "reference") if has_reference else None
    summary = _own_summary(home, candidate)
    return Side(directory=home, candidate=candidate, reference=reference, summary=summary)


def _own_summary(home: Path, candidate: TraceReader) -> Summary | None:
    """How a run compares with its own reference; ``None`` if that is not the report in ``home``."""
    try:
        summary = files.answer_of(home, str(candidate.meta["run"]))
    except TTraceError:
        return None
    of_candidate = config_of(candidate).reference
    return summary if summary.config.get("reference", "") == of_candidate else None


@contextlib.contextmanager
def aside(folder: Path) -> Iterator[Path]:
    """A directory in ``folder`` for as long as it is needed. Raises ``TTraceError``.

    Those of comparisons that were killed are removed after a day: another one may be running.
    """
    home = folder / f"{_ASIDE}{secrets.token_hex(8)}"
    with reported(f"{folder} cannot be written", OSError, advice="choose another --directory"):
        owned.make(folder, ignored=True)
        for left in folder.glob(f"{_ASIDE}*"):
            if time.time() - left.stat().st_mtime > _DAY:
                owned.discard(left)
        owned.make(home, owned.PRIVATE_FOLDER, whole=True)
    try:
        yield home
    finally:
        owned.discard(home)


def vocabulary_multiple(side: Side) -> int | None:
    """What a run's vocabulary is padded to a multiple of."""
    multiple = (_identity(side).get("arguments") or {}).get("make_vocab_size_divisible_by")
    return multiple if isinstance(multiple, int) else None


def in_order(first: Side, second: Side) -> tuple[Side, Side]:
    """The run that takes the place of the reference, and the other one.

    It is the first one, unless the other is a reference itself, or computes in a wider dtype:
    values can be rounded to the narrower one, not back.

    Raises:
        TTraceError: when the two cannot be compared.
    """
    if second.candidate is None or (first.epsilon > second.epsilon > 0 and first.candidate):
        first, second = second, first
    names = f"{first.directory} and {second.directory}"
    if second.candidate is None:
        raise TTraceError(f"{names} are two references: at least one must be a run's own trace")
    if first.reference is None and second.reference is None:
        raise TTraceError(
            f"{names}: neither has a reference that was replayed, so there are no tolerances: keep "
            "one of the runs with ttrace record -- COMMAND"
        )
    require_alike(first, second)
    batches = [_batches(side) for side in (first, second) if side.reference]
    for subject in batches[0]:
        if len(values := {sizes[subject] for sizes in batches if subject in sizes}) > 1:
            raise TTraceError(
                f"{names} train on different batches ({' and '.join(map(str, sorted(values)))} "
                f"{subject}): give both the same --global-batch-size, --micro-batch-size and "
                "--seq-length"
            )
    if any(side.config.isolate for side in (first, second)):
        sides = (first, second)
        prints = {side.reference.reference.fingerprint for side in sides if side.reference}
        both = all(side.config.isolate for side in sides if side.candidate)
        if len(prints) > 1 or not both:
            raise TTraceError(
                f"{names}: FP8 runs, and runs with --ttrace-isolate, are comparable only if they "
                "share a reference"
            )
    return first, second


def require_alike(first: Side, second: Side) -> None:
    """Raise ``TTraceError`` for runs that traced other steps, or from other start values."""
    sides = first, second
    asked = {name: [side.asked(field) for side in sides] for name, field in _ASKED.items()}
    asked["--seed"] = [(_identity(side).get("arguments") or {}).get("seed") for side in sides]
    for subject, values in asked.items():
        if None not in values and values[0] != values[1]:
            raise TTraceError(
                f"{first.directory} and {second.directory} differ in {subject}: {values[0]} and "
                f"{values[1]}"
            )


def _batches(side: Side) -> dict[str, int]:
    """The sizes of a reference's batches that are known."""
    arguments = _identity(side).get("arguments") or {}
    assert side.reference is not None, "a side with a reference"
    sizes = {
        "microbatches a step": side.reference.reference.microbatches,
        "samples a microbatch": arguments.get("micro_batch_size"),
        "tokens a sample": arguments.get("seq_length"),
    }
    return {subject: size for subject, size in sizes.items() if isinstance(size, int)}


def write(first: Side, second: Side, directory: Path) -> dict[TraceKey, Reason]:
    """Write the first run's trace as a reference for the second.

    Returns why some of its tensors are not in it.
    """
    ours = WholeTensors(first.candidate) if first.candidate else None
    theirs = WholeTensors(second.candidate) if second.candidate else None
    rows = padded(first, second)
    narrow = {entry.key: entry.dtype for rank in second.trace.ranks.values() for entry in rank}
    writer = TraceWriter(directory, 0)
    lines: dict[TraceKey, int] = {}
    left_out: dict[TraceKey, Reason] = {}
    for key in _keys(first, second, ours):
        if ours is not None and key in ours and (reason := ours.unjudged(key)):
            left_out[key] = reason
        elif key.kind is Kind.INITIAL:
            entry = first.trace.entry(key) if ours is None else ours.initial(key)
            if entry is not None:
                writer.add(entry, None)
        elif (data := _tensor(key, first, ours)) is not None:
            data = _real_rows(key, _narrowed(data, narrow.get(key, "")), theirs, rows)
            line = _repeated(key, data, lines, first, ours)
            lines[key] = writer.add(Entry.of(key, data), data) if line is None else line
            if line is not None:
                writer.add(Entry.of(key, data, same_as=line), None)
    writer.close()
    known = set(lines)
    sides = [side.reference for side in (first, second) if side.reference]
    write_moves(directory, _combined([moves_of(side) for side in sides], known))
    metas = [side.reference for side in sides]
    meta = ReferenceMeta(
        identity=metas[0].identity,
        microbatches=metas[0].microbatches,
        counted=metas[0].counted,
        logs=metas[0].logs,
        fp8=any(other.fp8 for other in metas),
        by_module=all(other.by_module for other in metas),
        epsilon=max(other.epsilon for other in metas),
    )
    seal(directory, meta.to_json())
    return left_out


def _keys(first: Side, second: Side, tensors: WholeTensors | None) -> Iterator[TraceKey]:
    """All keys of the first run, in the order of a reference's execution."""
    reference = first.reference or second.reference
    assert reference is not None, "in_order requires a reference"
    keys: Iterable[TraceKey] = reference if tensors is None else tensors
    known = set(keys)
    yield from (key for key in reference if key in known)
    yield from (key for key in keys if key not in reference)


def _repeated(
    key: TraceKey,
    data: torch.Tensor,
    lines: Mapping[TraceKey, int],
    side: Side,
    tensors: WholeTensors | None,
) -> int | None:
    """The line of the same tensor under its first name, if it was written under one."""
    if side.reference is None or key not in side.reference:
        return None
    primary = side.reference.primary(key)
    if primary == key or primary not in lines:
        return None
    before = _tensor(primary, side, tensors)
    if before is None or (before.numel(), before.dtype) != (data.numel(), data.dtype):
        return None
    return lines[primary] if torch.equal(before.reshape(-1), data.reshape(-1)) else None


def _tensor(key: TraceKey, side: Side, tensors: WholeTensors | None) -> torch.Tensor | None:
    data = None if tensors is None else tensors.tensor(key)
    judged_by_sums = tensors is not None and key in tensors and tensors.is_judged_by_sums(key)
    if data is None and (tensors is None or judged_by_sums):
        # Choices of experts are replaced by the reference's, which the candidate thus has.
        reference = side.reference
        data = reference.data(key) if reference and key in reference else None
    return data


def _narrowed(data: torch.Tensor, dtype: str) -> torch.Tensor:
    """Rounded to the other run's dtype where that is the narrower one."""
    if not dtype or not data.is_floating_point():
        return data
    other = getattr(torch, dtype)
    wider = other.is_floating_point and tolerance.epsilon(other) > tolerance.epsilon(data.dtype)
    return data.to(other) if wider else data


def _real_rows(
    key: TraceKey, data: torch.Tensor, other: WholeTensors | None, rows: tuple[int, int] | None
) -> torch.Tensor:
    """A tensor with the other run's padding: rows that one run lacks are the other's."""
    other_data = None if rows is None or other is None or key not in other else other.tensor(key)
    if rows is None or other_data is None or other_data.ndim != data.ndim:
        return data
    pairs = [*zip(data.shape, other_data.shape, strict=True)]
    unequal = [dim for dim, (ours, theirs) in enumerate(pairs) if ours != theirs]
    if len(unequal) != 1 or pairs[unequal[0]] != rows:
        return data
    padded_data = other_data.to(data.dtype)
    padded_data.narrow(unequal[0], 0, min(rows)).copy_(data.narrow(unequal[0], 0, min(rows)))
    return padded_data


def _combined(
    all_moves: Sequence[Mapping[TraceKey, Moved]], known: set[TraceKey]
) -> dict[TraceKey, Moved]:
    """Of every tensor the larger of what replays of either run did."""
    moved: dict[TraceKey, list[Moved]] = {}
    for key, of_run in itertools.chain.from_iterable(moves.items() for moves in all_moves):
        moved.setdefault(key, []).append(of_run)
    return {key: max(moved[key], key=lambda of: max(of.moved)) for key in moved if key in known}


class Review:
    """Marks failures that are not faults as unchecked."""

    not_asked: frozenset[Unexercised] = frozenset()

    explains = True
    """Whether causes are looked for."""

    def __init__(
        self,
        first: Side,
        second: Side,
        left_out: Mapping[TraceKey, Reason],
        known: Sequence[Difference],
    ) -> None:
        self.reference = first.directory
        self._left_out = left_out
        self._padded = padded(first, second)
        versions = (first.version, second.version)
        self._known = [difference for difference in known if difference.applies(versions)]
        self._sides = first, second
        self._kinds, self._names = (
            [{getattr(key, field) for key in side.trace} for side in (first, second)]
            for field in ("kind", "name")
        )
        starts = [
            {
                key.name
                for key in side.trace
                if key.kind is Kind.PARAM and key.index == ParamIndex.BEFORE
            }
            for side in (first, second)
        ]
        self._other_start = starts[0] != starts[1]
        self._names_by_subject: dict[str, dict[str, None]] = {}

    def __call__(self, verdicts: Sequence[Judged]) -> list[Judged]:
        """The verdicts, with what cannot be compared and known differences ``unchecked``."""
        # Ids are spread over all rows of a vocabulary.
        self._other_ids = self._padded is not None and any(
            v.kind is Kind.INPUT and v.name == ROOT and v.verdict.is_failure for v in verdicts
        )
        return [
            self._reviewed(verdict) if verdict.verdict.is_failure else verdict
            for verdict in verdicts
        ]

    def layout(self) -> dict[str, Any]:
        """The layout of the first run: the sizes of its axes, and its ranks."""
        candidate = self._sides[0].candidate
        return meshes_of(candidate)[0].describe() if candidate else {}

    def notices(self) -> list[str]:
        """Which run is which, and what was not compared, by name."""
        notices = [
            f"{subject}: {some_of(names, _NAMED)}"
            for subject, names in self._names_by_subject.items()
        ]
        if self._padded:
            ours, theirs = self._padded
            notices.append(
                f"vocabularies are padded to {ours} and {theirs} rows: the first "
                f"{min(self._padded)} are compared. The softmax runs over all rows, and traced "
                "steps may spread ids over them, so what follows differs by design: give both "
                "--make-vocab-size-divisible-by so that the sizes are equal"
            )
        first, second = map(_described, self._sides)
        return [f"the reference is {first}; compared with it is {second}", *notices]

    def _reviewed(self, verdict: Judged) -> Judged:
        key = verdict.key
        after_loss = key.direction not in (Direction.START, Direction.FORWARD)
        other_values = verdict.verdict in (Outcome.DIVERGED, Outcome.REPLICA_CONFLICT)
        loses = after_loss or key.kind is Kind.LOSS or self._other_ids
        if self._padded and other_values and loses:
            return verdict.unchecked(Reason.PADDED)
        if reason := self._left_out.get(key):
            return verdict.unchecked(reason)
        if verdict.verdict in (Outcome.MISSING, Outcome.EXTRA):
            has, lacks = (1, 0) if verdict.verdict is Outcome.EXTRA else (0, 1)
            whose = self._sides[has].directory
            if key.kind not in self._kinds[lacks]:
                self._say(f"only {whose} has tensors of this kind, not compared", key.kind.value)
                return _lacking(verdict, f"no {key.kind} at all")
            if key.name not in self._names[lacks]:
                self._say(f"only {whose} has these modules or parameters, not compared", key.name)
                return _lacking(verdict, "nothing of this name")
        for difference in self._known:
            if difference.explains(key):
                self._say(f"known difference ({difference.reason})", f"{key.name} {key.kind}")
                return verdict.unchecked(Reason.KNOWN, difference.reason)
        if self._other_start and other_values and key.direction is not Direction.START:
            # Start values follow from names: a renamed parameter starts from others.
            return verdict.unchecked(Reason.OTHER_START)
        return verdict

    def _say(self, subject: str, name: str) -> None:
        self._names_by_subject.setdefault(subject, {})[name] = None


def _lacking(verdict: Judged, lacking: str) -> Judged:
    text = f"not compared: the other run has {lacking}"
    return verdict.unchecked(Reason.ONE_RUN, text, Remark.LACKING)


def padded(first: Side, second: Side) -> tuple[int, int] | None:
    """The sizes to which two runs pad their vocabularies, if they differ."""
    rows = _vocabulary(first), _vocabulary(second)
    return rows if all(rows) and rows[0] != rows[1] else None


def _vocabulary(side: Side) -> int:
    """Rows of the word embedding, with padded ones; 0 if there is none."""
    for key in side.trace:
        if key.kind is Kind.PARAM and key.name.endswith("word_embeddings.weight"):
            return side.trace.entry(key).logical_shape[0]
    return 0


def _described(side: Side) -> str:
    """A run: where it is, its Megatron, and how it compares with its own reference."""
    version = f", megatron-core {side.version}" if side.version else ""
    answer = f" ({side.summary.verdict} with its own reference)" if side.summary else ""
    return f"{side.directory}{version}{answer}"


def _identity(side: Side) -> dict[str, Any]:
    return side.reference.reference.identity if side.reference else {}
