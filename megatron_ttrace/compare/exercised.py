# SPDX-License-Identifier: Apache-2.0
"""Which features of a configuration had no effect in the traced steps.

Gradient clipping above every norm, a mask that masks nothing, an expert without tokens: such a
feature passes whether it is right or wrong. What happened follows from the reference's trace, so a
saved candidate is judged like a running one.
"""

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch

from megatron_ttrace.compare.tokens import PRIMARY
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.mcore.roles import selects_keys
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.codec import Record
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import NotExercised, Reason, Unexercised
from megatron_ttrace.trace.records import ROOT, Direction, Kind, Outcome, RoutingIndex, TraceKey
from megatron_ttrace.trace.store import TraceReader

TOLD_SHARE = 0.01
"""A larger share of unchecked tensors is reported."""

_PLAIN = frozenset(("tokens", "labels", "loss_mask", "position_ids", "attention_mask"))
"""Fields of Megatron's GPT data set; another may mark the ends of documents in others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Requested(Record):
    """Features that the job's arguments ask for; those that are not given are off.

    Attributes:
        clip: largest gradient norm, 0 without clipping.
        window: how many keys to the left of itself a query sees, 0 without a window.
        sparse: how many keys sparse attention chooses, 0 without it.
        fp8_weights: weights are to be kept in FP8, but an emulation keeps them as they are.
        switched_off: what a CPU does not have.
        overlap: communication of gradients or parameters overlaps with computation.
        hidden_loss: coefficient of a balancing loss whose scale 16 bits may hide, or 0.
        buckets: gradient buckets of the rank that reports, 0 if unknown.
        final_batch: global batch size at the end of a ramp-up, 0 without one.
        micro_batch: samples of a microbatch; each has ``seq_length`` tokens.
    """

    dropout: bool = False
    random_routing: bool = False
    mlp_chunks: bool = False
    scales_loss: bool = False
    hidden_loss: float = 0.0
    fp8_weights: bool = False
    switched_off: tuple[str, ...] = ()
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What happened in the reference's traced steps; ``None`` where the trace does not say.

    Attributes:
        microbatches: of a traced step, over all ranks.
        same_batches: whether all microbatches of a step hold the same tokens.
        norms: the gradient norm of each traced step.
        hides_documents: whether any query is kept from an earlier key of its sample.
        tokens: number of tokens in the loss, by microbatch.
        idle: number of experts without a token, by router.
        dropped: choices of experts that their capacity did not admit.
        gradients: number of parameters that have a gradient; ``zero_gradients`` are those whose
            gradient is zero in every traced step.
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
    """Read from the reference's trace what :class:`Observed` holds, as far as it is requested."""
    keys = list(reference)
    batches = [key for key in keys if key.kind is Kind.TOKENS]

    def field(name: str) -> Iterator[torch.Tensor]:
        return (reference.data(key) for key in batches if key.name == name)

    asked = requested.masks_ends or requested.per_token_loss
    masked = [key for key in batches if asked and key.name == "loss_mask"]
    masks = [reference.data(key) for key in masked]
    tokens = tuple(_in_loss(reference, *pair) for pair in zip(masked, masks, strict=True))
    positions = field("position_ids") if requested.resets_positions else ()
    # Of a router's later runs only what they would choose is stored.
    first = [key for key in keys if key.kind is Kind.ROUTING and "#" not in key.name]
    routing = [key for key in first if not selects_keys(key)]
    experts, idle, dropped = _routing(reference, routing)
    gradients = _zero_by_name(tolerances, (k for k in keys if k.kind is Kind.MAIN_GRAD))
    updates = _zero_by_name(tolerances, (k for k in keys if k.kind is Kind.PARAM_DELTA))
    return Observed(
        microbatches=len({key.microbatch for key in batches}),
        same_batches=_are_same(reference, [key for key in batches if key.name == PRIMARY]),
        norms=tuple(
            float(reference.data(key).double().sum()) for key in keys if key.kind is Kind.GRAD_NORM
        ),
        masks_loss=tokens != tuple(mask.numel() for mask in masks) if masks else None,
        # A position that is not one more than the one before it.
        restarts_positions=_any(bool((each.diff(dim=-1) != 1).any()) for each in positions),
        hides_documents=_hides({key.name for key in batches}, field("attention_mask"))
        if requested.resets_attention
        else None,
        tokens=tokens,
        experts=experts,
        idle=idle,
        dropped=dropped,
        gradients=len(gradients),
        zero_gradients=tuple(name for name, zero in gradients.items() if zero),
        updates=not all(updates.values()) if updates else None,
    )


