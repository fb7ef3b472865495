# SPDX-License-Identifier: Apache-2.0
"""Repairs of one summand of a tensor: it counts too often, too little, or not at all."""

from __future__ import annotations

import math

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.diagnose.scaling import constant_factor, exactly
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
    times, free = 1 + surplus, 0
    fault = Finding(Cause.ZERO)
    if abs(times) < _NONE:
        times = 0.0
    else:
        named = constant_factor(evidence, math.copysign(abs(times) ** (1 / power), times))
        size = exactly(evidence, named)
        fault, free = named, int(size is None)
        times = times if size is None else math.copysign(abs(size) ** power, size)

    def once(part: FailedPart) -> list[torch.Tensor]:
        pairs = zip(part.pieces, evidence.expected(part, summand), strict=True)
        return [piece - (times - 1) * own for piece, own in pairs]

    return fault if evidence.repairs(once, free) else None
