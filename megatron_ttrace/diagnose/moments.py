# SPDX-License-Identifier: Apache-2.0
"""Repairs of an optimizer's moments: each keeps a part of itself and adds the clipped gradient."""

from __future__ import annotations

import dataclasses
import math

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.diagnose.scaling import constant_factor
from megatron_ttrace.mcore.numbers import BETAS
from megatron_ttrace.trace.findings import Cause, GradientFactor
from megatron_ttrace.trace.records import MOMENTS, STEP_LEVEL, Kind

_NONE = 0.001
"""A gradient that is added less often than this is not added."""


def gradient(evidence: Evidence) -> GradientFactor | None:
    """The gradient enters a moment with another factor, or not at all. The repair: with its own.

    A step adds ``(1 - beta) * g`` to the first moment and ``(1 - beta) * g**2`` to the second one;
    ``g`` is the gradient after clipping.
    """
    kind, numbers = evidence.key.kind, evidence.numbers
    if kind not in MOMENTS or BETAS[kind] not in numbers:
        return None
    found = evidence.tensor(Kind.MAIN_GRAD, evidence.key.name, STEP_LEVEL)
    if found is None or found.shape != evidence.reference.shape:
        return None
    clipping = _clipping(evidence)
    power = 1 if kind is Kind.EXP_AVG else 2
    share = (1 - numbers[BETAS[kind]]) * (found.float() / clipping) ** power
    surplus = evidence.ratio(
        (
            [p - r for p, r in zip(part.pieces, evidence.expected(part), strict=True)],
            evidence.expected(part, share),
        )
        for part in evidence.parts
    )

    def without(part: FailedPart) -> list[torch.Tensor]:
        pairs = zip(part.pieces, evidence.expected(part, share), strict=True)
        return [piece - surplus * own for piece, own in pairs]

    if not surplus or not evidence.repairs(without):
        return None
    times = 1 + surplus
    if abs(times) < _NONE:
        return GradientFactor(Cause.ZERO, ratio=0.0)
    ratio = math.copysign(abs(times) ** (1 / power), times)
    known = {**numbers, "clipping": clipping} if clipping > 1 else numbers
    factor = constant_factor(dataclasses.replace(evidence, numbers=known), ratio)
    return GradientFactor(factor.cause, factor.axes, ratio=factor.ratio, sizes=factor.sizes)


def _clipping(evidence: Evidence) -> float:
    """What gradients are divided by because their norm is too large."""
    norm = evidence.tensor(Kind.GRAD_NORM, "grad_norm", STEP_LEVEL)
    limit = evidence.numbers.get("clip_grad")
    return 1.0 if norm is None or limit is None else max(1.0, float(norm) / limit)
