# SPDX-License-Identifier: Apache-2.0
"""Repairs of the terms of a gradient, which is a sum over tokens: some count wrongly.

The reference's activations and activation gradients give the share of each microbatch, or of the
part of the sequence that each rank holds, in the gradient of a linear layer, a norm or an
embedding. The candidate's gradient is fitted as their weighted sum; the weights show whose share is
missing, halved or doubled.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence, flat
from megatron_ttrace.diagnose.sources import by_microbatch, ids_by_row, product, standardised
from megatron_ttrace.diagnose.summands import ROUGH, weights_of
from megatron_ttrace.mcore.names import EMBEDDING_WEIGHT
from megatron_ttrace.mcore.roles import HEAD, LOOKED_UP
from megatron_ttrace.trace.findings import Cause, ShareWeights, UnequalShares
from megatron_ttrace.trace.records import ROOT, Kind

_OF_FUSED_NORM = ("layer_norm_weight", "layer_norm_bias")
"""Parameters of a norm that is fused with the linear layer after it."""
_OF_EXPERT = re.compile(r"weight(\d+)")
"""The weight of an expert, in a module that has those of all of them."""


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
    kinds = (_weighted(evidence, axis) for axis in ("microbatch", "cp", "tp"))
    return next(filter(None, kinds), None)


def _weighted(evidence: Evidence, axis: str) -> UnequalShares | None:
    shares = list(_shares(evidence, axis))
    if len(shares) < 2 or len(shares) >= min(flat(p.pieces).numel() for p in evidence.parts):
        return None
    reference = evidence.reference.float()
    total = torch.stack([share.value for share in shares]).sum(0)
    # With a loss per token the gradient is divided by their number only at the step's end.
    scale = evidence.ratio([([reference], [total])])
    if not scale or float((reference - total * scale).norm()) > 0.01 * float(reference.norm()):
        return None
    fits = weights_of(evidence, [share.value for share in shares], scale)
    if fits is None or all(abs(weight) < ROUGH for fit in fits.values() for weight in fit):
        return None  # where all is zero, this would be a part of the reason
    return _describe(evidence, axis, shares, fits)


def _describe(
    evidence: Evidence, axis: str, shares: list[_Share], fits: dict[int, list[float]]
) -> UnequalShares | None:
    by_weights: dict[tuple[ShareWeights, ...], list[int]] = {}
    modules = dict.fromkeys(share.module for share in shares)
    for rank, rank_fit in fits.items():
        weights: dict[str, dict[int, float]] = {module: {} for module in modules}
        for share, weight in zip(shares, rank_fit, strict=True):
            weights[share.module][share.number] = weight
        counts = {module: _counts(evidence, axis, fit) for module, fit in weights.items()}
        if len(set(counts.values())) == 1:
            described = tuple(filter(None, [counts[shares[0].module]]))
        else:
            described = tuple(w._replace(module=name) for name, w in counts.items() if w)
        if not described:
            return None
        by_weights.setdefault(described, []).append(rank)
    return UnequalShares(
        Cause.WEIGHTS,
        ("dp",) if axis == "microbatch" else (axis,),
        by_ranks=tuple((tuple(ranks), weights) for weights, ranks in by_weights.items()),
    )


def _counts(evidence: Evidence, axis: str, weights: dict[int, float]) -> ShareWeights | None:
    """The shares that do not count once; microbatches by data-parallel rank if these agree."""
    near = min(max(1e-4, 20 * evidence.tolerance.value), ROUGH)
    ranks = evidence.size("dp")
    if axis == "microbatch" and ranks > 1:
        by_rank: dict[int, list[float]] = {}
        for microbatch, weight in weights.items():
            by_rank.setdefault(microbatch % ranks, []).append(weight)
        if all(max(fits) - min(fits) <= near for fits in by_rank.values()):
            axis, weights = "dp", {rank: fits[0] for rank, fits in by_rank.items()}
    odd = {number: weight for number, weight in weights.items() if abs(weight - 1) > near}
    if not odd:
        return None
    missing = all(abs(weight) <= near for weight in odd.values())
    counts = ((number, 0.0 if missing else round(weight, 3)) for number, weight in odd.items())
    return ShareWeights("", axis, tuple(counts), missing)


def _shares(evidence: Evidence, axis: str) -> Iterator[_Share]:
    """The share of every microbatch or part of the sequence, through every module."""
    module, _, leaf = evidence.key.name.rpartition(".")
    if expert := _OF_EXPERT.fullmatch(leaf):
        if axis == "microbatch":
            of_expert = functools.partial(_of_expert, evidence, module, int(expert[1]))
            for number, value in enumerate(by_microbatch(evidence, of_expert)):
                yield _Share(module, number, value)
        return
    if leaf not in ("weight", "bias", *_OF_FUSED_NORM):
        return
    # A head without a weight of its own uses the embedding's.
    tied = evidence.key.name == EMBEDDING_WEIGHT and evidence.parameter(f"{HEAD}.weight") is None
    for name in (module, HEAD) if tied else (module,):
        share = functools.partial(_share, evidence, name, leaf)
        if axis == "microbatch":
            for number, value in enumerate(by_microbatch(evidence, share)):
                yield _Share(name, number, value)
        elif evidence.size(axis) > 1:
            for rank, rows in enumerate(_held_positions(evidence, axis)):
                of_rank = functools.partial(share, rows=rows)
                if values := by_microbatch(evidence, of_rank):
                    yield _Share(name, rank, torch.stack(values).sum(0))


def _held_positions(evidence: Evidence, axis: str) -> list[torch.Tensor]:
    """Which positions each rank has: in two chunks with cp, in one with sequence parallelism."""
    size, length = evidence.size(axis), evidence.seq_length
    chunks = 2 * size if axis == "cp" else size
    if length % chunks:
        return []
    chunk = torch.arange(length) // (length // chunks)
    return [(chunk == r) | (axis == "cp") & (chunk == chunks - 1 - r) for r in range(size)]


def _of_expert(
    evidence: Evidence, module: str, expert: int, microbatch: int
) -> torch.Tensor | None:
    """The share of an expert's weight: of the rows that were dispatched to it."""
    experts = module.rpartition(".")[0]
    dispatched = evidence.tensor(Kind.ROUTING, experts, microbatch)  # position and expert of a row
    if dispatched is None or dispatched.ndim != 2:
        return None
    return product(evidence, module, module, microbatch, dispatched[:, 1] == expert)


