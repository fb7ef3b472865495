# SPDX-License-Identifier: Apache-2.0
"""One traced training step: parameters, activations, gradients, update, in the order they happen.

The step itself is Megatron's own ``train_step``, unmodified; the optimizer's ``step`` is
intercepted because gradients must be read after they were reduced and before they are clipped.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from megatron_ttrace.capture.counting import Tally
from megatron_ttrace.capture.dropouts import DropoutTap
from megatron_ttrace.capture.isolate import clipped_by
from megatron_ttrace.capture.loads import watched
from megatron_ttrace.capture.modules import ModuleTap, Sink
from megatron_ttrace.mcore import fp8, groups, logged
from megatron_ttrace.mcore.balancing import is_bias
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.optimizer import Owned, divided, owned_by, writes_later
from megatron_ttrace.mcore.parameters import ParameterPlace, place_of_part, place_parameter
from megatron_ttrace.mcore.replaced import replaced
from megatron_ttrace.mcore.sharded_weights import local, parts_of
from megatron_ttrace.mcore.stacked import Shares, stacked_parameters
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import ZigZag
from megatron_ttrace.placement.plan import Placements, Step
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.copies import Copies, Copy
from megatron_ttrace.trace.counted import Counted
from megatron_ttrace.trace.findings import Remark
from megatron_ttrace.trace.records import (
    ROOT,
    STEP_LEVEL,
    BufferIndex,
    Kind,
    MetricIndex,
    ParamIndex,
)

_GRAD_NORM = (STEP_LEVEL, Kind.GRAD_NORM, "grad_norm", 0)


class StepSink(Sink, Protocol):
    """A sink that also takes tensors whose placement is known beforehand."""

    def placed(
        self, place: Place, data: torch.Tensor, logical_shape: Sequence[int], placement: Placements
    ) -> None:
        """A parameter, or something shaped like one."""


@dataclasses.dataclass(frozen=True)
class TracedModel:
    """A rank's model chunks with everything the capture must know of them."""

    chunks: list[torch.nn.Module]
    names: list[Names]
    optimizer: Any
    mesh: Mesh

    def places(self) -> list[tuple[torch.nn.Parameter, ParameterPlace]]:
        """Each parameter of this rank with its place in the whole model."""
        return [(p, place_parameter(name, p, self.mesh, n)) for name, p, n in self._parameters()]

    def parts(self, mesh: Mesh) -> list[tuple[torch.nn.Parameter, ParameterPlace]]:
        """Each parameter, which is whole here, with the place of its part on a rank of a mesh."""
        return [(p, place_of_part(name, p, mesh, n)) for name, p, n in self._parameters()]

    def _parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, Shares]]:
        for names, stacked in zip(self.names, self._stacked, strict=True):
            for name, parameter in names.parameters.items():
                yield name, parameter, stacked.get(name, 1)

    def buffers(self) -> Iterator[tuple[ParameterPlace, torch.Tensor]]:
        """Each buffer that this rank's modules have now, with its place in the whole model."""
        for names in self.names:
            for name in names.buffers:
                owner, _, leaf = name.rpartition(".")
                buffer = getattr(names.modules[owner or ROOT], leaf, None)
                if torch.is_tensor(buffer):
                    yield place_buffer(name, buffer.shape, names, self.mesh), buffer

    @functools.cached_property
    def _stacked(self) -> list[dict[str, Shares]]:
        return [stacked_parameters(names) for names in self.names]

    def held(self) -> list[tuple[torch.nn.Parameter, ParameterPlace, torch.Tensor]]:
        """Each parameter, with the place and the data of what this rank computes with."""
        parts = parts_of(self.chunks)
        return [
            (parameter, place.flat(*part.weights_range), part.weights)
            if (part := parts.get(parameter))
            else (parameter, place, parameter.data)
            for parameter, place in self.places()
        ]


