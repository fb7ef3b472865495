# SPDX-License-Identifier: Apache-2.0
"""A start that is not generated: with ``--load``, the candidate's loaded state is the common start.

Not every checkpoint format reshards to one device, optimizer states least of all. So every rank of
the candidate writes its own boxes of what it loaded, and the reference assembles them: the
optimizer's main weights (the model's are casts of them), Adam's moments, and buffers (the biases of
routers). What every rank loaded is compared (``run/start/loaded.py``) before it is overwritten
with this common start.
"""

import dataclasses
import hashlib
import json
from collections import defaultdict
from pathlib import Path

import torch

from megatron_ttrace.capture.state import MOMENTS, StateTensor, bucketed, held_state
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.jobs import fingerprint
from megatron_ttrace.mcore.arguments import MegatronArguments, Scheduler
from megatron_ttrace.mcore.checkpoints import loading
from megatron_ttrace.mcore.checkpoints.loading import Source
from megatron_ttrace.mcore.optimizer import owned_by
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.sharded_weights import are_published, like, parts_of, publish
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.plan import describe
from megatron_ttrace.run.agreement import Ranks
from megatron_ttrace.run.start.moments import set_step
from megatron_ttrace.trace import codec, owned
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, LoadedIndex, TraceKey
from megatron_ttrace.trace.states import Bucketed
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, atomic_write, seal
from megatron_ttrace.trace.views import local_view, logical_view

_BUCKETS = "buckets.jsonl"


def write(model: TracedModel, directory: Path) -> str:
    """Write this rank's part of the state; returns a digest of it.

    If all data-parallel ranks hold the same state, the first one writes it; of an expert's, the
    first of the ranks that have this expert.
    """
    writer = TraceWriter(directory, model.mesh.rank)
    marks = hashlib.sha256()
    stepped = owned_by(model.optimizer)
    for part in held_state(model):
        is_cast = part.index is LoadedIndex.WEIGHT and part.parameter in stepped
        is_copy = any(model.mesh.at(axis) for axis in part.replicated)
        # Ranks that have a part of a buffer (context parallelism) leave it as it was built.
        is_partial = part.index is LoadedIndex.BUFFER and bool(part.place.placement)
        if is_cast or is_copy or is_partial or part.index is LoadedIndex.OTHER:
            continue
        writer.add(entry_of(part, model.mesh, 0), part.data)
        marks.update(f"{part.place.name}/{part.index}/{checksum(part.data)}".encode())
    writer.close()
    lines = (f"{json.dumps(codec.encode(piece))}\n" for piece in bucketed(model))
    atomic_write(directory / f"rank-{model.mesh.rank:05d}.{_BUCKETS}", "".join(lines))
    return marks.hexdigest()


def entry_of(part: StateTensor, mesh: Mesh, iteration: int) -> Entry:
    """The line of a rank's part of the state in its trace."""
    place = part.place
    return Entry.of(
        TraceKey(iteration, STEP_LEVEL, Kind.LOADED, place.name, part.index),
        part.data,
        logical_shape=place.logical_shape,
        placement=describe(place.placement),
        boxes=place.boxes(mesh),
    )


def buckets(directory: Path) -> dict[str, list[Bucketed]]:
    """Where all ranks' parameters are in buckets, by name."""
    pieces: defaultdict[str, list[Bucketed]] = defaultdict(list)
    for path in sorted(directory.glob(f"rank-*.{_BUCKETS}")):
        for line in path.read_text(encoding="utf-8").splitlines():
            piece = codec.decode(Bucketed, json.loads(line))
            pieces[piece.name].append(piece)
    return pieces


def steps_of(model: TracedModel) -> float | None:
    """The number of steps that Adam has recorded; ``None`` without moments."""
    for part in owned_by(model.optimizer).values():
        step = part.state.get("step", part.group.get("step"))
        if step is not None and "exp_avg" in part.state:
            return float(step)
    return None


