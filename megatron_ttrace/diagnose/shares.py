# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about the terms of a gradient, which is a sum over microbatches: some count wrongly.

The reference's activations and activation gradients give each microbatch's share of the gradient
of a linear layer or an embedding. The candidate's gradient is fitted as their weighted sum; the
weights tell whose share is missing, halved or doubled.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, flat, weights
from megatron_ttrace.diagnose.sources import product
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT, ROOT
from megatron_ttrace.mcore.roles import HEAD, LOOKED_UP
from megatron_ttrace.trace.findings import Cause, ShareWeights, UnequalShares
from megatron_ttrace.trace.records import Kind


@dataclasses.dataclass(frozen=True)
class _Share:
    """What one microbatch adds to a gradient, through one module."""

    module: str
    microbatch: int
    value: torch.Tensor


def weighted(evidence: Evidence) -> UnequalShares | None:
    """Some microbatches' shares do not count once. The repair: count each once.

    Each failing part is fitted on its own: ranks may lack different shares.
    """
    if evidence.key.kind is not Kind.MAIN_GRAD:
        return None
    shares = list(_shares(evidence))
    if len(shares) < 2:
        return None
    reference = evidence.reference.float()
    total = torch.stack([share.value for share in shares]).sum(0)
    # With a loss per token the gradient is divided by their number only at the step's end.
    scale = evidence.ratio([([reference], [total])])
    rest = reference - total * scale
    if not scale or float(rest.norm()) > 0.01 * float(reference.norm()):
        return None
    fits = {}
    for part in evidence.parts:
        # What the shares leave out counts as it should.
        terms = [flat(evidence.expected(part, share.value)).double() for share in shares]
        wanted = flat(part.pieces) - flat(evidence.expected(part, rest))
        fits[part.rank] = weights(torch.stack(terms) * scale, wanted)

    def counted_once(part: FailedPart) -> list[torch.Tensor]:
        repaired = list(part.pieces)
        for weight, share in zip(fits[part.rank], shares, strict=True):
            extra = evidence.expected(part, share.value)
            pairs = zip(repaired, extra, strict=True)
            repaired = [piece - (weight - 1) * scale * once for piece, once in pairs]
        return repaired

    return _describe(evidence, shares, fits) if evidence.repairs(counted_once) else None


def _describe(
    evidence: Evidence, shares: list[_Share], fits: dict[int, list[float]]
) -> UnequalShares | None:
    by_weights: dict[tuple[ShareWeights, ...], list[int]] = {}
    modules = list(dict.fromkeys(share.module for share in shares))
    per_rank = False
    for rank, own in fits.items():
        found = []
        for module in modules:
            pairs = [
                (s.microbatch, w) for s, w in zip(shares, own, strict=True) if s.module == module
            ]
            found.append(_counts(evidence, pairs))
        if len(set(found)) == 1:
            said = tuple(filter(None, found[:1]))
        else:
            named = zip(modules, found, strict=True)
            said = tuple(dataclasses.replace(w, module=module) for module, w in named if w)
        if not said:
            return None
        per_rank = per_rank or any(one.by_axis and not one.missing for one in said)
        by_weights.setdefault(said, []).append(rank)
    tied = evidence.key.name == EMBEDDING_WEIGHT and len(modules) > 1 and len(by_weights) > 1
    return UnequalShares(
        Cause.TIED if tied else Cause.WEIGHTS,
        ("dp",),
        by_ranks=tuple((tuple(ranks), said) for said, ranks in by_weights.items()),
        per_rank=per_rank,
    )


def _counts(evidence: Evidence, found: list[tuple[int, float]]) -> ShareWeights | None:
    """The microbatches that do not count once, by data-parallel rank if these agree."""
    near = max(1e-4, 20 * evidence.tolerance.value)
    ranks = evidence.size("dp")
    by_rank: dict[int, list[float]] = {}
    for microbatch, weight in found:
        by_rank.setdefault(microbatch % ranks, []).append(weight)
    by_axis = ranks > 1 and all(max(own) - min(own) <= near for own in by_rank.values())
    counts = [(rank, own[0]) for rank, own in by_rank.items()] if by_axis else found
    odd = [(number, weight) for number, weight in counts if abs(weight - 1) > near]
    if not odd:
        return None
    missing = all(abs(weight) <= near for _, weight in odd)
    rounded = tuple((number, 0.0 if missing else round(weight, 3)) for number, weight in odd)
    return ShareWeights("", by_axis, rounded, missing)


def _shares(evidence: Evidence) -> Iterator[_Share]:
    """Every microbatch's share, through every module that uses the parameter."""
    module, _, leaf = evidence.key.name.rpartition(".")
    if leaf not in ("weight", "bias"):
        return
    # A head without a weight of its own uses the embedding's.
    tied = evidence.key.name == EMBEDDING_WEIGHT and evidence.parameter(f"{HEAD}.weight") is None
    for one in [module, HEAD] if tied else [module]:
        for microbatch in itertools.count():
            value = _share(evidence, one, leaf, microbatch) if evidence.in_time else None
            if value is None:
                break
            if value.shape == evidence.reference.shape:
                yield _Share(one, microbatch, value)


def _share(evidence: Evidence, module: str, leaf: str, microbatch: int) -> torch.Tensor | None:
    looked_up = LOOKED_UP.get(module.rpartition(".")[2])
    if leaf == "weight" and looked_up is None:
        return product(evidence, module, module, microbatch)
    gradient = evidence.tensor(Kind.GRAD_OUTPUT, module, microbatch)
    if gradient is None:
        return None
    if leaf == "bias":
        return gradient.float().flatten(0, -2).sum(0)
    ids = evidence.tensor(Kind.INPUT, ROOT, microbatch, looked_up or 0)
    if ids is None or ids.numel() * gradient.shape[-1] != gradient.numel():
        return None
    if ids.shape != gradient.shape[:-1]:
        ids = ids.T
    table = torch.zeros(evidence.reference.shape)
    if ids.numel() and int(ids.max()) >= len(table):
        return None
    return table.index_add_(0, ids.reshape(-1), gradient.float().flatten(0, -2))