class StepTap:
    """Captures one training step into a sink."""

    def __init__(
        self,
        model: TracedModel,
        sink: StepSink,
        microbatches: Sequence[int],
        on_error: Callable[[BaseException], None],
        settle: Callable[[], None],
        ready: Callable[[], None] = lambda: None,
        copies: Copies | None = None,
    ) -> None:
        """Prepare.

        Args:
            model: this rank's part of the model.
            sink: receives the tensors.
            microbatches: the reference's number of each of this rank's microbatches.
            on_error: receives an error of ours; the training step continues.
            settle: finishes an update that Megatron leaves for the next forward pass (overlapped
                parameter gather), so that updated parameters can be read. May be a collective.
            ready: called when everything is in place, before the step; what it raises is raised.
            copies: has room for copies of the weights; by default in memory.
        """
        self._model = model
        self._sink = sink
        self._microbatches = microbatches
        self._on_error = on_error
        self._settle = settle
        self._ready = ready
        self._copies = copies or Copies()
        self._failed = False
        self._uses: list[Any] = []
        self._tally = Tally(
            model.chunks, model.places(), model.optimizer, model.mesh, self._attempt
        )
        self._tap = ModuleTap(model.names, sink, microbatches, self._error)
        self._dropouts = DropoutTap(
            model.names,
            model.mesh,
            self._tap.microbatch,
            self._dropout,
            groups.of_tensor_parallel_ranks,
            on_cpu=groups.device_of(model.chunks).type == "cpu",
        )

    @property
    def left_out(self) -> bool:
        """Whether the model also ran without gradients, which is no microbatch."""
        return self._tap.left_out

    @property
    def draws(self) -> bool:
        """Whether random numbers were drawn instead of masks of dropout."""
        return self._dropouts.draws

    def detach(self) -> None:
        """Remove what hooks :meth:`run` could not remove. Raises what prevents it."""
        self._tap.detach()

    def run(self, step: Callable[[], Any]) -> Any:
        """Run one training step and capture it; returns what the step returned."""
        names, optimizer = self._model.names, self._model.optimizer
        original, settles_late = optimizer.step, not writes_later(optimizer)

        def traced_step(*args: Any, **kwargs: Any) -> Any:
            with self._copies.others() as copies:
                before = self._attempt(self._gradients, copies)
                norm = self._attempt(self._sink.replace, _GRAD_NORM, torch.zeros(()))
                if settles_late:
                    self._attempt(self._blur)
                with clipped_by(norm), self._tally.step():
                    result = original(*args, **kwargs)
                if not settles_late:
                    self._settle()
                elif isinstance(result, tuple) and result[:1] == (False,):
                    self._attempt(self._blur)  # nothing was updated
                self._attempt(self._update, before or {}, result)
            return result

        with self._tap:
            self._attempt(self._parameters, ParamIndex.BEFORE)
            self._attempt(self._buffers, BufferIndex.BEFORE)
            self._ready()
            try:
                with (
                    replaced([(optimizer, "step", traced_step)]),
                    self._tally.reduction(),
                    watched(names, self._attempt, self._load),
                    self._dropouts.active(self._attempt),
                ):
                    result = step()
            finally:
                for handle in self._uses:
                    handle.remove()
        self._attempt(self._losses, result)
        self._dropouts.compare()  # also on a rank whose tracing failed
        self._attempt(self._dropouts.conclude)
        self._attempt(self._precisions)
        self._metrics(result)
        self._attempt(self._buffers, BufferIndex.AFTER)
        # Not before: what a step does last computes with parameters as the job has them then. Also
        # on a rank whose tracing failed: the others wait for it in this collective.
        if settles_late:
            self._settle()
        self._attempt(self._parameters, ParamIndex.AFTER)
        return result

    def watch_uses(self, parameters: Collection[torch.nn.Parameter]) -> None:
        """Compare these again when the forward pass first uses them: are they gathered by then?"""
        self._attempt(self._watch_uses, set(parameters))

    def _watch_uses(self, gathered: Collection[torch.nn.Parameter]) -> None:
        places = {p: place for p, place in self._model.places() if p in gathered}

        def is_used(module: torch.nn.Module, _: Any) -> None:
            for parameter in module.parameters(recurse=False):
                if place := places.pop(parameter, None):
                    where = STEP_LEVEL, Kind.PARAM, place.name, ParamIndex.BEFORE
                    known = place.logical_shape, place.placement
                    why = Remark.NOT_GATHERED
                    self._attempt(self._sink.again, where, parameter.data, why, known)

        for names in self._model.names if places else ():
            for module in names.modules.values():
                self._uses.append(module.register_forward_pre_hook(is_used))

    def counted(self, iteration: int) -> Counted:
        """Which elements went into the step's reductions, norms, counts and updates."""
        return self._tally.counted(iteration)

    def _error(self, error: BaseException) -> None:
        self._failed = True
        self._on_error(error)

    def _attempt(self, work: Callable[..., Any], *args: Any) -> Any:
        """Fail open: what goes wrong in tracing must not stop training."""
        if self._failed:
            return None
        try:
            with torch.no_grad():
                return work(*args)
        except Exception as error:  # noqa: BLE001 - tracing never harms training
            self._error(error)
            return None

    def _placed(
        self, kind: Kind, place: ParameterPlace, data: torch.Tensor, index: int = 0
    ) -> None:
        where = STEP_LEVEL, kind, place.name, index
        self._sink.placed(where, data, place.logical_shape, place.placement)

    def _parameters(self, index: int) -> None:
        for _, place, data in self._model.held():
            self._placed(Kind.PARAM, place, data, index)

    def _gradients(self, copies: Copies) -> dict[torch.nn.Parameter, list[Copy]]:
        """Capture the reduced gradients; returns copies of what the step is about to change."""
        before = {}
        stepped = self._stepped()
        if stepped:
            sizes = [
                owned.main.nbytes * (1 + owned.steps_by_sign) if owned else parameter.nbytes
                for parameter, _, owned in stepped
            ]
            copies.require_space(stepped[0][0].device, sum(sizes))
        for parameter, place, owned in stepped:
            names = "main_grad", "decoupled_grad", "grad"
            gradients = (getattr(parameter, name, None) for name in names)
            gradient = next((each for each in gradients if each is not None), None)
            if gradient is not None and owned is not None and owned.range is not None:
                start, end = owned.range
                part = gradient.reshape(-1)[start:end] if owned.sharded is None else local(gradient)
                self._placed(Kind.MAIN_GRAD, place.flat(start, end), part)
            elif gradient is not None:
                self._placed(Kind.MAIN_GRAD, place, gradient)
            changing = owned.decisive if owned else (parameter.data,)
            before[parameter] = [copies.copy(tensor) for tensor in changing]
        return before

    def _blur(self) -> None:
        """Change the last bit of what main weights overwrite, which a small update may not do."""
        for parameter, _, owned in self._stepped():
            weight = owned.copied(parameter) if owned else None
            if owned and weight is not None and owned.main.itemsize == 2 * weight.itemsize == 4:
                weight.view(torch.int16).bitwise_xor_(1)

    def _update(self, before: dict[torch.nn.Parameter, list[Copy]], result: Any) -> None:
        for parameter, place, owned in self._stepped():
            if parameter not in before:
                continue
            main = owned.weights if owned else parameter.data
            now = owned.received(parameter) if owned else main.detach()
            weights, *moments = (copy.get() for copy in before[parameter])
            delta = now.float() - weights.float()
            if owned and owned.steps_by_sign:
                delta = owned.smooth(delta, *moments)
            where = place.flat(*owned.range) if owned and owned.range else place
            self._placed(Kind.PARAM_DELTA, where, delta)
            if owned is None:
                continue
            for name, kind in owned.moments.items():
                moment = owned.moment(name)
                if torch.is_tensor(moment) and moment.shape == main.shape:
                    self._placed(kind, where, moment)
        norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
        if norm is not None:
            self._number(_GRAD_NORM[1], _GRAD_NORM[2], norm)

    def _stepped(self) -> list[tuple[torch.nn.Parameter, ParameterPlace, Owned | None]]:
        """Trainable parameters with what the optimizer holds of them.

        A parameter that a distributed optimizer gave entirely to other ranks is left to them. One
        that no optimizer has is kept as a whole, so that it is found never to change.
        """
        owned = owned_by(self._model.optimizer)
        elsewhere = divided(self._model.optimizer)
        return [
            (parameter, place, owned.get(parameter))
            for parameter, place in self._model.places()
            if parameter.requires_grad and (parameter in owned or parameter not in elsewhere)
        ]

    def _losses(self, result: Any) -> None:
        losses = result[0] if isinstance(result, tuple) and result else {}
        for name, value in losses.items() if isinstance(losses, dict) else ():
            # A user's step may return other things with them.
            if value is not None and not isinstance(value, str):
                self._number(Kind.LOSS, str(name), value)

    def _metrics(self, result: Any) -> None:
        """Capture what is logged; also on a rank whose tracing failed, for it is a collective."""
        chunks, optimizer = self._model.chunks, self._model.optimizer
        try:
            with torch.no_grad():
                reported = logged.reported(result, chunks, optimizer, self._tally.params_norm)
                left = logged.left_over(chunks, optimizer)
        except Exception as error:  # noqa: BLE001 - tracing never harms training
            self._error(error)
            return
        for name, value in reported.items():
            self._attempt(self._number, Kind.METRIC, name, value, _index_of(name))
        for name, value in left.items():
            self._attempt(self._number, Kind.METRIC, name, value, MetricIndex.LEFT)

    def _buffers(self, when: BufferIndex) -> None:
        for place, buffer in self._model.buffers():
            # A step changes no others that matter to the next.
            if when is BufferIndex.AFTER or is_bias(place.name):
                self._placed(Kind.BUFFER, place, buffer, when)

    def _precisions(self) -> None:
        for names in self._model.names:
            for name, is_fp8 in fp8.in_use(names):
                self._number(Kind.PRECISION, name, torch.tensor(is_fp8))

    def _dropout(self, place: Place, number: float) -> None:
        self._sink.placed(place, torch.tensor(number, dtype=torch.float64), (), ())

    def _load(self, name: str, load: torch.Tensor) -> None:
        place = ParameterPlace(name, tuple(load.shape), ())
        self._placed(Kind.BUFFER, place, load, BufferIndex.LOADS)

    def _number(self, kind: Kind, name: str, value: Any, index: int = 0) -> None:
        """Capture a number, or several of one name; one may have any number of dims."""
        data = torch.as_tensor(value).detach()
        data = data.reshape(()) if data.numel() == 1 else data
        if not torch.is_tensor(value):
            # A Python number was a float32 before; as float64 it would look more exact.
            data = data.float()
        self._placed(kind, ParameterPlace(name, tuple(data.shape), ()), data, index)