def restore(model: TracedModel, directory: Path, step: float | None) -> None:
    """Put the written state into this rank's model and optimizer, whatever their layout.

    Raises:
        TTraceError: when a parameter is not among what was written.
    """
    reader = TraceReader(directory)
    pieces: defaultdict[tuple[LoadedIndex, str], list[Entry]] = defaultdict(list)
    for entries in reader.ranks.values():
        for entry in entries:
            if entry.key.index == LoadedIndex.WEIGHT:
                # Main weights of other ranks come after it.
                pieces[LoadedIndex.MAIN, entry.key.name].insert(0, entry)
            else:
                pieces[LoadedIndex(entry.key.index), entry.key.name].append(entry)

    def copy(index: LoadedIndex, place: ParameterPlace, target: torch.Tensor) -> None:
        logical = _assemble(reader, pieces[index, place.name], place)
        for box in place.boxes(model.mesh):
            local_view(target, box).copy_(logical_view(logical, box))

    owned = owned_by(model.optimizer)
    with torch.no_grad():
        for place, buffer in model.buffers():
            if (LoadedIndex.BUFFER, place.name) in pieces:
                copy(LoadedIndex.BUFFER, place, buffer)
        parts = parts_of(model.chunks)
        for parameter, place in model.places():
            if shard := parts.get(parameter):
                copy(LoadedIndex.MAIN, place.flat(*shard.range), shard.stepped)
            else:
                copy(LoadedIndex.MAIN, place, parameter.data)
        if are_published(model.chunks):
            publish(model.chunks)
        else:
            model.optimizer.reload_model_params()
        for parameter, place in model.places():
            if (part := owned.get(parameter)) is None:
                continue
            where = place.flat(*part.range) if part.range else place
            copy(LoadedIndex.MAIN, where, part.main)
            for name, kind in part.moments.items():
                if (MOMENTS[kind], place.name) not in pieces:
                    continue
                moment = torch.zeros_like(part.main, dtype=torch.float32)
                copy(MOMENTS[kind], where, moment)
                part.inner.state[part.key][name] = like(part.key, moment)
                if step is not None:
                    set_step(part, part.key, step)


def _assemble(reader: TraceReader, entries: list[Entry], place: ParameterPlace) -> torch.Tensor:
    if not entries or entries[0].logical_shape != place.logical_shape:
        raise TTraceError(f"the candidate's start state has no {place.name} of this shape")
    # Main weights come before or after weights of fewer bits; whole numbers may be large.
    stored: torch.dtype = getattr(torch, entries[0].dtype)
    dtype = torch.float32 if stored.is_floating_point and stored.itemsize < 8 else stored
    logical = torch.zeros(place.logical_shape, dtype=dtype)
    for entry in entries:
        data = reader.tensor(entry).to(logical.dtype)
        for box in entry.boxes:
            logical_view(logical, box).copy_(local_view(data, box))
    return logical


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A start that was handed over.

    Attributes:
        directory: of the state.
        step: steps that Adam has made; ``None`` without moments.
        iteration: of the training.
        consumed_train_samples: of the data.
        schedule: steps of the learning rate's schedule.
        content: a digest of the state.
        source: the checkpoint; on rank 0.
    """

    directory: str
    step: float | None
    iteration: int
    consumed_train_samples: int
    schedule: int
    content: str
    source: Source | None = None

    def skip(self, args: MegatronArguments) -> None:
        """Continue at its position in the data."""
        args.iteration = self.iteration
        args.consumed_train_samples = self.consumed_train_samples

    def resume(self, args: MegatronArguments, scheduler: Scheduler) -> None:
        """Continue at its position in the data and in the schedule."""
        self.skip(args)
        scheduler.num_steps = self.schedule
        scheduler.step(increment=0)


def hand_over(
    model: TracedModel,
    directory: Path,
    args: MegatronArguments,
    scheduler: Scheduler,
    ranks: Ranks,
) -> Started:
    """Write the state that was loaded; called on all ranks."""
    task = "handing over the loaded state"
    ranks.from_one(0, task, lambda: owned.remove(directory))
    written = ranks.exchange(task, lambda: [write(model, directory), steps_of(model)])
    started = Started(
        directory=str(directory.resolve()),
        # A rank may step nothing: of a stage that is frozen, or with a layer-wise optimizer.
        step=next((step for _, step in written if step is not None), None),
        iteration=args.iteration,
        consumed_train_samples=args.consumed_train_samples,
        schedule=scheduler.num_steps,
        content=fingerprint.digest({"ranks": [digest for digest, _ in written]}),
        source=loading.source_of(args) if ranks.rank == 0 else None,
    )
    meta = {"role": "start", **dataclasses.asdict(started)}
    ranks.from_one(0, task, lambda: seal(directory, meta))
    return started
