# SPDX-License-Identifier: Apache-2.0
"""Repairs of the terms of a gradient, which is a sum over tokens: some count wrongly.

The reference's activations and activation gradients give the share of each microbatch, or of the
part of the sequence that each rank holds, in the gradient of a linear layer, a norm or an
embedding. The
candidate's gradient is fitted as their weighted sum; the weights tell whose share is missing,
halved or doubled.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, flat, weights
from megatron_ttrace.diagnose.sources import product, standardised
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT
from megatron_ttrace.mcore.roles import HEAD, LOOKED_UP
from megatron_ttrace.trace.findings import Cause, ShareWeights, UnequalShares
from megatron_ttrace.trace.records import ROOT, Kind

_OF_FUSED_NORM = ("layer_norm_weight", "layer_norm_bias")
"""Parameters of a norm that is fused with the linear layer after it."""

_ROUGH = 0.05
"""A weight further from one than this is another one, however wide the tolerance is."""


@dataclasses.dataclass(frozen=True)
class _Share:
    """What one microbatch, or one rank's part of all sequences, adds through one module."""

    module: str
    number: int
    value: torch.Tensor


def weighted(evidence: Evidence) -> UnequalShares | None:
    """Some shares do not count once. The repair: count each once."""
    if evidence.key.kind is not Kind.MAIN_GRAD:
        return None
    for axis in ("microbatch", "cp", "tp"):
        if (found := _weighted(evidence, axis)) is not None:
            return found
    return None


def _weighted(evidence: Evidence, axis: str) -> UnequalShares | None:
    """Each failing part is fitted on its own: ranks may lack different shares."""
    shares = list(_shares(evidence, axis))
    if len(shares) < 2 or len(shares) >= min(flat(p.pieces).numel() for p in evidence.parts):
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
        terms = torch.stack([flat(evidence.expected(part, one.value)) for one in shares]).double()
        wanted = flat(part.pieces) - flat(evidence.expected(part, rest))
        evidence.work.spend(len(terms) ** 2 * wanted.numel())
        # A share of nothing counts once as well as twice.
        some = terms.any(1)
        if not some.any() or _alike(terms[some]) * evidence.tolerance.value > _ROUGH:
            return None
        found = iter(weights(terms[some] * scale, wanted))
        fits[part.rank] = [next(found) if one else 1.0 for one in some.tolist()]

    def counted_once(part: FailedPart) -> list[torch.Tensor]:
        repaired = list(part.pieces)
        for weight, share in zip(fits[part.rank], shares, strict=True):
            extra = evidence.expected(part, share.value)
            pairs = zip(repaired, extra, strict=True)
            repaired = [piece - (weight - 1) * scale * once for piece, once in pairs]
        return repaired

    if all(abs(weight) < _ROUGH for own in fits.values() for weight in own):
        return None  # it is zero, of which this would be a part of the reason
    fitted = evidence.repairs(counted_once, free=len(shares))
    return _describe(evidence, axis, shares, fits) if fitted else None


def _alike(terms: torch.Tensor) -> float:
    """How much larger rounding errors are in the weights than in the sum; infinite if one can vary.

    Rounding goes in all directions, of which there are as many as elements.
    """
    count, elements = terms.shape
    terms = terms / torch.linalg.vector_norm(terms, dim=1, keepdim=True)
    least = float(torch.linalg.eigvalsh(terms @ terms.T)[0])
    return math.sqrt(count / elements / least) if least > 0 else math.inf


def _describe(
    evidence: Evidence, axis: str, shares: list[_Share], fits: dict[int, list[float]]
) -> UnequalShares | None:
    by_weights: dict[tuple[ShareWeights, ...], list[int]] = {}
    modules = list(dict.fromkeys(share.module for share in shares))
    for rank, own in fits.items():
        found = []
        for module in modules:
            pairs = [(s.number, w) for s, w in zip(shares, own, strict=True) if s.module == module]
            found.append(_counts(evidence, axis, pairs))
        if len(set(found)) == 1:
            said = tuple(filter(None, found[:1]))
        else:
            named = zip(modules, found, strict=True)
            said = tuple(dataclasses.replace(w, module=module) for module, w in named if w)
        if not said:
            return None
        by_weights.setdefault(said, []).append(rank)
    return UnequalShares(
        Cause.WEIGHTS,
        ("dp",) if axis == "microbatch" else (axis,),
        by_ranks=tuple((tuple(ranks), said) for said, ranks in by_weights.items()),
    )


