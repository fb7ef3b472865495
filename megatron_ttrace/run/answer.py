# SPDX-License-Identifier: Apache-2.0
"""The answer of a running job, concluded from all ranks' findings."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

from megatron_ttrace import cpu
from megatron_ttrace.capture.dropouts import runs_whole
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.compare import gathered, wire
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.exactness import Arithmetic
from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.cpu import te
from megatron_ttrace.cpu.arguments import switched_off
from megatron_ttrace.jobs import known_faults, provenance
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import (
    balancing,
    fronts,
    losses,
    own_shards,
    quiet,
    samples,
    statistics,
)
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.groups import device_of
from megatron_ttrace.mcore.sharded_weights import SHARDS_OF_WEIGHTS
from megatron_ttrace.mcore.versions import megatron_core_version
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.run import recording
from megatron_ttrace.run.agreement import Ranks
from megatron_ttrace.run.comparison import Comparison, dispatcher, gradient_factor
from megatron_ttrace.run.requirements import growing_batch, isolates
from megatron_ttrace.saved.conclusion import Answer, conclude
from megatron_ttrace.trace import codec, counted, folded
from megatron_ttrace.trace.captured import Separate
from megatron_ttrace.trace.executed import Edits
from megatron_ttrace.trace.meta import CandidateMeta
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.store import seal

_KNOWN = "a known fault in Megatron affects jobs with these options (there may be others)"


def failing(comparison: Comparison, ranks: Ranks) -> list[int]:
    """The tensors that fail on any rank: a collective. Raises as :meth:`Ranks.reduce`."""
    return ranks.reduce(
        "collecting what fails",
        lambda: gathered.failing(comparison.findings(), comparison.tolerances),
        lambda parts: sorted({number for numbers in parts for number in numbers}),
    )


def findings_of(rank: int, mesh: Mesh, comparison: Comparison, recorded: Any) -> dict[str, Any]:
    """What one rank sends to the one that judges, as JSON; ``recorded`` is its ledger."""
    counts = [counted.compact(step) for step in comparison.counted]
    measured = wire.encode(gathered.of_rank(rank, comparison.findings()))
    record = [list(dataclasses.astuple(mesh)), counts, recorded]
    return {"held": measured, "each": folded.fold({rank: record})}


def merged(
    findings: Sequence[dict[str, Any]],
    failed: Collection[int],
    comparison: Comparison,
    args: MegatronArguments,
) -> dict[str, Any]:
    """The findings of several ranks in fewer records.

    Raises:
        CodecError: on a foreign message.
    """
    measured = gathered.merge(
        (tensor for message in findings for tensor in wire.decode(message["held"])),
        comparison.tolerances,
        failed,
        own_shards.depends_on_layout(args)[0],
    )
    records = folded.merge(message["each"] for message in findings)
    return {"held": wire.encode(measured), "each": records}


def answer(
    comparison: Comparison,
    findings: dict[str, Any],
    *,
    model: TracedModel,
    args: MegatronArguments,
    settings: Settings,
    timings: dict[str, float],
    notices: Sequence[str],
    edits: Edits,
    separate: Separate | None,
) -> Answer:
    """Conclude, on one rank.

    ``findings`` are those of all ranks (:func:`merged`). ``separate`` finds the losses' shares of
    gradients. ``edits`` is what the user changed in Megatron.
    """
    config = config_of(model, args, settings)
    directory = settings.directory / "candidate"
    records, once = folded.unfold(findings["each"]), folded.Once()
    meshes = [codec.decode_list(Mesh, mesh) for mesh, *_ in records.values()]
    counts = {
        rank: tuple(counted.expanded(step, once) for step in steps)
        for rank, (_, steps, _) in records.items()
    }
    recorded = [message for *_, message in records.values()]
    reference = comparison.reference
    ledger, ledger_notices = recording.merged(meshes, recorded, args, once, reference)
    if any(directory.glob("*.index.jsonl")):
        is_complete = settings.saves_candidate
        meta = CandidateMeta(
            complete=is_complete,
            meshes=tuple(meshes),
            counted=tuple(map(counted.encode, counts.values())) if is_complete else (),
            config=config.on(model.mesh),
            ledger=ledger,
        )
        seal(directory, meta.to_json())
    summary, verdicts = conclude(
        comparison.reference,
        comparison.tolerances,
        wire.decode(findings["held"]),
        candidate=directory,
        counts=counts,
        mesh=model.mesh,
        config=config,
        timings=timings,
        notices=[*notices, *ledger_notices],
        allow_unchecked=settings.allow_unchecked,
        ledger=ledger,
        changed=recording.changed(edits, recorded, once),
        separate=separate,
    )
    if summary.verdict is Result.DIVERGED:
        idle = {part.what for part in summary.not_exercised}
        heading = known_faults.finding_of(vars(args), megatron_core_version(), idle)
        notice = [f"{_KNOWN}: {heading} (docs/findings.md)"] if heading else []
        summary = dataclasses.replace(
            summary, notices=(*summary.notices, *notice), known_fault=heading
        )
    return Answer(dataclasses.replace(summary, run=provenance.collect(args)), verdicts, ledger)


def config_of(model: TracedModel, args: MegatronArguments, settings: Settings) -> RunConfig:
    """The candidate's configuration, for the report and for ``ttrace compare``."""
    return RunConfig(
        sequence_parallel=bool(args.sequence_parallel),
        distributed_optimizer=bool(args.use_distributed_optimizer),
        dtype="bf16" if args.bf16 else str(args.params_dtype).removeprefix("torch."),
        layers=args.num_layers,
        hidden=args.hidden_size,
        seq_length=args.seq_length,
        weight_shards=max(getattr(args, name, 1) for name in SHARDS_OF_WEIGHTS),
        recomputes=bool(getattr(args, "recompute_granularity", None)),
        dispatcher=dispatcher(model.names, args),
        own_tokens=tuple(balancing.depends_on_layout(args)),
        own_shards=own_shards.depends_on_layout(args)[0],
        iterations=tuple(settings.iterations),
        isolate=isolates(args, settings),
        logs=fronts.current().logs,
        follows_dropout=cpu.active() and runs_whole(model.names),
        init=settings.init,
        reference=str(settings.directory / "reference"),
        arithmetic=_arithmetic(model, args, settings),
        requested=requested(args, model.chunks),
    )


