# SPDX-License-Identifier: Apache-2.0
"""A start that is not generated: with ``--load``, the candidate's loaded state is the common start.

Not every checkpoint format reshards to one device, optimizer states least of all. So every rank of
the candidate writes its own boxes of what it loaded, and the reference assembles them. Written are
the optimizer's main parameters (the model's are casts of them) and Adam's moments. A rank whose
copy differs from the others' is found by comparing start parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from pathlib import Path

import torch

from megatron_ttrace.capture.step import MOMENTS, TracedModel
from megatron_ttrace.compare.measure import checksum, local_view, logical_view
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore import fingerprint
from megatron_ttrace.mcore.arguments import MegatronArguments, Scheduler
from megatron_ttrace.mcore.optimizer import Owned, owned_by
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.plan import describe
from megatron_ttrace.runtime.agreement import Ranks
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal


def write(model: TracedModel, directory: Path) -> str:
    """Write this rank's part of the state; returns a digest of it.

    Where all data-parallel ranks hold the same, the first one writes.
    """
    writer = TraceWriter(directory, model.mesh.rank)
    marks = hashlib.sha256()
    owned = owned_by(model.optimizer)
    for parameter, place in model.places():
        part = owned.get(parameter)
        is_flat = part is not None and part.range is not None
        if not is_flat and (model.mesh.at("dp") or model.mesh.at("cp")):
            continue
        where = place.flat(*part.range) if part is not None and part.range else place
        tensors = {Kind.PARAM: part.main if part is not None else parameter.data}
        for name, kind in MOMENTS.items():
            if part is not None and torch.is_tensor(part.state.get(name)):
                tensors[kind] = part.state[name]
        for kind, data in tensors.items():
            writer.add(_entry(kind, where, data, model), data)
            marks.update(f"{place.name}/{kind}/{checksum(data)}".encode())
    writer.close()
    return marks.hexdigest()


def _entry(kind: Kind, place: ParameterPlace, data: torch.Tensor, model: TracedModel) -> Entry:
    return Entry(
        key=TraceKey(0, STEP_LEVEL, kind, place.name),
        shape=tuple(data.shape),
        dtype=str(data.dtype).removeprefix("torch."),
        logical_shape=place.logical_shape,
        placement=describe(place.placement),
        boxes=place.boxes(model.mesh),
    )


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
    pieces: dict[tuple[Kind, str], list[Entry]] = {}
    for entries in reader.ranks.values():
        for entry in entries:
            pieces.setdefault((entry.key.kind, entry.key.name), []).append(entry)
    owned = owned_by(model.optimizer)
    with torch.no_grad():
        for parameter, place in model.places():
            whole = _assemble(reader, pieces.get((Kind.PARAM, place.name), []), place)
            _put(whole, place, parameter.data, model)
        model.optimizer.reload_model_params()
        for parameter, place in model.places():
            part = owned.get(parameter)
            if part is None:
                continue
            where = place.flat(*part.range) if part.range else place
            whole = _assemble(reader, pieces.get((Kind.PARAM, place.name), []), place)
            _put(whole, where, part.main, model)
            _restore_moments(reader, pieces, part, where, model, step)


def _restore_moments(
    reader: TraceReader,
    pieces: dict[tuple[Kind, str], list[Entry]],
    part: Owned,
    where: ParameterPlace,
    model: TracedModel,
    step: float | None,
) -> None:
    for name, kind in MOMENTS.items():
        found = pieces.get((kind, where.name))
        if not found:
            continue
        moment = torch.zeros_like(part.main, dtype=torch.float32)
        _put(_assemble(reader, found, where), where, moment, model)
        part.inner.state[part.main][name] = moment
        if step is not None:
            if type(part.inner).__name__ == "FusedAdam":
                part.group["step"] = int(step)
            else:
                part.inner.state[part.main]["step"] = torch.tensor(step)


def _assemble(reader: TraceReader, entries: list[Entry], place: ParameterPlace) -> torch.Tensor:
    if not entries or entries[0].logical_shape != place.logical_shape:
        raise TTraceError(f"the candidate's start state has no {place.name} of this shape")
    whole = torch.zeros(place.logical_shape, dtype=torch.float32)
    for entry in entries:
        data = reader.tensor(entry).to(whole.dtype)
        for box in entry.boxes:
            logical_view(whole, box).copy_(local_view(data, box))
    return whole


def _put(
    whole: torch.Tensor, place: ParameterPlace, target: torch.Tensor, model: TracedModel
) -> None:
    for box in place.boxes(model.mesh):
        local_view(target, box).copy_(logical_view(whole, box))


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
    """

    directory: str
    step: float | None
    iteration: int
    consumed_train_samples: int
    schedule: int
    content: str

    def resume(self, args: MegatronArguments, scheduler: Scheduler) -> None:
        """Continue at its position in the data and in the schedule."""
        args.iteration = self.iteration
        args.consumed_train_samples = self.consumed_train_samples
        scheduler.num_steps = self.schedule
        scheduler.step(increment=0)


def hand_over(
    model: TracedModel,
    directory: Path,
    args: MegatronArguments,
    scheduler: Scheduler,
    ranks: Ranks,
    device: torch.device,
) -> Started:
    """Write the state that was loaded; called on all ranks."""
    told = "handing over the loaded state"
    ranks.from_one(0, told, lambda: shutil.rmtree(directory, ignore_errors=True))
    digests = ranks.exchange(told, lambda: write(model, directory), device)
    started = Started(
        directory=str(directory.resolve()),
        step=steps_of(model),
        iteration=args.iteration,
        consumed_train_samples=args.consumed_train_samples,
        schedule=scheduler.num_steps,
        content=fingerprint.digest({"ranks": digests}),
    )
    ranks.from_one(
        0, told, lambda: seal(directory, {"role": "start", **dataclasses.asdict(started)})
    )
    return started