def _counts(evidence: Evidence, axis: str, found: list[tuple[int, float]]) -> ShareWeights | None:
    """The shares that do not count once; microbatches by data-parallel rank if these agree."""
    near = min(max(1e-4, 20 * evidence.tolerance.value), _ROUGH)
    ranks = evidence.size("dp")
    if axis == "microbatch" and ranks > 1:
        by_rank: dict[int, list[float]] = {}
        for microbatch, weight in found:
            by_rank.setdefault(microbatch % ranks, []).append(weight)
        if all(max(own) - min(own) <= near for own in by_rank.values()):
            axis, found = "dp", [(rank, own[0]) for rank, own in by_rank.items()]
    odd = [(number, weight) for number, weight in found if abs(weight - 1) > near]
    if not odd:
        return None
    missing = all(abs(weight) <= near for _, weight in odd)
    rounded = tuple((number, 0.0 if missing else round(weight, 3)) for number, weight in odd)
    return ShareWeights("", axis, rounded, missing)


def _shares(evidence: Evidence, axis: str) -> Iterator[_Share]:
    """The share of every microbatch or part of the sequence, through every module."""
    module, _, leaf = evidence.key.name.rpartition(".")
    if leaf not in ("weight", "bias", *_OF_FUSED_NORM):
        return
    # A head without a weight of its own uses the embedding's.
    tied = evidence.key.name == EMBEDDING_WEIGHT and evidence.parameter(f"{HEAD}.weight") is None
    for one in [module, HEAD] if tied else [module]:
        if axis == "microbatch":
            for microbatch, value in enumerate(_by_microbatch(evidence, one, leaf, None)):
                yield _Share(one, microbatch, value)
        elif evidence.size(axis) > 1:
            for rank, positions in enumerate(_held_positions(evidence, axis)):
                values = list(_by_microbatch(evidence, one, leaf, positions))
                if values:
                    yield _Share(one, rank, torch.stack(values).sum(0))


def _by_microbatch(
    evidence: Evidence, module: str, leaf: str, positions: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    for microbatch in itertools.count():
        value = _share(evidence, module, leaf, microbatch, positions)
        if value is None or value.shape != evidence.reference.shape:
            return
        yield value


def _held_positions(evidence: Evidence, axis: str) -> list[torch.Tensor]:
    """Sequence positions of each rank: in two chunks with cp, in one with sequence parallelism."""
    size, length = evidence.size(axis), evidence.seq_length
    if axis == "tp":
        return list(torch.arange(length).chunk(size)) if length % size == 0 else []
    chunks = torch.arange(length).chunk(2 * size)
    if length % (2 * size):
        return []
    return [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(size)]


def _share(
    evidence: Evidence, module: str, leaf: str, microbatch: int, positions: torch.Tensor | None
) -> torch.Tensor | None:
    looked_up = LOOKED_UP.get(module.rpartition(".")[2])
    if leaf == "weight" and looked_up is None and evidence.reference.ndim > 1:
        return product(evidence, module, module, microbatch, positions)
    gradient = evidence.tensor(Kind.GRAD_OUTPUT, module, microbatch)
    if gradient is None:
        return None
    other = evidence.tensor(Kind.INPUT, *_ids(module, microbatch, looked_up))
    if looked_up is not None and leaf == "weight":
        if other is None or other.numel() * gradient.shape[-1] != gradient.numel():
            return None
        other = other if other.shape == gradient.shape[:-1] else other.T
    if positions is not None:
        if len(gradient) != evidence.seq_length or other is None or len(other) != len(gradient):
            return None
        gradient, other = gradient[positions], other[positions]
    gradient = gradient.float().flatten(0, -2)
    evidence.work.spend(gradient.numel())
    if leaf in _OF_FUSED_NORM:
        weight = evidence.parameter(f"{module}.weight")
        if weight is None or weight.ndim != 2 or len(weight) != gradient.shape[1]:
            return None
        evidence.work.spend(gradient.numel() * weight.shape[1] // 8)
        gradient = gradient @ weight.float()
    if leaf.endswith("bias"):
        return gradient.sum(0)
    if other is None:
        return None
    if looked_up is None:
        fed = other.float().flatten(0, -2)
        fits = fed.shape == gradient.shape
        return (gradient * standardised(evidence, module, leaf, fed)).sum(0) if fits else None
    table = torch.zeros(evidence.reference.shape)
    if other.numel() and int(other.max()) >= len(table):
        return None
    return table.index_add_(0, other.reshape(-1), gradient)


def _ids(module: str, microbatch: int, looked_up: int | None) -> tuple[str, int, int]:
    """Name, microbatch and index of the input of a module; of an embedding's the model's ids."""
    return (module, microbatch, 0) if looked_up is None else (ROOT, microbatch, looked_up)
