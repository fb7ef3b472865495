# SPDX-License-Identifier: Apache-2.0
"""What a rank's job would lose without a checkpoint: tensors and numbers."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.mcore.arguments import MegatronArguments, Scheduler
from megatron_ttrace.mcore.checkpoints import numbers
from megatron_ttrace.mcore.checkpoints.buckets import in_buckets
from megatron_ttrace.mcore.checkpoints.read import Reading, Stepped
from megatron_ttrace.mcore.optimizer import layer_wise, leaves_of, owned_by, scalers_of
from megatron_ttrace.mcore.parameters import ParameterPlace, reduced_over
from megatron_ttrace.mcore.statistics import with_step
from megatron_ttrace.trace.records import Kind, LoadedIndex
from megatron_ttrace.trace.states import Bucketed

MOMENTS = {Kind.EXP_AVG: LoadedIndex.EXP_AVG, Kind.EXP_AVG_SQ: LoadedIndex.EXP_AVG_SQ}
"""Which index the moments of a kind have."""
_NOT_OTHER = ("master_param", "step")
"""State of a torch optimizer that is read in another way."""
_MULTIPLIERS = ("wd_mult", "lr_mult")
"""Of a parameter group: what its scheduled numbers are multiplied by."""


@dataclasses.dataclass(frozen=True, slots=True)
class StateTensor:
    """A rank's part of a logical tensor of the training state.

    Attributes:
        index: ``WEIGHT``, ``MAIN``, ``EXP_AVG``, ``EXP_AVG_SQ``, ``BUFFER`` or ``OTHER``.
        place: in the whole model. An ``OTHER`` has the name ``PARAMETER/STATE``.
        data: not a copy.
        replicated: axes whose ranks have the same part.
        parameter: whose state this is; ``None`` for a buffer.
    """

    index: LoadedIndex
    place: ParameterPlace
    data: torch.Tensor
    replicated: tuple[str, ...]
    parameter: torch.nn.Parameter | None = None


def held_state(model: TracedModel) -> Iterator[StateTensor]:
    """The training state of this rank: weights, then optimizer state, then buffers.

    Optimizer state whose shape is not the parameter's has no place in the whole model if the
    parameter is divided; it is left out.
    """
    owned = owned_by(model.optimizer)
    as_wholes = layer_wise(model.optimizer)
    for parameter, place, data in model.held():
        replicated = place.replicated if data.numel() == parameter.numel() else ()
        yield StateTensor(LoadedIndex.WEIGHT, place, data, replicated, parameter)
    for parameter, place in model.places():
        if (part := owned.get(parameter)) is None:
            continue
        where = place.flat(*part.range) if part.range else place
        whole = part.range is None and parameter not in as_wholes
        replicated = place.replicated if whole else ()
        stepped = Stepped(part.weights, part.state, part.moments)
        for index, at, data in _of_optimizer(stepped, where):
            yield StateTensor(index, at, data, replicated, parameter)
    for place, buffer in model.buffers():
        axes = {step.axis for step in place.placement}
        replicated = tuple(axis for axis in ("dp", "cp") if axis not in axes)
        yield StateTensor(LoadedIndex.BUFFER, place, buffer, replicated)


def read_state(model: TracedModel, reading: Reading) -> Iterator[StateTensor]:
    """What this rank read of the same, as far as it was read in a form that is known."""
    values, states = reading.of_model(model.chunks), reading.of_optimizer(model.optimizer)
    for parameter, place in model.places():
        if (value := values.get(parameter)) is not None:
            yield StateTensor(LoadedIndex.WEIGHT, place, value, (), parameter)
        if (stepped := states.get(parameter)) is not None:
            for index, at, data in _of_optimizer(stepped, place, parameter.shape):
                yield StateTensor(index, at, data, (), parameter)
    for place, buffer in model.buffers():
        if (value := values.get(buffer)) is not None:
            yield StateTensor(LoadedIndex.BUFFER, place, value, ())


def _of_optimizer(
    part: Stepped, place: ParameterPlace, shape: torch.Size | None = None
) -> Iterator[tuple[LoadedIndex, ParameterPlace, torch.Tensor]]:
    """Main weights and state; ``shape`` of the former if they may not be there."""
    main = part.main
    if main is not None:
        shape = main.shape
        yield LoadedIndex.MAIN, place, main
    for name, value in part.state.items():
        if not torch.is_tensor(value) or name in _NOT_OTHER:
            continue
        if kind := part.moments.get(name):
            yield MOMENTS[kind], place, value
            continue
        at = dataclasses.replace(place, name=f"{place.name}/{name}")
        if value.shape == shape:
            yield LoadedIndex.OTHER, at, value
        elif not place.placement:
            at = dataclasses.replace(at, logical_shape=tuple(value.shape))
            yield LoadedIndex.OTHER, at, value


def bucketed(model: TracedModel) -> Iterator[Bucketed]:
    """Where this rank's parameters are in buckets, unless the rank before it has the same."""
    places = dict(model.places())
    for parameter, key, start in in_buckets(model.optimizer):
        place = places.get(parameter)
        if place and not any(model.mesh.at(axis) for axis in reduced_over(place.name)):
            boxes, shape = place.boxes(model.mesh), tuple(parameter.shape)
            yield Bucketed(
                name=place.name,
                key=key,
                start=start,
                shape=shape,
                logical_shape=place.logical_shape,
                boxes=boxes,
            )


def held_multipliers(model: TracedModel) -> dict[str, float]:
    """Each parameter's multipliers of the learning rate and the weight decay, from its group.

    If two groups change places, the groups are the same as before, but these are not.
    """
    places, owned = dict(model.places()), owned_by(model.optimizer)
    return {
        f"param_groups[of {places[parameter].name}].{name}": float(part.group[name])
        for parameter, part in owned.items()
        if parameter in places
        for name in _MULTIPLIERS
        if part.group.get(name) is not None
    }


def held_numbers(args: MegatronArguments, scheduler: Scheduler, optimizer: Any) -> dict[str, float]:
    """The numbers of the training state on this rank, by the names of a checkpoint's.

    The position in the data; the scheduler's; of each parameter group its hyper-parameters and the
    steps that were made; the loss scale.
    """
    inner = [each for leaf in leaves_of(optimizer) if (each := getattr(leaf, "optimizer", None))]
    groups = [with_step(each.state, group) for each in inner for group in each.param_groups]
    state = {
        "iteration": args.iteration,
        "args": args,
        "opt_param_scheduler": scheduler.state_dict(),
        "optimizer": [{"grad_scaler": _counters(scaler)} for scaler in scalers_of(optimizer)],
    }
    return _numbers(state, groups)


def _counters(scaler: Any) -> dict[str, Any]:
    """All that a scaler counts, by the names in its ``state_dict``, which may lack some."""
    held = {name[1:]: value for name, value in vars(scaler).items() if name.startswith("_")}
    return {**scaler.state_dict(), **held}


def read_numbers(optimizer: Any, reading: Reading) -> dict[str, float]:
    """What this rank read of the same."""
    states = reading.of_optimizers(optimizer)
    inner = [each.get("optimizer", each) for each in states]
    groups = [
        with_step(each.get("state", {}), group)
        for each in inner
        for group in each.get("param_groups", ())
    ]
    scalers = [{"grad_scaler": each["grad_scaler"]} for each in states if "grad_scaler" in each]
    return _numbers({**reading.state, "optimizer": scalers}, groups)


def _numbers(state: Mapping[str, Any], groups: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    found = numbers.of_state(state) | numbers.of_groups(groups)
    return {name: float(value) for name, value in found.items() if not isinstance(value, str)}
