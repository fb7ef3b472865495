# SPDX-License-Identifier: Apache-2.0
"""The candidate's side of a check: find a reference, compare on every rank, judge, report.

This file decides when; how is in ``requirements.py`` (which runs are refused), ``start/handoff.py``
(a start that was loaded), ``comparison.py`` (traced steps) and ``answer.py`` (the verdict).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.capture.batches import Served
from megatron_ttrace.capture.calls import CallTap
from megatron_ttrace.capture.executed import ExecutedTap
from megatron_ttrace.capture.initial import (
    Initial,
    as_training_begins,
    initial_values,
    uninitialised,
)
from megatron_ttrace.capture.state import held_numbers
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.compare import routing
from megatron_ttrace.compare.tokens import match
from megatron_ttrace.jobs import edited, provenance, reference_layout
from megatron_ttrace.jobs.processes.progress import NOTICE, say
from megatron_ttrace.jobs.settings import Keep, Settings
from megatron_ttrace.mcore import fronts, gathering, loss_scale, losses, quiet, samples, statistics
from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer, Scheduler
from megatron_ttrace.mcore.checkpoints import loading
from megatron_ttrace.mcore.groups import kept_in
from megatron_ttrace.mcore.optimizer import unknown
from megatron_ttrace.mcore.sources import replacements
from megatron_ttrace.run import answer, launch, requirements
from megatron_ttrace.run.agreement import EndError, Ranks
from megatron_ttrace.run.comparison import Comparison, gradient_factor, layout_of
from megatron_ttrace.run.recording import Recording
from megatron_ttrace.run.rehearsal import OWN_DROPOUT, Block, DataIterator, Rehearsal
from megatron_ttrace.run.separation import Separation
from megatron_ttrace.run.start import loaded
from megatron_ttrace.run.start.handoff import Started, hand_over
from megatron_ttrace.saved.conclusion import Answer, prepare, publish
from megatron_ttrace.trace import cleaning, mapped, owned, shared
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.captured import Batch, Share
from megatron_ttrace.trace.errors import ExitCode, TTraceError
from megatron_ttrace.trace.executed import Edits
from megatron_ttrace.trace.records import Result, TraceKey
from megatron_ttrace.trace.start import StartValues
from megatron_ttrace.trace.store import TraceReader, TraceWriter


def _say(notice: str) -> None:
    if dist.get_rank() == 0:
        say(f"{NOTICE}{notice}")


def placed(settings: Settings) -> Settings:
    """Settings with the directory that was meant when the run began."""
    return dataclasses.replace(settings, directory=provenance.placed(settings.directory))


class CandidateSession:
    """Checks the run that it is part of; after :meth:`begin` it has ``rehearsal`` and ``model``."""

    rehearsal: Rehearsal
    model: TracedModel

    def __init__(
        self,
        args: MegatronArguments,
        settings: Settings,
        ranks: Ranks,
        executed: ExecutedTap,
        calls: CallTap,
    ) -> None:
        self.args = args
        self.settings = settings = placed(settings)
        self.ranks = ranks
        self.budget = Budget(settings.memory_mb << 20)
        self.traced = {block[0]: block for block in settings.blocks()}  # by their first step
        self.finished = False
        self.judged = False  # a verdict was reported, whatever fails later
        self._initial: list[Initial] = []
        self._comparison: Comparison | None = None
        self._started: Started | None = None
        self._timings: dict[str, float] = {}
        self._waited = 0.0
        self._notices: list[str] = []
        requirements.require(args, settings)
        if samples.is_by_sample(args, exits=settings.exit_after):
            samples.rearrange_by_sample()
        if quiet.has_dropout(args):
            _say("dropout is switched off in the traced steps")
        if quiet.has_random_routing(args):
            _say("random routing is switched off in the traced steps")
        if quiet.has_mlp_chunks(args):
            _say("MLPs run in one piece in the traced steps")
        for text in (*requirements.complete(args, settings), *requirements.notices(args, settings)):
            self._notice(text)
        run = ranks.from_one(0, "preparing the check", lambda: shared.prepare(settings.directory))
        shared.require(settings.directory, run)
        self._executed, self._calls = executed, calls
        fronts.current().hand_over(settings.directory)
        last = ranks.size - 1
        # While rank 0 makes the reference, the one that will write the report only waits.
        found = self._changes() if ranks.rank == last else None
        if not self.is_loaded:
            # Before the model is built: on a GPU the reference needs the memory.
            self._order_reference(None)
            if not launch.is_apart(settings):
                self._await_reference()
        self._edits = Edits.from_json(ranks.from_one(last, "looking for changes", lambda: found))
        executed.follow(self._edits.functions)

    def _changes(self) -> Any:
        """What the user changed, as JSON; also loads what writes the report."""
        if self.ranks.size > 1:
            prepare(self.settings)
        return edited.find(replacements(self._calls.replacing.values())).to_json()

    def begin(
        self, chunks: list[torch.nn.Module], optimizer: Optimizer, scheduler: Scheduler
    ) -> None:
        """Hand the state of a run that starts from a checkpoint to the reference first."""
        self.settings = placed(self.settings)
        requirements.require_built(self.args, self.settings)
        self.rehearsal = Rehearsal(
            chunks,
            optimizer,
            scheduler,
            args=self.args,
            settings=self.settings,
            ranks=self.ranks,
            budget=self.budget,
        )
        self.model = self.rehearsal.model
        if quiet.has_own_dropout(self.args, chunks):
            self._notice(OWN_DROPOUT)
        for name in unknown(optimizer):
            self._notice(f"{name} is not a known optimizer: its moments are not compared")
        if not_initial := uninitialised(self.args, is_loaded=self.is_loaded):
            self._notice(not_initial)
        else:
            self._initial = initial_values(self.model, self.args)
        self._recording = Recording(self.model, self._executed, self._calls)
        for name in (name for names in self.model.names for name in names.unused):
            self._notice(f"{name} of the last stage is unused in the forward pass: not traced")
        first = self.settings.iterations[0]
        if self.is_loaded:
            directory = self.settings.directory / "start"
            started = hand_over(self.model, directory, self.args, scheduler, self.ranks)
            self.rehearsal.start = directory, started.step
            numbers = held_numbers(self.args, scheduler, optimizer)
            self._order_reference(started)
            self._await_reference()
            reference = self.comparison.reference
            with self.comparison.step(first, layout_of(self.model, self.args)) as sink:
                loaded.compare(self.model, numbers, reference, first, sink)
            for text in loaded.notices(reference):
                self._notice(text)

    @property
    def comparison(self) -> Comparison:
        """This rank's comparison, once there is a reference."""
        assert self._comparison is not None, "the reference comes first"
        return self._comparison

    @property
    def is_loaded(self) -> bool:
        """Whether this run starts from a checkpoint."""
        return loading.directory_of(self.args) is not None

    def before_step(self, step: int, run: Callable[[], Any], iterator: DataIterator) -> int | None:
        """Rehearse the block of traced iterations that starts with this step."""
        self.settings = placed(self.settings)
        if step == 1:
            self._initial = as_training_begins(self.model, self.args, self._initial)
        iterations = self.traced[step]
        count = fronts.current().microbatches()
        block = Block(iterations, count, Served(iterator, count * len(iterations)), run)
        plain = self.rehearsal.plain()
        try:
            with quiet.python_state_kept():
                return self._check(block)
        finally:
            if not self.settings.exit_after:
                plain.restore(whole=True)

    def _check(self, block: Block) -> int | None:
        """Trace a block, and conclude after the last one."""
        # The time in which it waits for the reference is the reference's.
        began, iterations = time.monotonic() - self._waited, block.iterations
        try:
            self.ranks.meet("fetching the batches")
            if block.first == 1:
                self._warm_up(block)
            if block.first == self.settings.iterations[0]:
                self._await_reference()
                self.comparison.initial(block.first, self._initial)
            self._rehearse(block, self.comparison, self._recording.step)
            self._timings["traced steps"] = time.monotonic() - self._waited - began
            if not self.comparison.reference.is_complete:
                self._complete()
                self._timings["reference"] = time.monotonic() - self._ordered
            if iterations[-1] != self.settings.iterations[-1]:
                return None
            self.finished = True
            return self._conclude(functools.partial(self._rehearse, block))
        finally:
            block.served.serve()

    def _rehearse(
        self,
        block: Block,
        comparison: Comparison,
        record: Callable[[int, Callable[[], Any]], Any] = lambda _, run: run(),
    ) -> None:
        """Trace a block of iterations."""
        with self.rehearsal.steps(restore=not self.settings.exit_after):
            self.rehearsal.equal_start(StartValues(comparison.reference, block.first))
            self.rehearsal.afterwards(statistics.zero_gradients, self.model.chunks)
            statistics.leave_gradients(self.model.chunks, self.model.optimizer)
            layout = layout_of(self.model, self.args, self._scale_loss(block.first))
            self.rehearsal.serve(block.served)
            for iteration in block.iterations:
                step = functools.partial(record, iteration, block.run)
                batches = block.batches(iteration)
                numbers = self._microbatch_numbers(comparison.reference, iteration, batches)
                if iteration == self.settings.iterations[0] and numbers[:1] == [0]:
                    self._recording.factor = layout.gradient_factor * layout.loss_scale
                with comparison.step(iteration, layout) as sink:
                    counted = self.rehearsal.trace(step, sink, numbers, iteration, batches)
                    comparison.counted.append(counted)
            for remark in self.rehearsal.remarks:
                self._notice(remark)

    def _microbatch_numbers(
        self, reference: TraceReader, iteration: int, batches: Sequence[Batch]
    ) -> list[int]:
        """The reference's numbers of batches; ranks without data get them from ranks with data."""
        dp, dp_rank = self.model.mesh.size("dp"), self.model.mesh.at("dp")

        def matched() -> list[Any]:
            numbers = match(batches, reference, iteration, dp, dp_rank) if batches else None
            return [dp_rank, numbers]

        for rank, numbers in self.ranks.exchange("matching microbatches", matched):
            if rank == dp_rank and numbers is not None:
                return numbers  # type: ignore[no-any-return]
        return [local * dp + dp_rank for local in range(fronts.current().microbatches())]

    def _warm_up(self, block: Block) -> None:
        """Make one step that is not traced, so that the traced one has others before it.

        What a step leaves behind besides the training state, which is restored, shows in the
        traced one: flags, caches, copies that were allocated. And in the first step of a run
        Megatron overlaps neither gathers of parameters (``train`` in
        megatron/training/training.py) nor reductions of gradients, whose order it learns
        (``is_first_batch`` in megatron/core/distributed/param_and_grad_buffer.py).
        """
        with self.rehearsal.steps(restore=True), gathering.in_forward_passes(self.model.chunks):
            # Own values and other batches, not the traced ones: what is kept would be right.
            if not all(self.ranks.exchange("warming up", self._is_initialised)):
                self._await_reference()
                self.rehearsal.equal_start(StartValues(self.comparison.reference, block.first))
            self.rehearsal.serve(block.served, later=True)
            self.ranks.meet("warming up")
            self.rehearsal.step(block.run)
            self.ranks.meet("warming up")

    def _is_initialised(self) -> bool:
        """Whether all parameters have values of the run's own."""
        is_finite = not any(values.moments.nonfinite for values in self._initial)
        return self.is_loaded or (bool(self._initial) and is_finite)

    def _scale_loss(self, iteration: int) -> float:
        """Use a loss scale with which the reference does not overflow; returns the ratio of both.

        The notice is for a scale that was lowered: what the candidate's own would do is unchecked.
        """
        reference_scale = self.comparison.reference.reference.loss_scales.get(str(iteration))
        job_scale = loss_scale.get(self.model.optimizer)
        if reference_scale is None or job_scale is None:
            return 1.0
        factor = gradient_factor(self.args, self.model.mesh)
        scale = loss_scale.of_candidate(reference_scale, factor)
        loss_scale.put(self.model.optimizer, scale)
        if reference_scale < job_scale:
            self._notice(
                f"the loss scale {job_scale:.12g} overflows in the reference as well: "
                f"the traced step uses {reference_scale:g}"
            )
        return scale / reference_scale

    def _order_reference(self, started: Started | None) -> None:
        """Begin to find or make it (:func:`launch.order`)."""
        self._started, self._ordered = started, time.monotonic()
        if self.ranks.rank == 0:
            self._reference = launch.order(self.args, self.settings, started)

    def _await_reference(self) -> None:
        """Wait for what was ordered, unless that was done before."""
        if self._comparison is not None:
            return
        began = time.monotonic()
        reference = self._early() or self._complete()
        mapped.survive()
        self._comparison = Comparison(
            reference,
            TraceWriter(self.settings.directory / "candidate", dist.get_rank(), self.budget),
            budget=self.budget,
            keep_all=self.settings.saves_candidate,
            isolate=requirements.isolates(self.args, self.settings),
            same_code=self.settings.same_code,
            gradients=kept_in(self.args),
        )
        if self.ranks.rank == 0:
            launch.say_next(reference.reference)
        if layout := reference_layout.decoded(reference.reference.layout):
            self._notice(reference_layout.notice(layout, self.args))
        if unseen := routing.unseen(reference):
            self._notice(
                f"{unseen[0]}: experts are chosen by code that does not ask for a replayed choice, "
                "so where scores are equal within rounding another one may be right: in case of "
                "doubt check in float32"
            )
        self._timings["reference"] = time.monotonic() - self._ordered
        self._waited = time.monotonic() - began

    def _early(self) -> TraceReader | None:
        """A reference whose tensors are there, but which is not replayed yet; if all can read it.

        It moves to its place when it is complete, maybe before a rank has opened it.
        """

        def announced() -> str:
            is_usable = not (self.is_loaded or self.settings.saves_candidate)
            return self._reference.announced() if is_usable else ""

        if not (directory := self.ranks.from_one(0, "the reference run", announced)):
            return None
        early: TraceReader | None = None
        with contextlib.suppress(OSError, TTraceError):
            early = TraceReader.early(Path(directory), self.budget)
        everywhere = self.ranks.exchange("opening the reference", lambda: early is not None)
        return early if all(everywhere) else None

    def _complete(self) -> TraceReader:
        """The complete reference, which is waited for: opened, or the one that was read early."""
        directory, checksum = self.ranks.from_one(
            0, "the reference run", lambda: self._reference.complete()
        )
        if self._comparison is None:
            return TraceReader(Path(directory), announced=checksum, budget=self.budget)
        self.comparison.complete(Path(directory), checksum)
        return self.comparison.reference

    def _separate(self, keys: Sequence[TraceKey]) -> dict[TraceKey, list[Share]]:
        """The losses' shares of gradients of the reference."""
        reference = self.comparison.reference
        separation = Separation(
            reference=str(reference.directory.resolve()),
            checksum=reference.checksum,
            keys=tuple(keys),
            losses=losses.present(self.args),
            isolated=requirements.isolates(self.args, self.settings),
        )
        with launch.replayed(
            self.args, self.settings, self._started, reference.reference, separation
        ) as directory:
            return separation.read(directory)

    def _notice(self, text: str) -> None:
        if text in self._notices:
            return
        self._notices.append(text)
        _say(text)

    def _conclude(self, rehearse: Callable[[Comparison], None]) -> ExitCode:
        """Collect all ranks' findings and report them from the last rank.

        Megatron keeps its W&B and TensorBoard writers there. Where the answer leaves doubt, and
        training goes on, modules are isolated at once, before the report is written. ``rehearse``
        traces the last block once more.
        """
        last = dist.get_world_size() - 1
        reference = self.comparison.reference.reference
        failed = self._failing(self.comparison)
        # Where nothing fails nobody looks for its place; but the answer can have other reasons.
        with_code = bool(failed) or self.settings.saves_candidate
        answers: list[Answer] = []  # at most one; none on other ranks

        def judge() -> list[bool]:
            answers[:] = [self._answer(self.comparison, findings, self.settings)]
            summary = answers[0].summary
            return [summary.verdict is Result.DIVERGED, summary.leaves_doubt]

        def write() -> int:
            publish(answers[0], self.settings)
            return answers[0].summary.verdict.exit_code

        ledger = self._recording.message(reference, with_code=with_code)
        findings = self._findings(self.comparison, failed, ledger)
        diverged, doubt = self.ranks.from_one(last, "judging", judge)
        if diverged and not with_code:
            ledger = self._recording.message(reference, with_code=True)
            findings = self._findings(self.comparison, failed, ledger)
            self.ranks.from_one(last, "judging", judge)
        # A launcher that waits for the end of this job makes another one.
        if doubt and not self.settings.exit_after and len(self.traced) == 1:
            try:
                self._isolate(rehearse, ledger, answers)
            except EndError:
                raise
            except Exception as error:
                given_up = self.ranks.give_up(error, "checking with modules isolated")
                self.judged = True
                if answers:
                    write()
                raise given_up from error
        code = ExitCode(self.ranks.from_one(last, "writing the report", write))
        if self.settings.keep is Keep.NONE and dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                cleaning.remove_tensors(self.settings.directory, own=not self.settings.reference)
        return code

    def _isolate(
        self, rehearse: Callable[[Comparison], None], ledger: Any, answers: list[Answer]
    ) -> None:
        """Check again with modules isolated, and add to the answer what fails on its own."""
        if dist.get_rank() == 0:
            say("not every cause is known: checking with modules isolated")
        began = time.monotonic()
        folder = self.settings.directory / shared.ISOLATED
        settings = dataclasses.replace(self.settings, isolate=True, directory=folder)

        def prepare() -> Comparison:
            owned.make(folder)
            writer = TraceWriter(folder / "candidate", dist.get_rank(), self.budget)
            comparison = self.comparison.isolated(writer)
            comparison.initial(self.settings.iterations[0], self._initial)
            return comparison

        # All ranks rehearse or none: the end of a rehearsal waits for all.
        comparison = self.ranks.together("checking with modules isolated", prepare)
        rehearse(comparison)
        findings = self._findings(comparison, self._failing(comparison), ledger)

        def judge() -> None:
            alone = self._answer(comparison, findings, settings).summary
            spent = {"isolated": time.monotonic() - began}
            answers[0] = answers[0].settled(alone, spent)
            owned.discard(folder)

        self.ranks.from_one(dist.get_world_size() - 1, "judging with modules isolated", judge)

    def _answer(
        self, comparison: Comparison, findings: dict[str, Any] | None, settings: Settings
    ) -> Answer:
        assert findings is not None, "the last rank has them"
        # A second rehearsal, which only adds notices, does not replay the reference again.
        replays = comparison is self.comparison and losses.present(self.args)
        answered = answer.answer(
            comparison,
            findings,
            model=self.model,
            args=self.args,
            settings=settings,
            timings=self._timings,
            notices=self._notices,
            edits=self._edits,
            separate=self._separate if replays else None,
        )
        mapped.require_whole()
        return answered

    def _failing(self, comparison: Comparison) -> frozenset[int]:
        """The tensors that fail on any rank, by number."""
        return frozenset(answer.failing(comparison, self.ranks))

    def _findings(
        self, comparison: Comparison, failed: frozenset[int], ledger: Any
    ) -> dict[str, Any] | None:
        """The findings of all ranks, on the last one."""
        began = time.monotonic()
        findings = self.ranks.collect(
            "collecting the measurements",
            lambda: answer.findings_of(dist.get_rank(), self.model.mesh, comparison, ledger),
            lambda parts: answer.merged(parts, failed, comparison, self.args),
        )
        self._timings["gather"] = time.monotonic() - began
        return findings
