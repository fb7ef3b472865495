# SPDX-License-Identifier: Apache-2.0
"""Repairs of one summand of a tensor: it counts too often, too little, or not at all."""

from __future__ import annotations

import math

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.diagnose.scaling import constant_factor, tested
from megatron_ttrace.trace.findings import Cause, Finding

_NONE = 1e-3
"""A summand that counts less often than this is missing."""


def counted(evidence: Evidence, summand: torch.Tensor, power: int = 1) -> Finding | None:
    """How a summand counts, if counting it once is the repair; the rest of the tensor is right.

    Args:
        evidence: the failed tensor.
        summand: what should count once in the reference.
        power: of the number in the summand that the factor is told of.
    """
    surplus = evidence.ratio(
        (
            [p - r for p, r in zip(part.pieces, evidence.expected(part), strict=True)],
            evidence.expected(part, summand),
        )
        for part in evidence.parts
    )
    if not surplus:
        return None

    def repairs(ratio: float, free: int) -> bool:
        times = math.copysign(abs(ratio) ** power, ratio)

        def once(part: FailedPart) -> list[torch.Tensor]:
            pairs = zip(part.pieces, evidence.expected(part, summand), strict=True)
            return [piece - (times - 1) * own for piece, own in pairs]

        return evidence.repairs(once, free)

    times = 1 + surplus
    if abs(times) < _NONE:
        return Finding(Cause.ZERO) if repairs(0.0, 0) else None
    ratio = math.copysign(abs(times) ** (1 / power), times)
    return tested(evidence, constant_factor(evidence, ratio), repairs)
