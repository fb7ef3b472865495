# SPDX-License-Identifier: Apache-2.0
"""The reference's side: trace the steps, replay them perturbed, seal the trace."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from megatron_ttrace.capture.batches import Served
from megatron_ttrace.capture.calls import CallTap
from megatron_ttrace.capture.collectives import CollectiveTap
from megatron_ttrace.capture.initial import (
    Initial,
    as_training_begins,
    initial_values,
    uninitialised,
)
from megatron_ttrace.capture.step import StepSink, TracedModel
from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.moved import Moved, write_moves
from megatron_ttrace.compare.norms import write_calls
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.replaying import ReplaySink
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.jobs import fingerprint
from megatron_ttrace.jobs.processes.progress import OF_REFERENCE, say
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import fronts, loss_scale, losses, quiet, samples
from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer, Scheduler
from megatron_ttrace.mcore.blocks import mesh_of_blocks, step_in_blocks
from megatron_ttrace.mcore.sources import attributes_of
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run import low_precision
from megatron_ttrace.run.agreement import Ranks
from megatron_ttrace.run.launch import Order
from megatron_ttrace.run.perturb import UNPERTURBED, perturbed
from megatron_ttrace.run.rehearsal import Block, DataIterator, Rehearsal
from megatron_ttrace.run.separation import FACTOR, Separation
from megatron_ttrace.run.start import handoff
from megatron_ttrace.run.start.loaded import InCheckpoint
from megatron_ttrace.trace import counted
from megatron_ttrace.trace.budget import Budget, require_space
from megatron_ttrace.trace.counted import Counted
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.start import write_moments
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, announce, seal

_REPORTED_SECONDS = 1.0
"""From this time on each replay is reported."""
_MORE_OF_A_PARAMETER = 7 * 4
"""Bytes: main gradient, weight after the step, its change, two moments before and after it."""


class ReferenceSession:
    """Makes a reference trace out of the first training steps, then ends the process.

    After :meth:`begin` it has ``rehearsal`` and ``model``.
    """

    rehearsal: Rehearsal
    model: TracedModel
    traced = (1,)
    """Everything is done before the first step."""

    def __init__(
        self, args: MegatronArguments, settings: Settings, ranks: Ranks, order: Order
    ) -> None:
        self.args = args
        self.settings = settings
        self.ranks = ranks
        self.finished = self.judged = False
        self._initial: list[Initial] = []
        self._order = order
        self._directory = Path(order.directory)
        identity = order.identity["ttrace"]
        if identity[fingerprint.FIM_BY_SAMPLE]:
            samples.rearrange_by_sample()
        if (padded := identity[fingerprint.PADDED_FOR]) > 1:
            samples.pad_for(padded)
        if (dealt := identity[fingerprint.DEALT_TO]) > 1:
            fronts.current().deal_to(dealt)
        if order.started:
            # Megatron-Bridge makes its data loaders before it calls ``built``.
            order.started.skip(args)
        self._loss_scales: dict[str, float] = {}
        self._calls = CallTap(each_module=True)
        self._calls.start()  # the model is built next
        self._counted: list[Counted] = []
        self._seconds = 0.0
        self._loaded: InCheckpoint | None = None
        self._in_blocks: tuple[str, ...] = ()

    def begin(
        self, chunks: list[torch.nn.Module], optimizer: Optimizer, scheduler: Scheduler
    ) -> None:
        """Continue where the candidate stands in the data and the schedule, if it was loaded."""
        if started := self._order.started:
            started.resume(self.args, scheduler)
        self.rehearsal = Rehearsal(
            chunks,
            optimizer,
            scheduler,
            args=self.args,
            settings=self.settings,
            ranks=self.ranks,
            budget=Budget(self.settings.memory_mb << 20),
        )
        self.model = self.rehearsal.model
        blocks = mesh_of_blocks(self._order.identity["ttrace"][fingerprint.IN_BLOCKS])
        if self.ranks.size == 1:
            self._in_blocks = step_in_blocks(optimizer, self.model.parts(blocks), blocks)
        if started:
            self.rehearsal.start = Path(started.directory), started.step
        if not uninitialised(self.args, is_loaded=started is not None):
            self._initial = initial_values(self.model, self.args)
        if started and self._order.separation is None:
            buckets = handoff.buckets(Path(started.directory))
            self._loaded = InCheckpoint(started.source, self.model, self.args, buckets)

    def before_step(self, step: int, run: Callable[[], Any], iterator: DataIterator) -> int | None:
        """Do everything at the first step; the batches of untraced steps are skipped."""
        count = fronts.current().microbatches()
        if self._order.separation is not None:
            self._separate(self._order.separation, count, run, iterator)
            return ExitCode.EQUIVALENT
        writer = TraceWriter(self._directory, 0)
        self._measure_again()
        for initial in self._initial:
            key = TraceKey(self.settings.iterations[0], STEP_LEVEL, Kind.INITIAL, initial.name)
            sums = dataclasses.astuple(initial.moments)
            writer.add(Entry(key, initial.logical_shape, initial.dtype, sums=sums), None)
        if self._loaded is not None and self.rehearsal.start is not None:
            handoff.restore(self.model, *self.rehearsal.start)
            self._loaded.write(WriteSink(writer, self.settings.iterations[0]))
        moved: dict[TraceKey, Moved] = {}
        for block in self._blocks(iterator, count, run):
            moved |= self._block(block, writer)
        write_moves(self._directory, moved)
        self._seal(count, self._counted)
        return ExitCode.EQUIVALENT

    def _measure_again(self) -> None:
        """Initial values, as its candidate does when training starts."""
        if self.settings.iterations[0] == 1:
            self._initial = as_training_begins(self.model, self.args, self._initial)

    def _seal(self, microbatches: int, counts: Sequence[Counted]) -> None:
        layout = self._order.layout
        # A rank of several passes only its share to functions.
        is_recorded = self.ranks.size == 1 and not self._calls.error
        numbers = self._calls.numbers() | attributes_of(self.model.names)
        write_calls(self._directory, self._calls.norms() if is_recorded else ())
        meta = ReferenceMeta(
            fingerprint=self._order.fingerprint,
            identity=self._order.identity,
            modules=fingerprint.imported(),
            reads=fingerprint.opened_files(
                self.args, (self.settings.directory, self._directory.parent)
            ),
            microbatches=microbatches * self.model.mesh.size("dp"),
            loss_scales=self._loss_scales,
            counted=tuple(counted.encode(counts)),
            logs=fronts.current().logs,
            seconds=self._seconds,
            numbers=numbers if is_recorded else {},
            lines=self._calls.lines() if is_recorded else {},
            in_blocks=self._in_blocks,
            layout=None if layout is None else dataclasses.asdict(layout),
            **self._arithmetic(),
        )
        if self._loaded is not None:
            meta = dataclasses.replace(meta, loaded=self._loaded.unverified)
        seal(self._directory, meta.to_json())

    def _arithmetic(self) -> dict[str, Any]:
        """What tolerances depend on, apart from the replays."""
        return {
            "fp8": low_precision.uses_fp8(self.args),
            "by_module": low_precision.replays_are_isolated(self.args, self.settings),
            "epsilon": tolerance.epsilon(
                torch.bfloat16 if self.args.bf16 else self.args.params_dtype
            ),
        }

    def _blocks(
        self, iterator: DataIterator, count: int, run: Callable[[], Any]
    ) -> Iterator[Block]:
        """The blocks of traced iterations; the batches of other iterations are skipped."""
        first = 1
        for block in self.settings.blocks():
            Served(iterator, (block[0] - first) * count)
            first = block[0]
            served = Served(iterator, len(block) * count)
            yield Block(block, count, served, run)
            served.serve()  # what follows must not be changed as a rehearsal's batches are

    def _numbers(self, microbatches: int) -> range:
        """The numbers in a step of the microbatches that this rank runs."""
        mesh = self.model.mesh
        ranks = mesh.size("dp")
        return range(mesh.at("dp"), microbatches * ranks, ranks)

    def _started(self, served: Served) -> Callable[[], None]:
        """Save the start of some steps; returns what puts it back."""
        restore = self.rehearsal.saved()

        def again() -> None:
            restore()
            quiet.empty_metrics()
            self.rehearsal.serve(served)

        return again

    def _separate(
        self, separation: Separation, count: int, run: Callable[[], Any], iterator: DataIterator
    ) -> None:
        """Replay the step of an iteration with one loss's coefficient changed at a time."""
        reference = TraceReader(Path(separation.reference), announced=separation.checksum)
        layout = RankLayout(SINGLE, self.args.seq_length, 1.0)
        at = separation.iteration
        blocks = self._blocks(iterator, count, run)
        block = next(block for block in blocks if at in block.iterations)
        with self.rehearsal.steps(restore=True):
            self.rehearsal.equal_start()
            self.rehearsal.serve(block.served)
            if scale := reference.reference.loss_scales.get(str(block.first)):
                loss_scale.put(self.model.optimizer, scale)
            again = self._started(block.served)

            def replay(loss: Loss | None, isolated: bool, writer: TraceWriter) -> None:
                again()
                for iteration in range(block.first, at):
                    self.rehearsal.trace(run, WriteSink(writer, iteration), range(count), iteration)
                sink: StepSink = WriteSink(writer, at)
                if isolated:
                    sink = CompareSink(
                        reference, at, layout, writer=writer, keep_all=True, isolate=True
                    )
                with losses.weighted(self.model.chunks, loss, FACTOR) if loss else nullcontext():
                    self.rehearsal.trace(run, sink, range(count), at)

            separation.write(reference, replay, self._directory)

    def _block(self, block: Block, writer: TraceWriter) -> dict[TraceKey, Moved]:
        """Trace consecutive iterations and replay them; returns how far the replays moved them."""
        with self.rehearsal.steps(restore=True):
            self._begin_block(block)
            self.rehearsal.serve(block.served)
            again = self._started(block.served)
            scale = self._fitting_loss_scale(block, again)
            if scale is not None:
                self._loss_scales[str(block.first)] = scale
                again()
                loss_scale.put(self.model.optimizer, scale)
                again = self._started(block.served)
            _say(f"tracing {block.text}")
            began = time.monotonic()
            self._trace(block, writer)
            took = time.monotonic() - began
            self._seconds += took
            self._announce()
            replays = self.settings.seeds
            times = replays or f"{tolerance.FEWEST_REPLAYS} to {tolerance.MOST_REPLAYS}"
            often = "once" if times == 1 else f"{times} times"
            _say(f"traced in {took:.1f} s; replaying {block.text} perturbed, {often}")
            return self._replayed(block, again)

    def _announce(self) -> None:
        """Let a candidate compare with a trace that is small enough before it is replayed."""
        tensors = self._directory.glob("*.safetensors")
        room = Budget(self.settings.memory_mb << 20).staged
        is_whole = self.ranks.size == 1 and len(self.settings.blocks()) == 1
        if is_whole and sum(path.stat().st_size for path in tensors) <= room:
            meta = ReferenceMeta(loss_scales=self._loss_scales, seconds=self._seconds)
            announce(self._directory, meta.to_json())

    def _begin_block(self, block: Block) -> None:
        """Set the start values; on a CPU a candidate reads those of whole moments."""
        has_whole = self.rehearsal.device.type == "cpu" and self.ranks.size == 1
        if not has_whole or block.first != self.settings.iterations[0]:
            self.rehearsal.equal_start()
            return
        moments: dict[str, torch.Tensor] = {}
        self.rehearsal.equal_start(keep=moments.__setitem__)
        write_moments(self._directory, moments)

    def _trace(self, block: Block, to: TraceWriter) -> None:
        """Write the steps of a block."""
        room = functools.partial(self._require_space, block.microbatches)
        modules = CollectiveTap(self.model.names, self.model.mesh, self._calls.entered)
        self._calls.start()
        self._calls.in_steps(modules.around)
        try:
            with modules.active(block.first):
                self._capture(block, lambda iteration: WriteSink(to, iteration, room))
        finally:
            self._calls.stop()
        to.close()
        if len(to) == 0:
            raise TTraceError("the reference run traced nothing")

    def _capture(self, block: Block, sink_of: Callable[[int], StepSink]) -> None:
        """Capture the steps of a block, each into a sink of its own."""
        numbers = self._numbers(block.microbatches)
        for iteration in block.iterations:
            sink, batches = sink_of(iteration), block.batches(iteration)
            self._counted.append(self.rehearsal.trace(block.run, sink, numbers, iteration, batches))

    def _replayed(self, block: Block, again: Callable[[], None]) -> dict[TraceKey, Moved]:
        """Replay as often as asked for, or as the tolerances need; no tensor is kept."""
        reader = TraceReader(self._directory, sealed=False)
        parameters = tolerance.parameters(ReferenceMeta(**self._arithmetic()))
        dtypes = tolerance.dtypes_of(reader)
        moved: dict[TraceKey, Moved] = {}
        again()
        repeated = self._replay_once(reader, block, UNPERTURBED, {})
        most = self.settings.seeds or tolerance.MOST_REPLAYS
        for seed in range(1, most + 1):
            began = time.monotonic()
            again()
            moved |= self._replay_once(reader, block, seed, moved)
            if self.settings.seeds is None and Tolerances(moved, dtypes, **parameters).suffice():
                break
            if seed < most and (took := time.monotonic() - began) > _REPORTED_SECONDS:
                left = took * (most - seed)
                _say(f"replay {seed} took {took:.1f} s, at most {left:.0f} s of replays are left")
        judged = Tolerances(moved, dtypes, **parameters)
        for key, value in moved.items():
            one = judged.of(key)
            # Any element may then be rounded: how far depends on the largest.
            if one.element == one.value > 0.0 < value.norm < math.inf:
                largest = float(reader.data(key).float().abs().max())
                moved[key] = value = dataclasses.replace(value, top=largest / value.norm)
            if key in repeated:
                moved[key] = dataclasses.replace(value, repeated=repeated[key].moved[0])
        return moved

    def _replay_once(
        self,
        reader: TraceReader,
        block: Block,
        seed: int,
        before: Mapping[TraceKey, Moved],
    ) -> dict[TraceKey, Moved]:
        """Replay a block once, perturbed by a seed; returns what the replays until now did."""
        layout = RankLayout(SINGLE, self.args.seq_length, 1.0)
        moved: dict[TraceKey, Moved] = {}
        with perturbed(self.model.names, seed, self.model.optimizer):
            for iteration in block.iterations:
                replay = self._replay(reader, iteration, layout, seed)
                numbers = range(block.microbatches)
                self.rehearsal.trace(block.run, replay, numbers, iteration)
                for measured in replay.measured:
                    key = measured.key
                    if key not in reader:  # a gradient that only substitution makes
                        continue
                    row = replay.rows.get(key, 0.0)
                    moved[key] = Moved.after(before.get(key), measured.sums, row)
        return moved

    def _require_space(self, microbatches: int, forward: int) -> None:
        """Refuse a trace that the disk has no room for.

        ``forward`` are the bytes of the tensors of one microbatch's forward pass; the gradients of
        activations are as large.
        """
        model = sum(p.nbytes + _MORE_OF_A_PARAMETER * p.numel() for p, _ in self.model.places())
        needed = len(self.settings.iterations) * (2 * microbatches * forward + model)
        # Several ranks write shards, which are there until they are merged.
        copies = 1 if self.ranks.size == 1 else 2 * self.ranks.size
        require_space(self._directory.parent, copies * needed, "the reference")

    def _fitting_loss_scale(self, block: Block, again: Callable[[], None]) -> float | None:
        """A loss scale with which no gradient overflows: this run's own, or a lower one.

        ``again`` puts the start of the block back.
        """
        optimizer = self.model.optimizer
        initial = loss_scale.get(optimizer)
        if initial is None:
            return None
        scale = initial
        while self._overflows(scale, block) and scale > 1.0:
            scale = max(scale / loss_scale.STEP, 1.0)
            again()
        return scale if scale == initial else scale / loss_scale.ROOM

    def _overflows(self, scale: float, block: Block) -> bool:
        loss_scale.put(self.model.optimizer, scale)
        for _ in block.iterations:
            # Nothing is logged after these steps, which is what empties the sums of metrics.
            with quiet.metrics_kept():
                self.rehearsal.step(block.run)
            if loss_scale.overflowed(self.model.optimizer):
                return True
        return False

    def _replay(
        self, reader: TraceReader, iteration: int, layout: RankLayout, seed: int
    ) -> ReplaySink:
        if not low_precision.replays_are_isolated(self.args, self.settings):
            return ReplaySink(reader, iteration, layout)
        perturbation = low_precision.input_perturbation(self.args, self.model.names, seed)
        return ReplaySink(
            *(reader, iteration, layout, low_precision.is_isolated(self.args)),
            isolate=True,
            perturb=perturbation if seed else None,
        )


def _say(line: str) -> None:
    say(f"{OF_REFERENCE}{line}")
