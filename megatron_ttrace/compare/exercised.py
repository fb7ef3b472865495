# SPDX-License-Identifier: Apache-2.0
"""What of a configuration did not act in the traced steps.

A clip above every norm, a mask that masks nothing, an expert without tokens: such a feature passes
whether it is right or wrong. What was asked for comes from the candidate's arguments
(:class:`Requested`), what happened from the reference's trace (:class:`Observed`), so that a saved
candidate is judged like a running one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from megatron_ttrace.compare.tokens import PRIMARY
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.codec import Record
from megatron_ttrace.trace.records import (
    CHOICE,
    SCORES,
    Direction,
    Kind,
    Outcome,
    TraceKey,
    Verdict,
)
from megatron_ttrace.trace.store import TraceReader
from megatron_ttrace.trace.unexercised import NotExercised, Unexercised

TOLD_SHARE = 0.01
"""Above this share of unchecked tensors it is said."""

_PLAIN = frozenset(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
"""What Megatron's GPT data set serves; others may say in other fields where documents end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requested(Record):
    """Features that the job's arguments ask for; those that are not given are off.

    Attributes:
        dropout: any dropout.
        clip: largest gradient norm, 0 without clipping.
        masks_ends: ``--eod-mask-loss``.
        resets_positions: ``--reset-position-ids``.
        resets_attention: ``--reset-attention-mask``.
        per_token_loss: ``--calculate-per-token-loss``.
        seq_length: tokens of a sample.
        window: how many keys to the left of itself a query sees, 0 without a window.
        sparse: how many keys sparse attention chooses, 0 without it.
        drops_tokens: experts have a capacity.
        sharded_optimizer: ``--use-distributed-optimizer``.
        overlap: communication of gradients or parameters overlaps with computation.
        buckets: gradient buckets of the rank that reports, 0 if unknown.
        final_batch: global batch size that ``--rampup-batch-size`` leads to, 0 without it.
        micro_batch: samples of a microbatch.
    """

    dropout: bool = False
    clip: float = 0.0
    masks_ends: bool = False
    resets_positions: bool = False
    resets_attention: bool = False
    per_token_loss: bool = False
    seq_length: int = 0
    window: int = 0
    sparse: int = 0
    drops_tokens: bool = False
    sharded_optimizer: bool = False
    overlap: bool = False
    buckets: int = 0
    final_batch: int = 0
    micro_batch: int = 0

    @classmethod
    def of(cls, args: Any, chunks: Sequence[Any] = ()) -> Self:
        """From Megatron's validated arguments and this rank's model chunks."""
        window = getattr(args, "window_size", None)
        sparse = getattr(args, "experimental_attention_variant", None) == "dsa"
        return cls(
            dropout=bool(args.hidden_dropout or args.attention_dropout),
            clip=float(args.clip_grad or 0.0),
            masks_ends=bool(args.eod_mask_loss),
            resets_positions=bool(args.reset_position_ids),
            resets_attention=bool(args.reset_attention_mask),
            per_token_loss=bool(args.calculate_per_token_loss),
            seq_length=int(args.seq_length),
            window=max(0, int(window[0])) if window else 0,
            sparse=int(getattr(args, "dsa_indexer_topk", None) or 0) if sparse else 0,
            drops_tokens=getattr(args, "moe_expert_capacity_factor", None) is not None,
            sharded_optimizer=bool(args.use_distributed_optimizer),
            overlap=bool(args.overlap_grad_reduce or getattr(args, "overlap_param_gather", False)),
            buckets=_buckets(chunks),
            final_batch=int(args.global_batch_size) if args.rampup_batch_size else 0,
            micro_batch=int(args.micro_batch_size),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What happened in the reference's traced steps; ``None`` where the trace does not say.

    Attributes:
        microbatches: of a traced step, over all ranks.
        same_batches: whether all microbatches of a step hold the same tokens.
        norms: the gradient norm of each traced step.
        masks_loss: whether any token is left out of the loss.
        restarts_positions: whether positions start anew within a sample.
        hides_documents: whether any query is kept from an earlier key of its sample.
        tokens: number of tokens in the loss, by microbatch.
        experts: number of experts, over all layers.
        idle: number of experts without a token, by router.
        dropped: choices of experts that their capacity did not admit.
        gradients: number of parameters that have a gradient.
        zero_gradients: those whose gradient is zero in every traced step.
        updates: whether any parameter changed.
    """

    microbatches: int = 0
    same_batches: bool = False
    norms: tuple[float, ...] = ()
    masks_loss: bool | None = None
    restarts_positions: bool | None = None
    hides_documents: bool | None = None
    tokens: tuple[int, ...] = ()
    experts: int = 0
    idle: Mapping[str, int] = dataclasses.field(default_factory=dict)
    dropped: int | None = None
    gradients: int = 0
    zero_gradients: tuple[str, ...] = ()
    updates: bool | None = None


def observe(reference: TraceReader, tolerances: Tolerances, requested: Requested) -> Observed:
    """Read from the reference's trace what :class:`Observed` holds, as far as it is asked for."""
    keys = list(reference)
    served = _Served(reference, [key for key in keys if key.kind is Kind.TOKENS])
    masks = requested.masks_ends or requested.per_token_loss
    tokens = [round(float(mask.float().sum())) for mask in served.named("loss_mask")] * masks
    sizes = [mask.numel() for mask in served.named("loss_mask")] * masks
    experts, idle, dropped = _routing(reference, [k for k in keys if k.kind is Kind.ROUTING])
    gradients = _zero_by_name(tolerances, (k for k in keys if k.kind is Kind.MAIN_GRAD))
    updates = _zero_by_name(tolerances, (k for k in keys if k.kind is Kind.PARAM_DELTA))
    return Observed(
        microbatches=len({key.microbatch for key in served.keys}),
        same_batches=_are_same(served.by_iteration(PRIMARY)),
        norms=tuple(
            float(reference.tensor(reference.entry(key)).double().sum())
            for key in keys
            if key.kind is Kind.GRAD_NORM
        ),
        masks_loss=tokens != sizes if tokens else None,
        restarts_positions=served.any("position_ids", _restarts)
        if requested.resets_positions
        else None,
        hides_documents=_hides(served) if requested.resets_attention else None,
        tokens=tuple(tokens),
        experts=experts,
        idle=idle,
        dropped=dropped,
        gradients=len(gradients),
        zero_gradients=tuple(name for name, zero in gradients.items() if zero),
        updates=not all(updates.values()) if updates else None,
    )


def unexercised(
    requested: Requested, observed: Observed, mesh: Mesh, verdicts: Iterable[Verdict] = ()
) -> tuple[NotExercised, ...]:
    """What did not act, in the order of :class:`~megatron_ttrace.trace.unexercised.Unexercised`."""
    found = [
        *_of_layout(requested, observed, mesh),
        *_of_batches(requested, observed),
        *_of_experts(requested, observed),
        *_of_update(requested, observed),
    ]
    unchecked, judged = share(verdicts)
    if unchecked > TOLD_SHARE * judged:
        found.append(NotExercised(Unexercised.UNCHECKED, unchecked, judged))
    order = list(Unexercised)
    return tuple(sorted(found, key=lambda one: order.index(one.what)))


def share(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """Number of unchecked tensors, and of all that the step computes.

    What a step starts from (tokens, parameters, initial values) is given, not computed: it counts
    in neither.
    """
    computed = [one for one in verdicts if one.direction is not Direction.START]
    return sum(one.verdict is Outcome.UNCHECKED for one in computed), len(computed)


def _of_layout(requested: Requested, observed: Observed, mesh: Mesh) -> Iterator[NotExercised]:
    dp = mesh.size("dp")
    if mesh.world_size == 1:
        yield NotExercised(Unexercised.ONE_RANK, 1)
        return
    # Megatron shards the optimizer over context-parallel ranks as well.
    replicas = dp * mesh.size("cp")
    if requested.sharded_optimizer and replicas == 1:
        yield NotExercised(Unexercised.SHARDED_OPTIMIZER, 1)
    # A later pipeline stage has one bucket on purpose: what it reports says nothing.
    if requested.overlap and replicas > 1 and mesh.size("pp") == 1 and requested.buckets == 1:
        yield NotExercised(Unexercised.BUCKETS, 1)
    if mesh.size("pp") > 1 and observed.microbatches == dp:
        yield NotExercised(Unexercised.SCHEDULE, 1, mesh.size("pp"))
    if observed.same_batches:
        yield NotExercised(Unexercised.DIFFERENT_DATA, observed.microbatches)


def _of_batches(requested: Requested, observed: Observed) -> Iterator[NotExercised]:
    if requested.masks_ends and observed.masks_loss is False:
        yield NotExercised(Unexercised.LOSS_MASK)
    if requested.resets_positions and observed.restarts_positions is False:
        yield NotExercised(Unexercised.POSITION_RESET)
    if requested.resets_attention and observed.hides_documents is False:
        yield NotExercised(Unexercised.ATTENTION_RESET)
    if requested.per_token_loss and len(observed.tokens) > 1 and len(set(observed.tokens)) == 1:
        yield NotExercised(Unexercised.TOKEN_WEIGHTS, observed.tokens[0])
    if requested.window and requested.window >= requested.seq_length - 1:
        yield NotExercised(Unexercised.WINDOW, requested.window, requested.seq_length)
    if requested.sparse and requested.sparse >= requested.seq_length:
        yield NotExercised(Unexercised.SPARSE_ATTENTION, requested.sparse, requested.seq_length)
    reached = observed.microbatches * requested.micro_batch
    if 0 < reached < requested.final_batch:
        yield NotExercised(Unexercised.RAMP_UP, reached, requested.final_batch)
    if requested.dropout:
        yield NotExercised(Unexercised.DROPOUT)


def _of_experts(requested: Requested, observed: Observed) -> Iterator[NotExercised]:
    idle = sum(observed.idle.values())
    if idle:
        layers = tuple(name for name, number in observed.idle.items() if number)
        yield NotExercised(Unexercised.IDLE_EXPERTS, idle, observed.experts, layers)
    if requested.drops_tokens and observed.dropped == 0:
        yield NotExercised(Unexercised.CAPACITY)


def _of_update(requested: Requested, observed: Observed) -> Iterator[NotExercised]:
    norm = max(observed.norms, default=math.inf)
    # A norm that is no number was neither within nor beyond the limit.
    finite = all(map(math.isfinite, observed.norms))
    if requested.clip and finite and norm <= requested.clip:
        yield NotExercised(Unexercised.CLIP, norm, requested.clip)
    if observed.zero_gradients:
        names = observed.zero_gradients
        yield NotExercised(Unexercised.GRADIENTS, len(names), observed.gradients, names)
    if observed.updates is False:
        yield NotExercised(Unexercised.UPDATE)


class _Served:
    """The reference's batches."""

    def __init__(self, reference: TraceReader, keys: Sequence[TraceKey]) -> None:
        self.keys = keys
        self._reference = reference

    def named(self, name: str) -> Iterator[torch.Tensor]:
        """One field of each microbatch that has it."""
        for key in self.keys:
            if key.name == name:
                yield self._reference.tensor(self._reference.entry(key))

    def by_iteration(self, name: str) -> dict[int, Iterator[torch.Tensor]]:
        """One field of each microbatch, by traced iteration."""
        return {
            iteration: _Served(
                self._reference, [key for key in self.keys if key.iteration == iteration]
            ).named(name)
            for iteration in dict.fromkeys(key.iteration for key in self.keys)
        }

    def any(self, name: str, acts: Any) -> bool | None:
        """Whether something acts in any microbatch; ``None`` where no batch has the field."""
        answer = None
        for field in self.named(name):
            if acts(field):
                return True
            answer = False
        return answer


def _are_same(steps: Mapping[int, Iterator[torch.Tensor]]) -> bool:
    """Whether the microbatches of every step are more than one, and the same."""
    for fields in steps.values():
        first = next(fields, None)
        second = next(fields, None)
        if first is None or second is None or not torch.equal(first, second):
            return False
        if not all(torch.equal(first, other) for other in fields):
            return False
    return bool(steps)


def _restarts(positions: torch.Tensor) -> bool:
    """Whether any step from one position ([..., sequence]) to the next is not one upwards."""
    return bool((positions.diff(dim=-1) != 1).any())


def _hides(served: _Served) -> bool | None:
    """Whether a mask ([..., query, key], true where nothing is seen) hides what came before."""
    names = {key.name for key in served.keys}
    if "attention_mask" not in names:
        return False if names and names <= _PLAIN else None
    square = [mask for mask in served.named("attention_mask") if _is_square(mask)]
    return any(bool(mask.bool().tril().any()) for mask in square) if square else None


def _is_square(mask: torch.Tensor) -> bool:
    return mask.ndim > 1 and mask.shape[-1] == mask.shape[-2] and mask.dtype == torch.bool


def _routing(
    reference: TraceReader, keys: Sequence[TraceKey]
) -> tuple[int, dict[str, int], int | None]:
    """Number of experts, how many of each router's got no token, and choices that were dropped."""
    counts: dict[str, torch.Tensor] = {}
    chosen = rows = 0
    followed = False
    routers = {key.name for key in keys if key.index == CHOICE}
    for key in keys:
        entry = reference.entry(key)
        if key.index == CHOICE:
            choice = reference.tensor(entry).flatten().long()
            experts = reference.entry(dataclasses.replace(key, index=SCORES)).shape[-1]
            found = torch.bincount(choice, minlength=experts)
            counts[key.name] = counts[key.name] + found if key.name in counts else found
            chosen += choice.numel()
        elif key.name not in routers:
            followed = True
            rows += entry.shape[0]
    idle = {name: int((found == 0).sum()) for name, found in counts.items()}
    total = sum(len(found) for found in counts.values())
    return total, idle, chosen - rows if followed and chosen else None


def _zero_by_name(tolerances: Tolerances, keys: Iterable[TraceKey]) -> dict[str, bool]:
    """Whether a tensor of the reference is zero in every traced step, by name."""
    zero: dict[str, bool] = {}
    for key in keys:
        zero[key.name] = zero.get(key.name, True) and tolerances.of(key).rms == 0.0
    return zero


def _buckets(chunks: Sequence[Any]) -> int:
    """Gradient buckets of Megatron's DistributedDataParallel; 0 for another wrapper."""
    return sum(
        len(getattr(chunk, "bucket_groups", ()))
        + len(getattr(chunk, "expert_parallel_bucket_groups", ()))
        for chunk in chunks
    )