def _index_of(metric: str) -> int:
    """What sort of number a metric is."""
    if metric in logged.COUNTS:
        return MetricIndex.ELEMENTS
    if metric.endswith(logged.CHOICES):
        return MetricIndex.CHOSEN
    return MetricIndex.LOSS if logged.is_rounded(metric) else MetricIndex.VALUE


def place_buffer(name: str, shape: Sequence[int], names: Names, mesh: Mesh) -> ParameterPlace:
    """The place of a module's buffer in the whole model.

    Buffers are whole on every rank, but for YaRN's cached rotary angles: each context-parallel rank
    keeps the rows of its own positions (``_set_cos_sin_cache`` in
    megatron/core/models/common/embeddings/yarn_rotary_pos_embedding.py).
    """
    cp = mesh.size("cp")
    if cp == 1 or not has_positions(name, names):
        return ParameterPlace(name, tuple(shape), ())
    return ParameterPlace(name, (shape[0] * cp, *shape[1:]), (Step("cp", ZigZag(0)),))


def has_positions(name: str, names: Names) -> bool:
    """Whether the rows of a buffer are positions, which context parallelism divides."""
    owner, _, leaf = name.rpartition(".")
    divided = getattr(names.modules.get(owner), "cp_group", None) is not None
    return divided and leaf in ("cos_cached", "sin_cached")
