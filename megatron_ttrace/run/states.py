# SPDX-License-Identifier: Apache-2.0
"""A run that records its training state and its steps, and ends after some of them.

It has no reference, and nothing in it is rehearsed: these are Megatron's own steps, on the job's
own data. ``ttrace resume`` starts such runs (``jobs/restarts.py``). All ranks write all they have,
replicas too, so that replicas that differ are noticed.
"""

import contextlib
import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch

from megatron_ttrace.capture.batches import Served
from megatron_ttrace.capture.executed import Functions, changed, noting
from megatron_ttrace.capture.state import (
    StateTensor,
    bucketed,
    held_multipliers,
    held_numbers,
    held_state,
    read_numbers,
    read_state,
)
from megatron_ttrace.jobs import edited
from megatron_ttrace.jobs.processes import progress
from megatron_ttrace.jobs.restarts import CHECKPOINT
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import fronts, gathering, quiet, samples
from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer, Scheduler
from megatron_ttrace.mcore.checkpoints.names import stored_name, stored_names
from megatron_ttrace.mcore.checkpoints.read import Reading
from megatron_ttrace.mcore.groups import device_of
from megatron_ttrace.mcore.optimizer import leaves_of
from megatron_ttrace.mcore.replaced import wrap
from megatron_ttrace.mcore.sources import class_place, function_place
from megatron_ttrace.run import requirements
from megatron_ttrace.run.agreement import Ranks
from megatron_ttrace.run.perturb import perturbed, spread_over
from megatron_ttrace.run.rehearsal import DataIterator, settle, traced_model
from megatron_ttrace.run.start.handoff import entry_of
from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.captured import Batch
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.executed import Edit
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.recorded import FOLDER, Code, Order, Point, RankRecord, Step
from megatron_ttrace.trace.records import LoadedIndex
from megatron_ttrace.trace.resumed import What
from megatron_ttrace.trace.store import TraceWriter, seal

_OMITTING = ("no_save_optim", "no_load_optim", "no_save_rng", "no_load_rng")
"""Options because of which a restart does not have all of the state."""
_TASK = "recording the state"
_TOKENS = ("tokens", "text")
"""Names of the tensor in a batch whose rows are the samples."""


