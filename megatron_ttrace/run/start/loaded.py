# SPDX-License-Identifier: Apache-2.0
"""Whether every rank loaded what is in the checkpoint.

The reference's process lets Megatron load the checkpoint's weights into its own model, of one
device. Every rank's weights, and the main weights of its optimizer after rounding, must equal them
bit for bit. Where Megatron cannot load a weight on one device, every rank's must equal the main
weights that the candidate handed over (``handoff.py``).
"""

from __future__ import annotations

import dataclasses

import torch

from megatron_ttrace.capture.state import held_state
from megatron_ttrace.capture.step import StepSink, TracedModel
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.checkpoints.loading import Source, load_weights
from megatron_ttrace.mcore.optimizer import owned_by
from megatron_ttrace.trace.meta import Unverified
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, LoadedIndex, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter

_NAMED = 3


class OneDevice:
    """The weights of a checkpoint, loaded into the model of this process."""

    def __init__(self, source: Source | None, model: TracedModel, args: MegatronArguments) -> None:
        self._model = model
        self._weights: dict[str, torch.Tensor] = {}
        held = model.held()
        why = "the checkpoint is unknown"
        if source is not None:
            why = load_weights(source, model.chunks, [data for *_, data in held], args)
        lacking = []
        for _, place, data in held if not why else ():
            if data.isnan().any():
                lacking.append(place.name)
            else:
                self._weights[place.name] = data.detach().clone()
        self.unverified = Unverified(why, tuple(lacking))

    def write(self, writer: TraceWriter, iteration: int) -> None:
        """Write what every rank must have. The model has the state that was handed over by now."""
        owned = owned_by(self._model.optimizer)
        for parameter, place in self._model.places():
            weight = self._weights.pop(place.name, None)
            index = LoadedIndex.AGREED if weight is None else LoadedIndex.ONE_DEVICE
            data = parameter.data if weight is None else weight
            key = TraceKey(iteration, STEP_LEVEL, Kind.LOADED, place.name, index)
            line = writer.add(Entry.of(key, data), data)
            if parameter in owned:
                main = dataclasses.replace(key, index=LoadedIndex.ROUNDED)
                writer.add(Entry.of(main, data, same_as=line), None)


def compare(model: TracedModel, reference: TraceReader, iteration: int, sink: StepSink) -> None:
    """Compare what this rank loaded, before anything overwrites it."""
    for part in held_state(model):
        place, data, index = part.place, part.data, LoadedIndex.ONE_DEVICE
        if part.index is LoadedIndex.WEIGHT:
            agreed = TraceKey(iteration, STEP_LEVEL, Kind.LOADED, place.name, LoadedIndex.AGREED)
            index = LoadedIndex.AGREED if agreed in reference else index
        elif part.index is LoadedIndex.MAIN and part.parameter is not None:
            data, index = data.detach().to(part.parameter.dtype), LoadedIndex.ROUNDED
        else:
            continue
        where = STEP_LEVEL, Kind.LOADED, place.name, index
        sink.placed(where, data, place.logical_shape, place.placement)


def notice(reference: TraceReader) -> str:
    """What could not be compared with one device's load; empty if everything was."""
    found = reference.reference.loaded or Unverified()
    if not found.why and not found.weights:
        return ""
    names = ", ".join(found.weights[:_NAMED]) + (", ..." if found.weights[_NAMED:] else "")
    what = f"the checkpoint has no {names}" if found.weights else found.why
    rest = "these" if found.weights else "weights"
    return (
        f"not verified: whether the loaded weights are the checkpoint's, because one device cannot "
        f"load it ({what}). Of {rest}, only the agreement of ranks and main weights was verified"
    )
