# SPDX-License-Identifier: Apache-2.0
"""Whether every rank loaded what is in the checkpoint.

The reference's process reads the stored tensors and numbers, by names that no layout changes
(``mcore/checkpoints/``), and lets Megatron load the weights into its own model, of one device.
Every rank's weights, main weights, moments, buffers and numbers must equal what is stored, to the
last bit; weights also what one device loads, where that is something else. What can be read in
neither way must agree with the state that the candidate handed over (``handoff.py``). A reference
on several ranks does the same, each rank with its part of every tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_ttrace.capture.state import MOMENTS, held_state
from megatron_ttrace.capture.step import StepSink, TracedModel
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.checkpoints.buckets import by_parameter
from megatron_ttrace.mcore.checkpoints.loading import Part, Source, load_weights
from megatron_ttrace.mcore.checkpoints.names import stored_name, stored_names
from megatron_ttrace.mcore.checkpoints.numbers import Number
from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Stored, open_checkpoint
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT, HEAD_WEIGHT
from megatron_ttrace.mcore.optimizer import owned_by
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.trace import codec
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.errors import TTraceError, one_line
from megatron_ttrace.trace.meta import Unverified
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, LoadedIndex, TraceKey
from megatron_ttrace.trace.states import SCHEDULED, SCHEDULER, Bucketed, Item, State
from megatron_ttrace.trace.store import TraceReader
from megatron_ttrace.trace.views import box_views

_NAMED = 3
_DIGITS = 12
"""Of numbers that are compared: a learning rate is computed again after it was loaded."""

_STATES = {
    LoadedIndex.WEIGHT: State.WEIGHT,
    LoadedIndex.MAIN: State.MAIN,
    LoadedIndex.EXP_AVG: State.EXP_AVG,
    LoadedIndex.EXP_AVG_SQ: State.EXP_AVG_SQ,
    LoadedIndex.BUFFER: State.WEIGHT,
}
_VOCABULARY = (EMBEDDING_WEIGHT, HEAD_WEIGHT)
_STEPPED = (LoadedIndex.MAIN, *MOMENTS.values())
_WEIGHTS = (LoadedIndex.ONE_DEVICE, LoadedIndex.AGREED, LoadedIndex.WEIGHT)

_GROUPS = "param_groups["
_POSITION = ("iteration", "consumed_")


class InCheckpoint:
    """A checkpoint, and the weights that Megatron loads from it into the model of this process."""

    def __init__(
        self,
        source: Source | None,
        model: TracedModel,
        args: MegatronArguments,
        buckets: Mapping[str, Sequence[Bucketed]],
    ) -> None:
        """Load and open. ``buckets`` says where the ranks' parameters are in buckets."""
        self._model = model
        self._buckets = buckets
        self._source = source
        self._weights: dict[str, torch.Tensor] = {}
        self._names: dict[torch.Tensor, str] = {}
        self._checkpoint: Checkpoint | None = None
        self._why = self._unread = "the checkpoint is unknown"
        self.unverified = Unverified()
        weights = model.held()
        if source is not None:
            self._why = load_weights(source, model.chunks, [data for *_, data in weights], args)
            self._unread = self._open(source)
        for _, place, data in weights if not self._why else ():
            if not data.isnan().any():
                self._weights[place.name] = data.detach().clone()

    def _open(self, source: Source) -> str:
        """Open the checkpoint; returns why it cannot be read."""
        if source.why_not:
            return source.why_not
        try:
            checkpoint = open_checkpoint(source.folder)
            self._names = stored_names(self._model.chunks)
            self._checkpoint = by_parameter(checkpoint, self._pieces())
        except TTraceError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - whatever a model raises that has no names
            return f"Megatron: {one_line(error)}"
        return ""

    def _pieces(self) -> Iterator[Bucketed]:
        """What is in buckets, by stored names."""
        for parameter, place in self._model.places():
            for piece in self._buckets.get(place.name, ()):
                yield dataclasses.replace(piece, name=self._stored_name(parameter, place))

    def _stored_name(self, tensor: torch.Tensor, place: ParameterPlace) -> str:
        name = self._names.get(tensor)
        return place.name if name is None else stored_name(name, place.name)

    def write(self, sink: WriteSink) -> None:
        """Write what every rank must have. The model has the state that was handed over by now."""
        stepped = owned_by(self._model.optimizer) if self._loads_optimizer else {}
        state = {(part.index, part.place.name): part.data for part in held_state(self._model)}
        weights, states = [], []
        for parameter, place in self._model.places():
            if self._write_weight(sink, parameter, place) is LoadedIndex.AGREED:
                weights.append(place.name)
            for index in _STEPPED if parameter in stepped else ():
                data = state.get((index, place.name))
                if (stored := self._stored(parameter, place, index, data)) is not None:
                    _put(sink, place, index, stored)
                elif (
                    self._checkpoint
                    and data is not None
                    # Main weights of the same dtype are the weights themselves.
                    and (index is not LoadedIndex.MAIN or data.dtype != parameter.dtype)
                ):
                    states.append(place.name)
        for place, buffer in self._model.buffers():
            stored = self._stored(buffer, place, LoadedIndex.BUFFER, buffer)
            if stored is not None:
                _put(sink, place, LoadedIndex.BUFFER, stored)
            elif self._find(buffer, place, LoadedIndex.BUFFER) is not None:
                states.append(place.name)
        if self._checkpoint is not None and self._source is not None:
            for name, value in _comparable(self._checkpoint.numbers, self._source):
                number = torch.tensor(value, dtype=torch.float64)
                _put(sink, ParameterPlace(name, (), ()), LoadedIndex.NUMBER, number)
        self.unverified = Unverified(
            self._why, self._unread, tuple(weights), tuple(dict.fromkeys(states))
        )

    def _write_weight(
        self, sink: WriteSink, parameter: torch.nn.Parameter, place: ParameterPlace
    ) -> LoadedIndex:
        """Write a weight, and what main weights are, rounded; returns what it must be, at last."""
        loaded, data = self._weights.pop(place.name, None), parameter.data
        stored = self._stored(parameter, place, LoadedIndex.WEIGHT, data)
        values, is_same = [], False
        if loaded is not None:
            values.append((LoadedIndex.ONE_DEVICE, loaded))
            # Of several ranks, each may answer differently.
            alone = self._model.mesh.world_size == 1
            is_same = alone and stored is not None and torch.equal(stored, loaded.cpu())
        if stored is not None and not is_same:
            values.append((LoadedIndex.WEIGHT, stored))
        for index, value in values or [(LoadedIndex.AGREED, data)]:
            where = _put(sink, place, index, value)
        if parameter.requires_grad:  # a frozen one has no main weights
            _put(sink, place, LoadedIndex.ROUNDED, value, where)
        return index

    def _stored(
        self,
        tensor: torch.Tensor,
        place: ParameterPlace,
        index: LoadedIndex,
        candidate: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """This rank's part of what is stored, on the CPU; ``None`` if nothing is.

        ``tensor`` is the parameter or buffer, ``candidate`` what the candidate has of it.
        """
        try:
            stored = self._find(tensor, place, index)
            return None if stored is None else self._part(stored, place, candidate, tensor.shape)
        except TTraceError as error:
            self._unread = self._unread or str(error)
            return None

    def _find(
        self, tensor: torch.Tensor, place: ParameterPlace, index: LoadedIndex
    ) -> Stored | None:
        """What is stored, in whatever shape."""
        if self._checkpoint is None:
            return None
        item = Item(_STATES[index], self._stored_name(tensor, place))
        match = self._checkpoint.find(item)
        return match and match[1]

    def _part(
        self,
        stored: Stored,
        place: ParameterPlace,
        candidate: torch.Tensor | None,
        shape: torch.Size,
    ) -> torch.Tensor | None:
        """This rank's part of a stored tensor; ``None`` if that has another shape.

        The rows that pad a vocabulary depend on the layout that saved it. Those that are not stored
        are the candidate's own.
        """
        dtype = torch.float32 if candidate is None else candidate.dtype
        boxes = place.boxes(self._model.mesh)
        if stored.shape == place.logical_shape:
            logical = stored.read().to(dtype)
        elif not place.name.endswith(_VOCABULARY) or stored.shape[1:] != place.logical_shape[1:]:
            return None
        else:
            logical = torch.zeros(place.logical_shape, dtype=dtype)
            if candidate is not None:
                for source, target in box_views(candidate.detach().reshape(shape), logical, boxes):
                    target.copy_(source)
            common = min(len(logical), stored.shape[0])
            logical[:common] = stored.read()[:common]
        part = torch.zeros(shape, dtype=dtype)
        for target, source in box_views(part, logical, boxes):
            target.copy_(source)
        return part

    @property
    def _loads_optimizer(self) -> bool:
        return self._source is not None and self._source.loads(Part.OPTIMIZER)


def of_ranks(ranks: Sequence[Unverified]) -> Unverified:
    """What any rank of a reference could not compare with the checkpoint."""
    return Unverified(
        next((rank.why for rank in ranks if rank.why), ""),
        next((rank.unread for rank in ranks if rank.unread), ""),
        tuple(dict.fromkeys(name for rank in ranks for name in rank.weights)),
        tuple(dict.fromkeys(name for rank in ranks for name in rank.states)),
    )


def _put(
    sink: WriteSink | StepSink,
    place: ParameterPlace,
    index: LoadedIndex,
    data: torch.Tensor,
    *first_name: Place,
) -> Place:
    """Give a tensor to the sink; returns its name, of which a later one may be another."""
    name = STEP_LEVEL, Kind.LOADED, place.name, index
    sink.placed(name, data, place.logical_shape, place.placement, *first_name)
    return name


def _comparable(numbers: Mapping[str, Number], source: Source) -> Iterator[tuple[str, float]]:
    """The numbers that this job loads from the checkpoint and does not set itself."""
    for name, value in numbers.items():
        field = name.rpartition("].")[2]
        if isinstance(value, str):
            continue
        if name.startswith(_POSITION):
            part = Part.POSITION
        elif name == f"{SCHEDULER}num_steps":
            part = Part.SCHEDULER
        else:
            is_set = name.startswith(_GROUPS) and field in SCHEDULED
            part = Part.SCHEDULE if is_set or name.startswith(SCHEDULER) else Part.OPTIMIZER
        if source.loads(part):
            yield name, _number(value)


def _number(value: float) -> float:
    return float(f"{float(value):.{_DIGITS}g}")


def compare(
    model: TracedModel,
    numbers: Mapping[str, float],
    reference: TraceReader,
    iteration: int,
    sink: StepSink,
) -> None:
    """Compare what this rank loaded, before anything overwrites it.

    ``numbers`` are those that it loaded. What they and the model's state must be is in the
    reference, under an iteration.
    """

    def is_known(name: str, index: LoadedIndex) -> bool:
        return TraceKey(iteration, STEP_LEVEL, Kind.LOADED, name, index) in reference

    for part in held_state(model):
        place, data = part.place, part.data
        indices = [part.index]
        if part.index is LoadedIndex.WEIGHT:
            indices = [*_WEIGHTS]
        elif part.index is LoadedIndex.MAIN and part.parameter is not None:
            rounded = data.detach().to(part.parameter.dtype)
            _put(sink, place, LoadedIndex.ROUNDED, rounded)
        known = [index for index in indices if is_known(place.name, index)]
        if part.index is LoadedIndex.WEIGHT and not known:
            known = [LoadedIndex.ONE_DEVICE]
        for index in known:
            _put(sink, place, index, data)
    for name, value in numbers.items():
        reference_name = name
        if not is_known(name, LoadedIndex.NUMBER):
            # Groups that should agree and do not have a number: those of the first one.
            label, numbered, field = name.partition("#")
            reference_name = f"{label}.{field.partition('.')[2]}" if numbered else name
        if is_known(reference_name, LoadedIndex.NUMBER):
            data = torch.tensor(_number(value), dtype=torch.float64)
            _put(sink, ParameterPlace(reference_name, (), ()), LoadedIndex.NUMBER, data)


def notices(reference: TraceReader) -> Iterator[str]:
    """Which checkpoint was loaded, what was not, and what could not be compared with it."""
    encoded = reference.reference.identity.get("start", {}).get("source")
    if encoded is not None:
        source = codec.decode(Source, encoded)
        yield f"started from {source.folder} ({source.format}){_left(source)}"
    unverified = reference.reference.loaded or Unverified()
    if unverified.weights:
        reasons = "; ".join(dict.fromkeys(filter(None, (unverified.why, unverified.unread))))
        yield (
            f"not verified: whether {_named(unverified.weights)} are the checkpoint's "
            f"({reasons or 'it has none of these'}); ranks and main weights agree or are reported"
        )
    if unverified.unread:
        yield (
            "not verified: whether the optimizer's state, buffers and numbers are the "
            f"checkpoint's ({unverified.unread})"
        )
    if unverified.states:
        yield (
            "not verified: whether optimizer state and buffers are the checkpoint's, because it "
            f"has none of the same name and shape: {_named(unverified.states)}"
        )


_WORDS = {
    Part.OPTIMIZER: "the optimizer's state",
    Part.SCHEDULER: "the scheduler",
    Part.POSITION: "the iteration and the position in the data",
    Part.RANDOM: "random states",
}


def _left(source: Source) -> str:
    """What the user chose not to load."""
    by_option: dict[str, list[str]] = {}
    for part, option in source.left:
        is_included = part is Part.SCHEDULE and not source.loads(Part.SCHEDULER)
        if not is_included:
            by_option.setdefault(option, []).append(_WORDS.get(part, "the scheduler's settings"))
    return "".join(
        f"; not loaded ({option}): {', '.join(parts)}" for option, parts in by_option.items()
    )


def _named(names: Sequence[str]) -> str:
    return ", ".join(names[:_NAMED]) + (", ..." if names[_NAMED:] else "")