def unexercised(
    requested: Requested, observed: Observed, mesh: Mesh, verdicts: Collection[Judged] = ()
) -> tuple[NotExercised, ...]:
    """What did not act, in the order of :class:`~megatron_ttrace.trace.outcomes.Unexercised`."""
    asked, seen, what = requested, observed, Unexercised
    single, dp, pp = mesh.world_size == 1, mesh.size("dp"), mesh.size("pp")
    # Megatron shards the optimizer over context-parallel ranks as well.
    replicas = dp * mesh.size("cp")
    samples, final = seen.microbatches * asked.micro_batch, asked.final_batch
    idle, norm = sum(seen.idle.values()), max(seen.norms, default=math.inf)
    layers = tuple(name for name, number in seen.idle.items() if number)
    unchecked, judged = share(verdicts)
    most = _mostly_unchecked(verdicts)
    alike = asked.per_token_loss and len(seen.tokens) > 1 and len(set(seen.tokens)) == 1
    # A later pipeline stage has one bucket on purpose: there, one says nothing.
    one_bucket = asked.overlap and replicas > 1 and pp == 1 and asked.buckets == 1
    # A norm that is not a number was neither within nor beyond the limit.
    clips = not asked.clip or norm > asked.clip or not all(map(math.isfinite, seen.norms))
    zero, length = seen.zero_gradients, asked.seq_length
    no = NotExercised
    table: Sequence[tuple[object, NotExercised]] = (
        (single, no(what.ONE_RANK, 1)),
        (pp > 1 and seen.microbatches == dp, no(what.SCHEDULE, 1, pp)),
        (not single and seen.same_batches, no(what.DIFFERENT_DATA, seen.microbatches)),
        (not single and asked.sharded_optimizer and replicas == 1, no(what.SHARDED_OPTIMIZER, 1)),
        (one_bucket, no(what.BUCKETS, 1)),
        (asked.dropout, no(what.DROPOUT)),
        (asked.random_routing, no(what.RANDOM_ROUTING)),
        (asked.mlp_chunks, no(what.MLP_CHUNKS)),
        (asked.fp8_weights, no(what.FP8_WEIGHTS)),
        (asked.switched_off, no(what.SWITCHED_OFF, names=asked.switched_off)),
        # A traced step gets a scale with which none overflows (``mcore/loss_scale.py``).
        (not single and asked.scales_loss, no(what.OVERFLOW)),
        (not single and asked.hidden_loss, no(what.BALANCING_LOSS, asked.hidden_loss)),
        (asked.masks_ends and seen.masks_loss is False, no(what.LOSS_MASK)),
        (asked.resets_positions and seen.restarts_positions is False, no(what.POSITION_RESET)),
        (asked.resets_attention and seen.hides_documents is False, no(what.ATTENTION_RESET)),
        (alike, no(what.TOKEN_WEIGHTS, max(seen.tokens, default=0))),
        (asked.window and asked.window >= length - 1, no(what.WINDOW, asked.window, length)),
        (asked.sparse and asked.sparse >= length, no(what.SPARSE_ATTENTION, asked.sparse, length)),
        (0 < samples < final, no(what.RAMP_UP, samples, final)),
        (idle, no(what.IDLE_EXPERTS, idle, seen.experts, layers)),
        (asked.drops_tokens and seen.dropped == 0, no(what.CAPACITY)),
        (not clips, no(what.CLIP, norm, asked.clip)),
        (zero, no(what.GRADIENTS, len(zero), seen.gradients, zero)),
        (seen.updates is False, no(what.UPDATE)),
        (unchecked > TOLD_SHARE * judged or most, no(what.UNCHECKED, unchecked, judged, most)),
    )
    return tuple(record for applies, record in table if applies)


