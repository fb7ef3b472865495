# SPDX-License-Identifier: Apache-2.0
"""The candidate's side: find a reference, compare every rank in place, judge, report."""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.capture.batches import Served
from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.exactness import Arithmetic
from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.planning import Layout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.tokens import match
from megatron_ttrace.compare.wire import decode, encode
from megatron_ttrace.errors import ExitCode, TTraceError
from megatron_ttrace.mcore import fingerprint, provenance, quiet
from megatron_ttrace.mcore.summands import summands
from megatron_ttrace.runtime import launch, low_precision
from megatron_ttrace.runtime.agreement import Ranks
from megatron_ttrace.runtime.conclusion import conclude
from megatron_ttrace.runtime.session import Session
from megatron_ttrace.runtime.start import handoff
from megatron_ttrace.trace import shared
from megatron_ttrace.trace.captured import Batch
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, Summary, TraceKey, Verdict
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal


class CandidateSession(Session):
    """Checks the run it is part of."""

    def __init__(self, args: Any, settings: Any, ranks: Ranks) -> None:
        super().__init__(args, settings, ranks)
        self._reference: TraceReader | None = None
        self._tolerances: tolerance.Tolerances | None = None
        self._writer: TraceWriter | None = None
        self._measured: list[Measured] = []
        self._timings: dict[str, float] = {}
        self._notices: list[str] = []
        if quiet.has_dropout(args) and dist.get_rank() == 0:
            print("ttrace: dropout is switched off in the traced steps", flush=True)
        self._isolates = settings.isolate or low_precision.is_isolated(args)
        if self._isolates and not settings.isolate:
            self._notice(low_precision.NOTICE)
        if settings.reference is not None and settings.allow_other_megatron:
            self._notice("the reference may have been made by another Megatron")
        if settings.role == "candidate" and args.rampup_batch_size and settings.iterations != (1,):
            raise TTraceError("--rampup-batch-size: only --ttrace-iterations 1 can be traced")
        if getattr(args, "use_torch_fsdp2", False):
            raise TTraceError(
                "--use-torch-fsdp2: its sharded weights are not captured; check the same job with "
                "--use-megatron-fsdp or --use-distributed-optimizer"
            )
        if getattr(args, "use_megatron_fsdp", False) and _loads(args):
            raise TTraceError("--use-megatron-fsdp with --load: a loaded start is not handed over")
        shared.require(settings.directory, self._agree(self._prepare_directory))
        if not _loads(args):
            # Before the model is built: on a GPU the reference needs the memory.
            self._find_reference(None)

    def begin(self, chunks: list[torch.nn.Module], optimizer: Any, scheduler: Any) -> None:
        """A run that starts from a checkpoint hands its state to the reference first."""
        super().begin(chunks, optimizer, scheduler)
        for name in (name for names in self.model.names for name in names.unused):
            self._notice(f"{name} of the last stage is in no computation: not traced")
        if self._reference is None:
            self._find_reference(self._hand_over(scheduler))
        if self.not_initial:
            self._notice(self.not_initial)
        self._measure_initial()

    @property
    def is_loaded(self) -> bool:
        """Whether this run starts from a checkpoint."""
        return _loads(self.args)

    def _measure_initial(self) -> None:
        """Initial values belong to the run; they are told with the first traced iteration."""
        assert self._writer is not None
        for one in self.initial:
            key = TraceKey(self.settings.iterations[0], STEP_LEVEL, Kind.INITIAL, one.name)
            where = one.placement, one.boxes, one.logical_shape
            self._measured.append(Measured(key, *where, None, moments=one.moments))
            if self.settings.save_candidate:
                entry = Entry(
                    key,
                    one.logical_shape,
                    one.dtype,
                    logical_shape=one.logical_shape,
                    placement=one.placement,
                    boxes=one.boxes,
                    sums=dataclasses.astuple(one.moments),
                )
                self._writer.add(entry, None)

    def _hand_over(self, scheduler: Any) -> dict[str, Any]:
        directory = self.settings.directory / "start"
        told = "handing over the loaded state"
        self.ranks.from_one(0, told, lambda: shutil.rmtree(directory, ignore_errors=True))
        digests = self.ranks.exchange(
            told, lambda: handoff.write(self.model, directory), self.device
        )
        self.start, self.start_step = directory, handoff.steps_of(self.model)
        started = {
            "directory": str(directory.resolve()),
            "step": self.start_step,
            "iteration": self.args.iteration,
            "consumed_train_samples": self.args.consumed_train_samples,
            "schedule": scheduler.num_steps,
            "content": fingerprint.digest({"ranks": digests}),
        }
        self.ranks.from_one(0, told, lambda: seal(directory, {"role": "start", **started}))
        return started

    def traces(self, step: int) -> bool:
        """Whether a block of traced iterations starts with this step."""
        return any(block[0] == step for block in self.blocks())

    def before_step(self, step: int, run: Callable[[], Any], iterator: Any) -> int | None:
        """Rehearse the block of traced iterations that starts with this step, if one does."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        block = next(block for block in self.blocks() if block[0] == step)
        began = time.monotonic()
        count = get_num_microbatches()
        served = Served(iterator, count * len(block))
        try:
            self.ranks.together("fetching the batches")
            if step == 1 and self.args.overlap_grad_reduce:
                self._warm_up(run, served)
            with self.rehearsal(restore=not self.settings.exit_after):
                self.equal_start()
                self.serve(served)
                for position, iteration in enumerate(block):
                    batches = served.batches[position * count : (position + 1) * count]
                    self._check(iteration, run, batches, count)
        finally:
            served.serve()
        self._timings["traced steps"] = time.monotonic() - began
        if block[-1] != self.settings.iterations[-1]:
            return None
        self.finished = True
        return int(self._conclude())

    def _warm_up(self, run: Callable[[], Any], served: Served) -> None:
        """Make one step that nobody looks at.

        In the first one Megatron learns in which order gradients become ready, and reduces them
        all at the end (``is_first_batch`` in megatron/core/distributed/param_and_grad_buffer.py).
        What runs in a whole training, and what can go wrong in it, begins with the second.
        """
        with self.rehearsal(restore=True):
            self.serve(served)
            self.ranks.together("warming up")
            self.step(run)
            self.ranks.together("warming up")

    def _check(
        self, iteration: int, run: Callable[[], Any], batches: list[Batch], count: int
    ) -> None:
        assert self._reference is not None
        mesh = self.model.mesh
        args = self.args
        sink = CompareSink(
            self._reference,
            iteration,
            Layout(
                mesh,
                args.seq_length,
                self.model.gated,
                self._gradient_factor(),
                frozenset(
                    name
                    for names in self.model.names
                    for name, module in names.modules.items()
                    if getattr(module, "reduce_scatter_embeddings", False)
                    # What contains it has that attribute too, and turns nothing.
                    and hasattr(module, "vocab_start_index")
                ),
                self._dispatcher(),
                summands(self.model.names),
            ),
            tolerances=self._tolerances,
            writer=self._writer,
            keep_all=self.settings.save_candidate,
            isolate=self._isolates,
        )
        numbers = self._numbers(iteration, batches, count)
        for number, batch in zip(numbers, batches, strict=False):
            for name, value in batch.items():
                sink.placed((number, Kind.TOKENS, name, 0), value, value.shape, ())
        self.rehearse(run, sink, numbers)
        self._measured += sink.measured

    def _gradient_factor(self) -> float:
        """Each microbatch's loss is divided by the number of microbatches of *its* rank."""
        if self.args.calculate_per_token_loss:
            return 1.0
        return float(self.model.mesh.size("dp") * self.model.mesh.size("cp"))

    def _numbers(self, iteration: int, batches: list[Batch], count: int) -> list[int]:
        """The reference's microbatch numbers; ranks without data hear them from those with."""
        reference = self._reference
        assert reference is not None
        mesh = self.model.mesh
        dp, dp_rank = mesh.size("dp"), mesh.at("dp")

        def matched() -> list[Any]:
            mine = match(batches, reference, iteration, dp, dp_rank) if batches else None
            return [dp_rank, mine]

        heard = self.ranks.exchange("matching microbatches", matched, self.device)
        known = [numbers for rank, numbers in heard if rank == dp_rank and numbers is not None]
        return known[0] if known else [local * dp + dp_rank for local in range(count)]

    def _prepare_directory(self) -> str:
        return shared.prepare(self.settings.directory)

    def _find_reference(self, started: dict[str, Any] | None) -> None:
        began = time.monotonic()
        directory, checksum = self._agree(
            lambda: launch.ensure(self.args, self.settings, started=started),
            "the reference run",
        )
        self._reference = TraceReader(Path(directory), announced=checksum)
        self._tolerances = tolerance.of_reference(self._reference)
        self._timings["reference"] = time.monotonic() - began
        self._writer = TraceWriter(self.settings.directory / "candidate", dist.get_rank())
        self.ranks.together("reading the reference")

    def _agree(self, work: Callable[[], Any], what: str = "preparing the check") -> Any:
        """Do something on rank 0; all ranks get its result, a JSON value, or give up."""
        return self.ranks.from_one(0, what, work)

    def _notice(self, text: str) -> None:
        self._notices.append(text)
        if dist.get_rank() == 0:
            print(f"ttrace: {text}", flush=True)

    def _conclude(self) -> ExitCode:
        """Bring everybody's findings together and report; the last rank does what one must do.

        The last rank is where Megatron keeps its W&B and TensorBoard writers.
        """
        began = time.monotonic()
        heard = self.ranks.exchange("handing over what was measured", self._findings, self.device)
        self._timings["gather"] = time.monotonic() - began
        last = dist.get_world_size() - 1
        return ExitCode(
            self.ranks.from_one(last, "writing the report", lambda: self._report(heard))
        )

    def _findings(self) -> list[Any]:
        assert self._writer is not None
        if self.settings.save_candidate or len(self._writer):
            self._writer.close()
        return [dataclasses.asdict(self.model.mesh), encode(self._measured)]

    def _report(self, heard: list[Any]) -> int:
        summary, verdicts = self._answer(heard)
        self._publish(summary, verdicts)
        return int(summary.verdict.exit_code)

    def _answer(self, heard: list[Any]) -> tuple[Summary, list[Verdict]]:
        assert self._reference is not None
        assert self._tolerances is not None
        directory = self.settings.directory / "candidate"
        config = self._config()
        if any(directory.glob("*.index.jsonl")):
            seal(
                directory,
                {
                    "role": "candidate",
                    "complete": self.settings.save_candidate,
                    "meshes": [mesh for mesh, _ in heard],
                    "config": config,
                },
            )
        summary, verdicts = conclude(
            self._reference,
            self._tolerances,
            {rank: decode(message) for rank, (_, message) in enumerate(heard)},
            candidate=directory,
            mesh=self.model.mesh,
            config=config,
            timings=self._timings,
            notices=self._notices,
            allow_unchecked=self.settings.allow_unchecked,
        )
        return dataclasses.replace(summary, run=provenance.collect(self.args)), verdicts

    def _config(self) -> dict[str, Any]:
        args = self.args
        return {
            **self.model.mesh.describe(),
            "sequence_parallel": bool(args.sequence_parallel),
            "distributed_optimizer": bool(args.use_distributed_optimizer),
            "dtype": "bf16" if args.bf16 else str(args.params_dtype).removeprefix("torch."),
            "layers": args.num_layers,
            "hidden": args.hidden_size,
            "seq_length": args.seq_length,
            "dispatcher": self._dispatcher(),
            "iterations": list(self.settings.iterations),
            "isolate": self._isolates,
            "init": self.settings.init,
            "reference": str(self.settings.directory / "reference"),
            "arithmetic": self._arithmetic().to_json(),
            "requested": Requested.of(args, self.model.chunks).to_json(),
        }

    def _arithmetic(self) -> Arithmetic:
        args, mesh = self.args, self.model.mesh
        return Arithmetic(
            splits_sums=tuple(axis for axis in ("tp", "cp", "ep", "etp") if mesh.size(axis) > 1),
            pp=mesh.size("pp"),
            dp=mesh.size("dp"),
            shared_embedding=not args.untie_embeddings_and_output_weights
            or bool(getattr(args, "mtp_num_layers", None)),
            clips=bool(args.clip_grad),
            per_rank_state=bool(getattr(args, "fp8", None)) or bool(args.num_experts),
            gradient_factor=self._gradient_factor(),
            deterministic=self.device.type == "cpu"
            or bool(getattr(args, "deterministic_mode", False)),
            same_code=not (self.settings.reference_args or self.settings.allow_other_megatron),
        )

    def _dispatcher(self) -> str:
        """How tokens reach their experts; empty without experts."""
        return str(self.args.moe_token_dispatcher_type) if self.args.num_experts else ""

    def _publish(self, summary: Summary, verdicts: list[Verdict]) -> None:
        from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

        from megatron_ttrace.report import publish

        wandb = get_wandb_writer()
        publish(
            summary,
            verdicts,
            self.settings.directory,
            wandb_run=getattr(wandb, "run", None),
            tensorboard=get_tensorboard_writer(),
            wandb=self.settings.wandb,
        )


def _loads(args: Any) -> bool:
    """Whether this run starts from a checkpoint."""
    from megatron.training.checkpointing import checkpoint_exists

    paths = (args.load, getattr(args, "pretrained_checkpoint", None))
    return any(path is not None and checkpoint_exists(path) for path in paths)
