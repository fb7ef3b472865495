# SPDX-License-Identifier: Apache-2.0
"""The traced steps of a candidate on one rank, compared while they run."""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from megatron_ttrace.capture.experts import can_follow
from megatron_ttrace.capture.initial import Initial
from megatron_ttrace.capture.step import StepSink, TracedModel
from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.mcore import fronts
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.names import Names, are_own_experts
from megatron_ttrace.mcore.partials import partials
from megatron_ttrace.mcore.stacked import head_rows, stacked_outputs
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace import mapped
from megatron_ttrace.trace.budget import Budget, require_space
from megatron_ttrace.trace.counted import Counted
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter


@dataclasses.dataclass
class Comparison:
    """What one rank measures, from the first traced step to the last.

    A reference that is not complete yet has no tolerances: what differs waits for :meth:`complete`.
    Failed tensors are kept with ``writer``; with ``keep_all`` the others are kept, too. With
    ``isolate`` every module is given the reference's inputs. ``same_code``: as the reference's.
    ``gradients`` is the dtype of main gradients by the settings. ``budget`` bounds the memory.

    Raises:
        TTraceError: when all tensors are kept, and there is no room for them.
    """

    reference: TraceReader
    writer: TraceWriter
    keep_all: bool
    isolate: bool
    same_code: bool
    gradients: str
    budget: Budget
    _measured: list[Measured] = dataclasses.field(default_factory=list, init=False)
    _early: list[CompareSink] = dataclasses.field(default_factory=list, init=False)
    _tolerances: Tolerances | None = dataclasses.field(default=None, init=False)
    counted: list[Counted] = dataclasses.field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        if self.keep_all:
            # All ranks together keep each tensor of the reference at least once.
            space = self.reference.stored_bytes
            require_space(self.writer.directory, space, "the candidate's trace")
        if self.reference.is_complete:
            self._tolerances = tolerance.of_reference(self.reference)

    @property
    def tolerances(self) -> Tolerances:
        """The tolerances, once the reference is complete."""
        assert self._tolerances is not None, "the reference is not complete yet"
        return self._tolerances

    def complete(self, directory: Path, checksum: str) -> None:
        """Go on with the complete reference, which is now there.

        Raises:
            TTraceError: when it is damaged, or another one.
        """
        self.reference.complete(directory, checksum)
        self._tolerances = tolerance.of_reference(self.reference)
        for sink in self._early:
            sink.judge_by(self._tolerances)
            self._measured += sink.measured
        self._early.clear()

    def isolated(self, writer: TraceWriter) -> Self:
        """Another one, of isolated modules, with what was measured of the loaded state."""
        other = dataclasses.replace(self, writer=writer, keep_all=False, isolate=True)
        other._measured += (m for m in self.findings() if m.key.kind is Kind.LOADED)
        return other

    def initial(self, iteration: int, initial: Sequence[Initial]) -> None:
        """Record the initial values of the run, with the first traced iteration."""
        for values in initial:
            entry = entry_of(values, iteration)
            where = values.placement, values.boxes, values.logical_shape
            self._measured.append(Measured(entry.key, *where, None, moments=values.moments))
            if self.keep_all:
                self.writer.add(entry, None)

    @contextmanager
    def step(self, iteration: int, layout: RankLayout) -> Iterator[StepSink]:
        """Compare one traced step, which runs in this context and is captured into the sink."""
        sink = CompareSink(
            self.reference,
            iteration,
            layout,
            tolerances=self._tolerances,
            writer=self.writer,
            keep_all=self.keep_all,
            isolate=self.isolate,
            same_code=self.same_code,
            gradients=self.gradients,
            budget=self.budget,
            early=self._tolerances is None,
        )
        yield sink
        if self._tolerances is None:
            self._early.append(sink)
        else:
            self._measured += sink.measured

    def findings(self) -> list[Measured]:
        """Everything that was measured; closes the files.

        Raises:
            TTraceError: when the reference was truncated while it was read.
        """
        mapped.require_whole()
        if self.keep_all or len(self.writer):
            self.writer.close()
        return self._measured


def entry_of(initial: Initial, iteration: int) -> Entry:
    """The line of initial values in a rank's own trace."""
    return Entry(
        TraceKey(iteration, STEP_LEVEL, Kind.INITIAL, initial.name),
        initial.logical_shape,
        initial.dtype,
        logical_shape=initial.logical_shape,
        placement=initial.placement,
        boxes=initial.boxes,
        sums=dataclasses.astuple(initial.moments),
    )


def layout_of(model: TracedModel, args: MegatronArguments, scale: float = 1.0) -> RankLayout:
    """This rank's part of the model, as far as the comparison needs it.

    ``scale`` is the candidate's loss scale relative to the reference's.
    """
    return RankLayout(
        mesh=model.mesh,
        seq_length=args.seq_length,
        gradient_factor=gradient_factor(args, model.mesh),
        sequence_first=frozenset(
            name
            for names in model.names
            for name, module in names.modules.items()
            if getattr(module, "reduce_scatter_embeddings", False)
            # Modules that contain it have that attribute too, but do not transpose.
            and hasattr(module, "vocab_start_index")
        ),
        stacked=stacked_outputs(model.names),
        head_rows=head_rows(model.names),
        loss_scale=scale,
        dispatcher=dispatcher(model.names, args),
        partials=partials(model.names),
        bounds=fronts.current().bounds() if model.mesh.size("cp") > 1 else (),
    )


def gradient_factor(args: MegatronArguments, mesh: Mesh) -> float:
    """Each microbatch's loss is divided by the number of microbatches of *its* rank."""
    if args.calculate_per_token_loss:
        return 1.0
    return float(mesh.size("dp") * mesh.size("cp"))


def dispatcher(chunks: Iterable[Names], args: MegatronArguments) -> str:
    """How tokens reach their experts; empty without experts.

    By the option, or the class of a fork's own dispatcher, whatever option that stands for; a list
    of experts is a fork's own, too.
    """
    if not args.num_experts:
        return ""
    modules = [item for names in chunks for item in names.modules.items()]
    kinds = [getattr(each, "token_dispatcher", None) for _, each in modules if not can_follow(each)]
    own = [type(kind).__name__ for kind in kinds if kind is not None]
    own += [type(each).__name__ for name, each in modules if are_own_experts(name, each)]
    return next(iter(own), str(args.moe_token_dispatcher_type))
