# SPDX-License-Identifier: Apache-2.0
"""Repairs of one loss's share of a gradient: the rest of the gradient is right.

A gradient is a sum of the gradients of all losses. The share of each was found by replaying the
reference with the loss's coefficient changed (run/separation.py). A fault of a share is tested
as every other one: the candidate's parts, with the share counted as it should be, must be within
the tolerance of the whole gradient.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch

from megatron_ttrace.diagnose import replicas, scaling
from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.trace.captured import Share
from megatron_ttrace.trace.findings import Cause, Finding, Loss, LossShare, RankFactors
from megatron_ttrace.trace.records import Kind

KINDS = (Kind.GRAD_INPUT, Kind.GRAD_OUTPUT, Kind.MAIN_GRAD)
"""Tensors that are sums over losses."""

_NEAR = 4.0
"""A repair that leaves more than so many times the error of the best one is not reported."""


def miscounted(evidence: Evidence, shares: Sequence[Share]) -> LossShare | None:
    """The simplest fault of one loss's share, or of several losses' alike, that explains a failure.

    ``shares`` are those of the losses beside the main loss.
    """
    faults: list[tuple[LossShare, float, tuple[int, int]]] = []
    for losses, share in _together(evidence, shares):
        of_share = _of_share(evidence, share)
        for free, left, fault in _faults(of_share) if of_share else ():
            of_losses = LossShare(fault.cause, fault.axes, losses=losses, fault=fault)
            faults.append((of_losses, left, (len(losses) + free, free)))
    # Of losses that are all off by the same, one may bring a wide tolerance about.
    least = min((left for _, left, _ in faults), default=0.0)
    near = [(order, fault) for fault, left, order in faults if left <= _NEAR * least]
    return min(near, key=lambda fault: fault[0])[1] if near else None


def _together(
    evidence: Evidence, shares: Sequence[Share]
) -> Iterator[tuple[tuple[Loss, ...], torch.Tensor]]:
    """Every set of losses, with its share. The share of all of them is the whole gradient."""
    for own in (False, True):
        values = {
            share.loss: share.value
            for share in shares
            if share.own is own
            and share.value.shape == evidence.reference.shape
            and share.value.any()
        }
        most = len(values)
        if values and not own:
            values[Loss.MAIN] = evidence.reference.float() - sum(values.values())
        for number in range(1, most + 1):
            for losses in itertools.combinations(values, number):
                yield losses, torch.stack([values[loss] for loss in losses]).sum(0)


def _of_share(evidence: Evidence, share: torch.Tensor) -> Evidence | None:
    """What the ranks hold of the share, if they hold the rest as they should."""
    others = evidence.reference.float() - share
    after = evidence.repaired(functools.partial(evidence.less, values=others))
    if after is None:
        return None
    # What is left of the parts are other values, of which there may be fewer.
    return dataclasses.replace(after, reference=share, share_of=evidence.reference, distinct={})


def _faults(share: Evidence) -> Iterator[tuple[int, float, Finding]]:
    """The faults that explain what the ranks hold.

    Each with the number of its parameters, and the error that is left.
    """
    ratio = share.factor()
    sizes = [size for _, size in scaling.products(scaling.sizes_of(share))]
    likely = {0.0, *sizes, *(1 / size for size in sizes)}
    for times in sorted(likely, key=lambda times: abs(times - ratio)):
        if (left := _left(share, times)) is not None:
            lost = Finding(Cause.ZERO)
            yield 0, left, scaling.constant_factor(share, times) if times else lost
            break
    for finding, summed in replicas.reduced(share):
        if summed.is_right:
            yield 0, max(summed.error(part, part.pieces) for part in summed.parts), finding
    if ratio and (left := _left(share, ratio, free=1)) is not None:
        yield 1, left, scaling.constant_factor(share, ratio)
    factors = share.factors()
    if len(factors) > 1 and (left := _left(share, factors, free=1)) is not None:
        by_rank = tuple(sorted(factors.items()))
        yield len(factors), left, RankFactors(Cause.FACTOR, factors=by_rank)


def _left(share: Evidence, times: float | Mapping[int, float], free: int = 0) -> float | None:
    """The error that is left of a share that counts so many times; ``None`` if that is not it."""

    def once(part: FailedPart) -> list[torch.Tensor]:
        count = times[part.rank] if isinstance(times, Mapping) else times
        return share.less(part, times=count - 1)

    if not share.repairs(once, free):
        return None
    return max(share.error(part, once(part)) for part in share.parts)