class StateSession:
    """Records the run that it is part of."""

    def __init__(self, args: MegatronArguments, settings: Settings, ranks: Ranks) -> None:
        if settings.overrides is None:
            raise TTraceError("--ttrace-role state is internal: use ttrace resume")
        self._order = Order.read(settings.overrides)
        self._args = args
        self._settings = settings
        self._ranks = ranks
        self._home = settings.directory / FOLDER
        self._steps: list[Step] = []
        self._numbers: dict[str, dict[str, float]] = {}
        self._random: dict[str, dict[str, str]] = {}
        self._next: Callable[..., Step] | None = None
        self._ran: Functions = set()
        self._reads: Functions = set()
        requirements.complete(args, settings)
        run = ranks.from_one(0, "preparing the recording", self._prepare)
        shared.require(settings.directory, run)
        self._reading = Reading()
        if self._order.is_restart:
            self._reading.watch()
            self._intercept_loading()

    def _prepare(self) -> str:
        run = shared.prepare(self._settings.directory)
        owned.make(self._home)
        if self._order.save_after:
            # Megatron stores all arguments in it, and some may be secret.
            owned.make(self._home / CHECKPOINT.name, owned.PRIVATE_FOLDER, whole=True)
        return run

    def begin(
        self, chunks: list[torch.nn.Module], optimizer: Optimizer, scheduler: Scheduler
    ) -> None:
        """Record what was loaded, and have Megatron save after the right step."""
        args = self._args
        self.model = traced_model(chunks, optimizer, args)
        self._scheduler = scheduler
        self._device = device_of(chunks)
        self._first = args.iteration
        self._record_reading()
        self._record(Point.LOADED, args.iteration, args.num_floating_point_operations_so_far)
        self._say("training")
        if self._order.save_after:
            args.save_interval = self._first + self._order.save_after
        self._intercept_saving()

    def _record_reading(self) -> None:
        """Write what this rank read."""
        reading, mesh = self._reading, self.model.mesh
        if reading.is_literal:
            state: list[StateTensor] = []
            self._numbers[Point.READ] = {}
            # Unknown forms are left out: they are blamed on neither side.
            with contextlib.suppress(Exception):
                state = list(read_state(self.model, reading))
                self._numbers[Point.READ] = read_numbers(self.model.optimizer, reading)
            self._write_point(Point.READ, self._first, state)
        place = f"({mesh.at('pp')}, {mesh.at('tp')})"
        if (states := reading.random(place, mesh.at("dp"))) is not None:
            self._random[Point.READ] = _digests_of(states)
        self._reading = Reading()

    def _intercept_loading(self) -> None:
        """Note which functions run while Megatron loads."""
        import megatron.training.training as training

        def noted(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            with noting(self._ran):
                return load(*args, **kwargs)

        wrap(training, "load_checkpoint", noted)

    def _intercept_saving(self) -> None:
        """Record the state that Megatron begins to save, and let it save only once."""
        import megatron.training.training as training

        def recorded(save: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
            iteration, _, _, _, operations, *_ = args
            if not self._order.save_after or iteration != self._first + self._order.save_after:
                return
            with gathering.without_effect(self.model.chunks):
                self._record(Point.SAVED, iteration, operations)
            self._say("saving")
            with noting(self._ran):
                save(*args, **kwargs)

        wrap(training, "save_checkpoint", recorded)

    def _say(self, line: str) -> None:
        if self._ranks.rank == 0:
            progress.say(f"{line} ({self._settings.directory.name})")

    def before_step(self, step: int, iterator: DataIterator) -> None:
        """Note what the next step begins with."""
        with noting(self._reads):
            served = Served(iterator, fronts.current().microbatches())
        served.serve()
        self._next = functools.partial(
            Step,
            iteration=self._first + step,
            samples=tuple(_digests(batch) for batch in served.batches),
            # Megatron counts iterations in a local variable.
            numbers=self._held_numbers() | {"iteration": float(self._first + step - 1)},
            changed=changed(self._edits, self._reads),
        )

    @functools.cached_property
    def _edits(self) -> tuple[Edit, ...]:
        return edited.find().functions

    def _held_numbers(self) -> dict[str, float]:
        numbers = held_numbers(self._args, self._scheduler, self.model.optimizer)
        return numbers | held_multipliers(self.model)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """While a step runs: perturbed, if that is the order."""
        seed = self._order.seed and self._order.seed * 1000 + len(self._steps)
        spread = spread_over(self.model) if seed else None
        with perturbed(self.model.names, seed, self.model.optimizer, spread):
            yield

    def after_step(self, result: Any) -> int | None:
        """Record a step; after the last one write everything, and return the run's exit code."""
        assert self._next is not None, "before_step() comes first"
        losses, norm = result[0], result[5]
        step = self._next(
            losses={name: float(value) for name, value in losses.items()},
            grad_norm=None if norm is None else float(norm),
        )
        self._steps.append(step)
        if len(self._steps) < self._order.steps:
            return None
        self._record(Point.END, step.iteration, 0.0)
        from megatron.training.async_utils import maybe_finalize_async_save

        # Wait for what Megatron saves in the background.
        maybe_finalize_async_save(blocking=True, terminate=True)
        self._ranks.together("writing the record", self._write)
        return ExitCode.EQUIVALENT

    def _record(self, point: Point, iteration: int, operations: float) -> None:
        """Write this rank's state."""
        self._ranks.meet(_TASK)
        settle(self.model, self._args)
        self._write_point(point, iteration, held_state(self.model))
        numbers = {
            "iteration": float(iteration),
            "num_floating_point_operations_so_far": float(operations),
        }
        self._numbers[point] = self._held_numbers() | numbers
        self._random[point] = _digests_of(_random_states())

    def _write_point(self, point: Point, iteration: int, state: Iterable[StateTensor]) -> None:
        folder = self._home / point
        self._ranks.together(_TASK, lambda: self._write_state(folder, iteration, state))
        self._ranks.from_one(0, _TASK, lambda: seal(folder, {"role": "state"}))

    def _write_state(self, folder: Path, iteration: int, state: Iterable[StateTensor]) -> None:
        writer = TraceWriter(folder, self.model.mesh.rank)
        try:
            for part in state:
                if not _is_weight(part):
                    writer.add(entry_of(part, self.model.mesh, iteration), part.data)
        finally:
            writer.close()

    def _write(self) -> None:
        args = self._args
        described = {
            name: place
            for names in self.model.names
            for name, module in names.modules.items()
            if (place := class_place(type(module), "sharded_state_dict"))
        }
        RankRecord(
            mesh=self.model.mesh,
            omitted=tuple(name for name in _OMITTING if getattr(args, name, None)),
            is_exact=self._device.type == "cpu" or bool(getattr(args, "deterministic_mode", False)),
            dropout=quiet.has_dropout(args)
            or quiet.has_own_dropout(args, self.model.chunks)
            or quiet.has_random_routing(args),
            samples_by_layout=samples.depend_on_layout(args),
            numbers=self._numbers,
            random=self._random,
            steps=tuple(self._steps),
            described=described,
            stored=self._stored_names(),
            buckets=tuple(bucketed(self.model)),
            places=self._places(),
            changed=changed(self._edits, self._ran),
        ).write(self._home)

    def _places(self) -> dict[str, Code]:
        from megatron.training import checkpointing, training

        leaf, scheduler = type(next(leaves_of(self.model.optimizer))), type(self._scheduler)
        described = describing(leaf, self._ran)
        loads = function_place(checkpointing.load_checkpoint)
        loaded = class_place(leaf, "load_state_dict") or described
        optimizer = Code(described, called(loaded, self._ran) or loads)
        generators = function_place(checkpointing.get_rng_state)
        loader = function_place(getattr(training, "build_pretraining_data_loader", None))
        return {
            What.MAIN: optimizer,
            What.RANDOM: Code(generators, generators),
            What.NUMBER: Code(function_place(checkpointing.save_checkpoint), loads),
            What.SAMPLES: Code(loader, loader),
            "param_groups": optimizer,
            "opt_param_scheduler": Code(
                class_place(scheduler, "state_dict"),
                called(class_place(scheduler, "load_state_dict"), self._ran) or loads,
            ),
        }

    def _stored_names(self) -> dict[str, str]:
        """Parameters' and buffers' names in a distributed checkpoint, as far as they have some."""
        names = stored_names(self.model.chunks)
        tensors: list[tuple[str, torch.Tensor]] = [
            (place.name, parameter) for parameter, place in self.model.places()
        ]
        tensors += [(place.name, buffer) for place, buffer in self.model.buffers()]
        return {
            name: stored_name(names[tensor], name) for name, tensor in tensors if tensor in names
        }


def called(place: str, ran: Functions) -> str:
    """A place, unless it is known that its function did not run."""
    one = Place.of(place, Clue.RAN)
    return "" if ran and one and (one.file, one.function) not in ran else place


def describing(optimizer: type, ran: Functions) -> str:
    """Where an optimizer describes its state: of its methods for formats, that which ran."""
    forms = (name for name in dir(optimizer) if name.startswith("sharded_param_state_"))
    places = (called(class_place(optimizer, name), ran) for name in forms if ran)
    return next(filter(None, places), class_place(optimizer, "sharded_state_dict"))


def _is_weight(part: StateTensor) -> bool:
    """Whether main weights are the model's own: nothing keeps them apart."""
    weight = part.parameter
    return (
        part.index is LoadedIndex.MAIN
        and weight is not None
        and type(weight.data) is torch.Tensor
        and part.data.dtype == weight.dtype
        and part.data.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    )


def _digests(batch: Batch) -> tuple[str, ...]:
    """A digest of each sample of a microbatch: its row of every tensor that has one."""
    rows = next((len(batch[name]) for name in _TOKENS if name in batch), 1)
    marks = [hashlib.sha256() for _ in range(rows)]
    for name, tensor in sorted(batch.items()):
        parts = tensor if tensor.dim() and len(tensor) == rows else [tensor] * rows
        for mark, part in zip(marks, parts, strict=True):
            mark.update(f"{name}/{checksum(part)};".encode())
    return tuple(mark.hexdigest()[:16] for mark in marks)


def _random_states() -> dict[str, Any]:
    """The states of all generators, as Megatron's ``get_rng_state`` has them."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "random_rng_state": random.getstate(),
        "np_rng_state": numpy.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "cuda_rng_state": torch.cuda.get_rng_state() if _has_gpu() else None,
        "rng_tracker_states": get_cuda_rng_tracker().get_states(),
    }


def _has_gpu() -> bool:
    return torch.version.cuda is not None and torch.cuda.device_count() > 0


def _digests_of(states: Mapping[str, Any]) -> dict[str, str]:
    generators = {
        "python": repr(states["random_rng_state"]),
        "numpy": repr(states["np_rng_state"]),
        "torch": states["torch_rng_state"],
    }
    tracked = states["rng_tracker_states"]
    generators |= {f"tracker {name}": state for name, state in tracked.items()}
    if _has_gpu():
        generators["cuda"] = states["cuda_rng_state"]
    return {name: _digest(state) for name, state in generators.items()}


def _digest(state: Any) -> str:
    if isinstance(state, torch.Generator):
        state = state.get_state()
    data = state.cpu().numpy().tobytes() if torch.is_tensor(state) else str(state).encode()
    return hashlib.sha256(data).hexdigest()[:16]