def _arithmetic(model: TracedModel, args: MegatronArguments, settings: Settings) -> Arithmetic:
    mesh = model.mesh
    device = device_of(model.chunks)
    return Arithmetic(
        splits_sums=tuple(axis for axis in ("tp", "cp", "ep", "etp") if mesh.size(axis) > 1),
        pp=mesh.size("pp"),
        dp=mesh.size("dp"),
        shared_embedding=not args.untie_embeddings_and_output_weights
        or bool(getattr(args, "mtp_num_layers", None)),
        clips=bool(args.clip_grad),
        per_rank_state=bool(getattr(args, "fp8", None)) or bool(args.num_experts),
        gradient_factor=gradient_factor(args, mesh),
        deterministic=device.type == "cpu" or bool(getattr(args, "deterministic_mode", False)),
        same_code=settings.same_code
        # A reference on several ranks adds up in an order of its own.
        and settings.reference_layout is None,
    )


def requested(args: Any, chunks: Sequence[Any]) -> Requested:
    """What Megatron's validated arguments ask of this rank's model chunks."""
    window = getattr(args, "window_size", None)
    sparse = losses.has_sparse_attention(args)
    return Requested(
        dropout=quiet.has_dropout(args),
        random_routing=quiet.has_random_routing(args),
        mlp_chunks=quiet.has_mlp_chunks(args),
        scales_loss=bool(getattr(args, "fp16", False)),
        hidden_loss=losses.hidden(args),
        fp8_weights=bool(getattr(args, "fp8_param_gather", False)) and te.emulated(),
        switched_off=switched_off(),
        clip=float(args.clip_grad or 0.0),
        masks_ends=bool(getattr(args, "eod_mask_loss", False)),
        resets_positions=any(
            getattr(args, name, False) for name in ("reset_position_ids", *samples.PACKING)
        ),
        resets_attention=bool(getattr(args, "reset_attention_mask", False)),
        per_token_loss=bool(args.calculate_per_token_loss),
        seq_length=int(args.seq_length),
        # A model of Megatron-Bridge's may have one number.
        window=max(0, int(window if isinstance(window, int) else window[0])) if window else 0,
        sparse=int(getattr(args, "dsa_indexer_topk", None) or 0) if sparse else 0,
        drops_tokens=getattr(args, "moe_expert_capacity_factor", None) is not None,
        sharded_optimizer=bool(args.use_distributed_optimizer),
        overlap=bool(args.overlap_grad_reduce or getattr(args, "overlap_param_gather", False)),
        buckets=sum(len(statistics.bucket_groups(chunk)) for chunk in chunks),
        final_batch=growing_batch(args)[1],
        micro_batch=int(args.micro_batch_size),
    )
