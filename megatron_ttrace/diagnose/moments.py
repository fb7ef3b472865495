# SPDX-License-Identifier: Apache-2.0
"""Repairs of an optimizer's moments: each keeps a part of itself and adds the clipped gradient."""

from __future__ import annotations

import dataclasses

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.diagnose.summands import counted
from megatron_ttrace.mcore.numbers import BETAS
from megatron_ttrace.trace.findings import ConstantFactor, GradientFactor
from megatron_ttrace.trace.records import MOMENTS, STEP_LEVEL, Kind


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
    known = {**numbers, "clipping": clipping} if clipping > 1 else numbers
    fault = counted(dataclasses.replace(evidence, numbers=known), share, power)
    if isinstance(fault, ConstantFactor):
        return GradientFactor(fault.cause, fault.axes, ratio=fault.ratio, sizes=fault.sizes)
    return GradientFactor(fault.cause, ratio=0.0) if fault else None


def _clipping(evidence: Evidence) -> float:
    """What gradients are divided by because their norm is too large."""
    norm = evidence.tensor(Kind.GRAD_NORM, "grad_norm", STEP_LEVEL)
    limit = evidence.numbers.get("clip_grad")
    return 1.0 if norm is None or limit is None else max(1.0, float(norm) / limit)
