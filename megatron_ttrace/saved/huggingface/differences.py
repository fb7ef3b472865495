# SPDX-License-Identifier: Apache-2.0
"""What Megatron and ``transformers`` do differently by design, and what a comparison makes of it.

:data:`DIFFERENCES` is the whole list: refusals, notices, reasons and the table in
docs/huggingface.md come from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from megatron_ttrace.mcore.options.decisions import AUXILIARY
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.saved.huggingface.given import POSITIONS, Given
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.records import (
    FLOW,
    ROOT,
    Direction,
    Kind,
    RoutingIndex,
    TraceKey,
)


class Effect(StrEnum):
    """What a comparison does about a difference."""

    REFUSED = "refused"
    NOTICE = "a notice"
    GIVEN = "from the trace"
    LEFT_OUT = "`no counterpart`"


@dataclasses.dataclass(frozen=True, slots=True)
class Difference:
    """Something that Megatron and ``transformers`` do differently by design.

    Attributes:
        what: it is.
        why: it cannot be compared as it is.
        effect: on the comparison.
        instead: what the user can do.
        seen: where a trace has it, in words; nothing where it does not.
        covers: whether it is the reason why a tensor has no counterpart.
        avoided: whether ``ttrace check`` runs a job of Megatron-Bridge once more without it.
    """

    what: str
    why: str
    effect: Effect
    instead: str = ""
    seen: Callable[[Given], Iterable[str]] = lambda given: ()
    covers: Callable[[Given, TraceKey], bool] = lambda given, key: False
    avoided: bool = False


def _auxiliary(given: Given) -> Iterator[str]:
    arguments = given.arguments
    for option in sorted(AUXILIARY) if arguments.get("num_experts") else ():
        value = arguments.get(option)
        if any(value if isinstance(value, list) else [value]):
            yield f"--{option.replace('_', '-')} {value}"


def _capacity(given: Given) -> Iterator[str]:
    if any(key.kind is Kind.ROUTING and key.index == RoutingIndex.KEPT for key in given.trace):
        yield "a capacity of experts"


def _predicted(given: Given) -> Iterator[str]:
    names = (name for name in given.parameters() if name.startswith("mtp."))
    yield from (f"multi-token prediction ({name})" for name in names)


def _packed(given: Given) -> Iterator[str]:
    if given.arguments.get("reset_attention_mask"):
        yield "--reset-attention-mask"
    for key in given.trace:
        place = key.iteration, key.kind, key.name, key.index
        if place == (given.iteration, Kind.INPUT, ROOT, POSITIONS):
            data = given.trace.data(key)
            if data.ndim and (data.diff(dim=-1) != 1).any():
                yield "packed samples (positions that begin anew)"


def _rounded(given: Given) -> Iterator[str]:
    if given.trace.reference.epsilon > _FLOAT32:
        yield "fp16" if given.arguments.get("fp16") else "bf16"


def _fused_loss(given: Given) -> Iterator[str]:
    arguments, is_rounded = given.arguments, any(_rounded(given))
    is_native = arguments.get("cross_entropy_fusion_impl", "native") == "native"
    if arguments.get("cross_entropy_loss_fusion") and is_native and not is_rounded:
        yield "--cross-entropy-loss-fusion"


def _latent(given: Given) -> Iterator[str]:
    epsilon = given.config.get("rms_norm_eps", _OF_LATENTS)
    if given.config["model_type"] == "deepseek_v3" and epsilon != _OF_LATENTS:
        yield f"rms_norm_eps {epsilon}"


def _later(given: Given) -> Iterator[str]:
    if later := sorted({key.iteration for key in given.trace} - {given.iteration}):
        yield f"iteration {', '.join(map(str, later))} of the trace"


_FLOAT32 = 2.0**-23
_OF_LATENTS = 1e-6
"""Epsilon of the norms in multi-latent attention, whatever the config says."""
DIFFERENCES = (
    Difference(
        "auxiliary losses",
        "transformers defines this loss differently",
        Effect.REFUSED,
        "record the job with 0",
        seen=_auxiliary,
        avoided=True,
    ),
    Difference(
        "FP8",
        "transformers computes in float32",
        Effect.REFUSED,
        "record without it",
        seen=lambda given: ["FP8"] if given.trace.reference.fp8 else [],
        avoided=True,
    ),
    Difference(
        "a capacity of experts",
        "transformers drops no tokens",
        Effect.REFUSED,
        "record without it",
        seen=_capacity,
        avoided=True,
    ),
    Difference(
        "multi-token prediction",
        "transformers does not train them",
        Effect.REFUSED,
        "record without it",
        seen=_predicted,
        avoided=True,
    ),
    Difference(
        "packed samples, `--reset-attention-mask`",
        "transformers' mask is causal",
        Effect.REFUSED,
        "record without --reset-position-ids and --reset-attention-mask",
        seen=_packed,
    ),
    Difference(
        "`--cross-entropy-loss-fusion` in float32",
        "it rounds the gradient of the logits to bf16",
        Effect.REFUSED,
        "record the job without it",
        seen=_fused_loss,
        avoided=True,
    ),
    Difference(
        "bf16 and fp16",
        "rounding hides a wrong epsilon",
        Effect.NOTICE,
        "record the job without --bf16 or --fp16",
        seen=_rounded,
        avoided=True,
    ),
    Difference(
        "an epsilon other than 1e-6 in multi-latent attention",
        "there transformers' norms have 1e-6",
        Effect.NOTICE,
        "Megatron's have --norm-epsilon, so these models differ",
        seen=_latent,
    ),
    Difference(
        "traced steps after the first",
        "only the first one's start is known",
        Effect.NOTICE,
        "it is not compared",
        seen=_later,
        covers=lambda given, key: key.iteration != given.iteration,
    ),
    Difference(
        "loss masks, scales and means",
        "part of the training loop",
        Effect.GIVEN,
    ),
    Difference(
        "scores of experts that differ only by rounding", "any choice is right", Effect.GIVEN
    ),
    Difference(
        "start weights and batches",
        "given to both",
        Effect.LEFT_OUT,
        covers=lambda given, key: key.direction is Direction.START,
    ),
    Difference(
        "optimizer, logged numbers",
        "only forward and backward passes are computed",
        Effect.LEFT_OUT,
        covers=lambda given, key: key.kind not in (*FLOW, Kind.ROUTING, Kind.MAIN_GRAD),
    ),
    Difference(
        "gradients of what experts read too, and of what a gate multiplies",
        "transformers has them in a sum or in another form",
        Effect.LEFT_OUT,
        covers=lambda given, key: given.correspondence().is_apart(key),
    ),
    Difference(
        "single experts",
        "transformers computes a layer's experts together",
        Effect.LEFT_OUT,
        covers=lambda given, key: is_within_experts(key.name),
    ),
    Difference(
        "further modules",
        "only Megatron has them",
        Effect.LEFT_OUT,
        covers=lambda given, key: True,
    ),
)


def require_comparable(given: Given) -> None:
    """Refuse a trace with something that cannot be compared. Raises ``TTraceError``."""
    for each in DIFFERENCES:
        if each.effect is Effect.REFUSED and (seen := next(iter(each.seen(given)), None)):
            raise TTraceError(f"{given.trace.directory}: {seen}: {each.why}: {each.instead}")


def avoided(given: Given) -> list[str]:
    """What a trace has that a job of Megatron-Bridge is run without once more."""
    return [seen for each in DIFFERENCES if each.avoided for seen in each.seen(given)]


def notices(given: Given) -> list[str]:
    """What the report says of this comparison."""
    return [
        f"{seen}: {each.why}: {each.instead}"
        for each in DIFFERENCES
        if each.effect is Effect.NOTICE
        for seen in each.seen(given)
    ]


def why(given: Given, key: TraceKey) -> str:
    """Why the model has no such tensor."""
    return next(each.why for each in DIFFERENCES if each.covers(given, key))


def document() -> list[str]:
    """The rows of the table in docs/huggingface.md."""
    return [f"| {each.what} | {each.why} | {each.effect} |" for each in DIFFERENCES]