def share(verdicts: Iterable[Judged]) -> tuple[int, int]:
    """Number of unchecked tensors, and of all that the step computes.

    What a step starts from (tokens, parameters, initial values) is given, not computed: it counts
    in neither. Nor does what another implementation does not have, or what nothing depends on.
    """
    computed = [v.verdict for v in verdicts if _is_computed(v)]
    return computed.count(Outcome.UNCHECKED), len(computed)


def _is_computed(verdict: Judged) -> bool:
    apart = (Reason.NO_COUNTERPART, Reason.UNTRAINED, Reason.IGNORED)
    return verdict.direction is not Direction.START and verdict.reason not in apart


def _mostly_unchecked(verdicts: Iterable[Judged]) -> tuple[str, ...]:
    """The kinds of which most tensors are: updates are few of all tensors."""
    of_kind: dict[Kind, list[bool]] = {}
    for v in filter(_is_computed, verdicts):
        of_kind.setdefault(v.kind, []).append(v.verdict is Outcome.UNCHECKED)
    return tuple(kind.value for kind, are in of_kind.items() if 2 * sum(are) > len(are))


def _in_loss(reference: TraceReader, mask: TraceKey, data: torch.Tensor) -> int:
    """Tokens that count: if the model returns losses, with a gradient; a script may mask more."""
    count = round(float(data.float().sum()))
    key = dataclasses.replace(mask, kind=Kind.GRAD_OUTPUT, name=ROOT)
    if key not in reference or reference.entry(key).shape != reference.entry(mask).shape:
        return count
    return min(count, int(reference.data(key).count_nonzero()))


def _any(facts: Iterable[bool]) -> bool | None:
    """Whether any is true; ``None`` where there is none."""
    known = list(facts)
    return any(known) if known else None


def _are_same(reference: TraceReader, keys: Sequence[TraceKey]) -> bool:
    """Whether each step has several microbatches, all with the same tokens."""
    steps: dict[int, list[torch.Tensor]] = {}
    for key in keys:
        steps.setdefault(key.iteration, []).append(reference.data(key))
    return bool(steps) and all(
        len(step) > 1 and all(torch.equal(step[0], other) for other in step[1:])
        for step in steps.values()
    )


def _hides(names: set[str], masks: Iterable[torch.Tensor]) -> bool | None:
    """Whether a mask ([..., query, key], true where nothing is seen) hides what came before."""
    if "attention_mask" not in names:
        return False if names and names <= _PLAIN else None
    return _any(
        bool(mask.tril().any())
        for mask in masks
        if mask.ndim > 1 and mask.shape[-1] == mask.shape[-2] and mask.dtype == torch.bool
    )


def _routing(
    reference: TraceReader, keys: Sequence[TraceKey]
) -> tuple[int, dict[str, int], int | None]:
    """Number of experts, how many of each router's got no token, and choices that were dropped.

    What is left within the capacity is the router's own map, if it has one: experts that are padded
    to their capacity have rows that no token chose.
    """
    counts: dict[str, torch.Tensor] = {}
    chosen = rows = kept = 0
    followed = mapped = False
    routers = {key.name for key in keys if key.index == RoutingIndex.CHOICE}
    for key in keys:
        entry = reference.entry(key)
        if key.index == RoutingIndex.CHOICE:
            choice = reference.tensor(entry).long()
            experts = reference.entry(dataclasses.replace(key, index=RoutingIndex.SCORES)).shape[-1]
            counts[key.name] = counts.get(key.name, 0) + torch.bincount(
                choice.flatten(), minlength=experts
            )
            chosen += choice.numel()
            left = dataclasses.replace(key, index=RoutingIndex.KEPT)
            if left in reference:
                mapped = True
                kept += int(reference.tensor(reference.entry(left)).long().gather(1, choice).sum())
        elif key.name not in routers:
            followed = True
            rows += entry.shape[0]
    idle = {name: int((count == 0).sum()) for name, count in counts.items()}
    dropped = chosen - (kept if mapped else rows) if (mapped or followed) and chosen else None
    return sum(map(len, counts.values())), idle, dropped


def _zero_by_name(tolerances: Tolerances, keys: Iterable[TraceKey]) -> dict[str, bool]:
    """Whether a tensor of the reference is zero in every traced step, by name."""
    zero: dict[str, bool] = {}
    for key in keys:
        zero[key.name] = zero.get(key.name, True) and tolerances.of(key).rms == 0.0
    return zero