def _share(
    evidence: Evidence,
    module: str,
    leaf: str,
    microbatch: int,
    rows: torch.Tensor | None = None,
) -> torch.Tensor | None:
    looked_up = LOOKED_UP.get(module.rpartition(".")[2])
    if leaf == "weight" and looked_up is None and evidence.reference.ndim > 1:
        return product(evidence, module, module, microbatch, rows)
    gradient = evidence.tensor(Kind.GRAD_OUTPUT, module, microbatch)
    if gradient is None or gradient.ndim < 2:
        return None
    # What an embedding looks up are the model's ids.
    fed, index = (module, 0) if looked_up is None else (ROOT, looked_up)
    other = evidence.tensor(Kind.INPUT, fed, microbatch, index)
    if looked_up is not None and leaf == "weight":
        other = ids_by_row(other, gradient.shape[:-1])
        if other is None:
            return None
    if rows is not None:
        if other is None or not len(gradient) == len(other) == len(rows):
            return None
        gradient, other = gradient[rows], other[rows]
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
    if other is None or (looked_up is None and other.ndim < 2):
        return None
    if looked_up is None:
        inputs = other.float().flatten(0, -2)
        fits = inputs.shape == gradient.shape
        return (gradient * standardised(evidence, module, leaf, inputs)).sum(0) if fits else None
    table = torch.zeros(evidence.reference.shape)
    if other.numel() and int(other.max()) >= len(table):
        return None
    return table.index_add_(0, other.reshape(-1), gradient)
