# SPDX-License-Identifier: Apache-2.0
"""What Megatron and ``transformers`` do differently by design, and how a comparison treats it.

:data:`DIFFERENCES` is the whole list: refusals, notices, reasons and the table in
docs/huggingface.md come from it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from enum import StrEnum

from megatron_ttrace.mcore.options.decisions import AUXILIARY
from megatron_ttrace.mcore.roles import is_within_experts
from megatron_ttrace.saved.huggingface.inputs import POSITIONS, Inputs
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
        instead: what the user can do.
        seen: where a trace has it, in words; nothing where it does not.
        covers: whether it is the reason why a tensor has no counterpart.
        avoided: whether ``ttrace check`` runs a job of Megatron-Bridge once more without it.
    """

    what: str
    why: str
    effect: Effect
    instead: str = ""
    seen: Callable[[Inputs], Iterable[str]] = lambda inputs: ()
    covers: Callable[[Inputs, TraceKey], bool] = lambda inputs, key: False
    avoided: bool = False


def _auxiliary(inputs: Inputs) -> Iterator[str]:
    arguments = inputs.arguments
    for option in sorted(AUXILIARY) if arguments.get("num_experts") else ():
        value = arguments.get(option)
        if any(value if isinstance(value, list) else [value]):
            yield f"--{option.replace('_', '-')} {value}"


def _capacity(inputs: Inputs) -> Iterator[str]:
    if any(key.kind is Kind.ROUTING and key.index == RoutingIndex.KEPT for key in inputs.trace):
        yield "a capacity of experts"


def _predicted(inputs: Inputs) -> Iterator[str]:
    names = (name for name in inputs.parameters() if name.startswith("mtp."))
    yield from (f"multi-token prediction ({name})" for name in names)


def _packed(inputs: Inputs) -> Iterator[str]:
    if inputs.arguments.get("reset_attention_mask"):
        yield "--reset-attention-mask"
    for key in inputs.trace:
        place = key.iteration, key.kind, key.name, key.index
        if place == (inputs.iteration, Kind.INPUT, ROOT, POSITIONS):
            data = inputs.trace.data(key)
            if data.ndim and (data.diff(dim=-1) != 1).any():
                yield "packed samples (positions that begin anew)"


def _rounded(inputs: Inputs) -> Iterator[str]:
    if inputs.trace.reference.epsilon > _FLOAT32:
        yield "fp16" if inputs.arguments.get("fp16") else "bf16"


def _fused_loss(inputs: Inputs) -> Iterator[str]:
    arguments, is_rounded = inputs.arguments, any(_rounded(inputs))
    is_native = arguments.get("cross_entropy_fusion_impl", "native") == "native"
    if arguments.get("cross_entropy_loss_fusion") and is_native and not is_rounded:
        yield "--cross-entropy-loss-fusion"


def _latent(inputs: Inputs) -> Iterator[str]:
    epsilon = inputs.config.get("rms_norm_eps", _OF_LATENTS)
    if inputs.config["model_type"] == "deepseek_v3" and epsilon != _OF_LATENTS:
        yield f"rms_norm_eps {epsilon}"


def _later(inputs: Inputs) -> Iterator[str]:
    if later := sorted({key.iteration for key in inputs.trace} - {inputs.iteration}):
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
        seen=lambda inputs: ["FP8"] if inputs.trace.reference.fp8 else [],
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
        covers=lambda inputs, key: key.iteration != inputs.iteration,
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
        covers=lambda inputs, key: key.direction is Direction.START,
    ),
    Difference(
        "optimizer, logged numbers",
        "only forward and backward passes are computed",
        Effect.LEFT_OUT,
        covers=lambda inputs, key: key.kind not in (*FLOW, Kind.ROUTING, Kind.MAIN_GRAD),
    ),
    Difference(
        "gradients of what experts read too, and of what a gate multiplies",
        "transformers has them in a sum or in another form",
        Effect.LEFT_OUT,
        covers=lambda inputs, key: inputs.correspondence().is_apart(key),
    ),
    Difference(
        "single experts",
        "transformers computes a layer's experts together",
        Effect.LEFT_OUT,
        covers=lambda inputs, key: is_within_experts(key.name),
    ),
    Difference(
        "further modules",
        "only Megatron has them",
        Effect.LEFT_OUT,
        covers=lambda inputs, key: True,
    ),
)


def require_comparable(inputs: Inputs) -> None:
    """Refuse a trace with something that cannot be compared. Raises ``TTraceError``."""
    for difference in DIFFERENCES:
        if difference.effect is Effect.REFUSED and (
            seen := next(iter(difference.seen(inputs)), None)
        ):
            raise TTraceError(
                f"{inputs.trace.directory}: {seen}: {difference.why}: {difference.instead}"
            )


def avoided(inputs: Inputs) -> list[str]:
    """What a trace has that a job of Megatron-Bridge is run without once more."""
    return [
        seen for difference in DIFFERENCES if difference.avoided for seen in difference.seen(inputs)
    ]


def notices(inputs: Inputs) -> list[str]:
    """Notices for the report of this comparison."""
    return [
        f"{seen}: {difference.why}: {difference.instead}"
        for difference in DIFFERENCES
        if difference.effect is Effect.NOTICE
        for seen in difference.seen(inputs)
    ]


def why(inputs: Inputs, key: TraceKey) -> str:
    """Why the model has no such tensor."""
    return next(difference.why for difference in DIFFERENCES if difference.covers(inputs, key))
