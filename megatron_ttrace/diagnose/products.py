# SPDX-License-Identifier: Apache-2.0
"""Repairs of a linear layer's product: its size is wrong, and its bias is right.

``y = x Wᵀ + b``. A scale that was lost on the way into the product (that of a cast to FP8, above
all) changes the first term and leaves the second.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, gain_of
from megatron_ttrace.diagnose.sources import normed
from megatron_ttrace.trace.findings import CastOperand, Cause, ProductFactors
from megatron_ttrace.trace.records import Kind

_FORMATS = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}
_EQUAL = 1e-4
"""Below what one step of bf16 in the largest value would make."""


def factor(evidence: Evidence) -> ProductFactors | None:
    """Each rank's product is off by a factor. The repair: divide by it, and leave the bias.

    Without a bias it is the whole tensor that is off; told is then only the scale of a cast.
    """
    factors = _factors(evidence)
    if not factors:
        return None
    plain = ProductFactors(Cause.FACTOR, factors=tuple(sorted(factors.items())), has_bias=True)
    return _cast(evidence, factors) or (plain if evidence.bias() is not None else None)


def _factors(evidence: Evidence) -> dict[int, float]:
    """What each failing rank's product is multiplied by; empty if that does not repair it."""
    if evidence.key.kind is not Kind.OUTPUT:
        return {}
    bias = evidence.bias()
    added = (torch.zeros(()) if bias is None else bias).expand(evidence.reference.shape)
    of_product = evidence.reference.float() - added.float()
    factors = {
        part.rank: evidence.ratio(
            [(evidence.less(part, added), evidence.expected(part, of_product))]
        )
        for part in evidence.parts
    }

    def divide(part: FailedPart) -> list[torch.Tensor]:
        pairs = zip(evidence.less(part, added), evidence.expected(part, added), strict=True)
        return [product / factors[part.rank] + b for product, b in pairs]

    if not all(factors.values()):
        return {}
    right = evidence.repairs(divide, 1, lambda part: gain_of(factors[part.rank]))
    return factors if right else {}


def _cast(evidence: Evidence, own: Mapping[int, float]) -> ProductFactors | None:
    """Whether each rank's factor is the scale of a cast of what it multiplies.

    With sequence parallelism a rank holds a part of the sequence and multiplies all of it.
    """
    name = evidence.key.name
    fed = evidence.tensor(Kind.INPUT, name)
    if fed is None or fed.ndim < 2:
        return None
    # What was cast had the precision of the run.
    rows = normed(evidence, name.split("#")[0], fed.float()).view(fed.shape).to(fed.dtype)
    size = evidence.size("tp")
    operands = {CastOperand.INPUT: dict.fromkeys(own, rows)}
    if size > 1 and len(rows) % size == 0:
        chunks = rows.chunk(size)
        own_parts = {rank: chunks[evidence.meshes[rank].at("tp")] for rank in own}
        operands[CastOperand.OWN_PART] = own_parts
    found: list[tuple[float, CastOperand, str, bool]] = []
    for (operand, held), (dtype, form) in itertools.product(operands.items(), _FORMATS.items()):
        tops = {rank: float(tensor.abs().amax()) for rank, tensor in held.items()}
        if all(tops.values()):
            scales = {rank: torch.finfo(form).max / top for rank, top in tops.items()}
            undone = max(abs(own[rank] * scale - 1) for rank, scale in scales.items())
            kept = max(abs(own[rank] / scale - 1) for rank, scale in scales.items())
            found += [(undone, operand, dtype, True), (kept, operand, dtype, False)]
    if not found or min(found)[0] > max(evidence.tolerance.value, 1e-3):
        return None
    off, operand, dtype, inverse = min(found)
    # Each part's largest value can be that of the whole.
    equal = {one[1] for one in found if one[2:] == (dtype, inverse) and one[0] - off < _EQUAL}
    return ProductFactors(
        Cause.CAST,
        factors=tuple(sorted(own.items())),
        has_bias=evidence.bias() is not None,
        dtype=dtype,
        inverse=inverse,
        operand=operand if len(equal) == 1 else CastOperand.EITHER,
    )
