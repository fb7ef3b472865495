# SPDX-License-Identifier: Apache-2.0
"""Repairs of one summand of a tensor: it counts too often, too little, or not at all.

A module may add a bias, or its own input, to its result. An optimizer adds the gradient to what it
keeps of each moment. The cross entropy of a token is the logarithm of the sum of all exponentials
minus the logit of its label (both without the largest logit); its gradient is the softmax minus one
at the label.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, Pieces, flat
from megatron_ttrace.diagnose.scaling import constant_factor, tested
from megatron_ttrace.mcore.numbers import BETAS
from megatron_ttrace.mcore.roles import HEAD
from megatron_ttrace.trace.findings import (
    Addend,
    Cause,
    ConstantFactor,
    Finding,
    GradientFactor,
    LossTerm,
    Term,
)
from megatron_ttrace.trace.records import MOMENTS, ROOT, STEP_LEVEL, Kind

ROUGH = 0.05
"""A weight further from one than this is another one, however wide the tolerance is."""

_NONE = 1e-3
"""A summand that counts less often than this is missing."""


def counted(evidence: Evidence, summand: torch.Tensor, power: int = 1) -> Finding | None:
    """How a summand counts, if counting it once is the repair; the rest of the tensor is right.

    ``power`` is that of the number in the summand whose factor is reported.
    """
    surplus = evidence.surplus(summand)
    if not surplus:
        return None

    def repairs(ratio: float, free: int) -> bool:
        times = math.copysign(abs(ratio) ** power, ratio)
        once = functools.partial(evidence.less, values=summand, times=times - 1)
        return evidence.repairs(once, free)

    times = 1 + surplus
    if abs(times) < _NONE:
        return Finding(Cause.ZERO) if repairs(0.0, 0) else None
    ratio = math.copysign(abs(times) ** (1 / power), times)
    return tested(evidence, constant_factor(evidence, ratio), repairs)


def weights_of(
    evidence: Evidence, summands: Sequence[torch.Tensor], scale: float = 1.0
) -> dict[int, list[float]] | None:
    """How often each of several summands counts on each failing rank, if the repair is once each.

    Each failing part is fitted by itself: ranks may lack different summands. What the summands
    leave of the reference counts as it should. ``scale`` is their factor in the reference.
    """
    remainder = evidence.reference.float() - torch.stack([*summands]).sum(0) * scale
    fits: dict[int, list[float]] = {}
    for part in evidence.parts:
        terms = torch.stack(
            [flat(evidence.expected(part, summand)) for summand in summands]
        ).double()
        evidence.work.spend(terms.shape[0] ** 2 * terms.shape[1])
        # A summand of nothing counts once as well as twice.
        counts = terms.any(1)
        if not counts.any() or _alike(terms[counts]) * evidence.tolerance.value > ROUGH:
            return None
        terms, total = terms[counts] * scale, flat(evidence.less(part, remainder)).double()
        fit = torch.linalg.lstsq(terms @ terms.T, terms @ total, driver="gelsd").solution
        weights = iter(fit.tolist())
        fits[part.rank] = [next(weights) if count else 1.0 for count in counts.tolist()]

    def once(part: FailedPart) -> Pieces:
        for weight, summand in zip(fits[part.rank], summands, strict=True):
            left = evidence.less(part, summand, (weight - 1) * scale)
            part = dataclasses.replace(part, pieces=tuple(left))
        return part.pieces

    return fits if evidence.repairs(once, free=len(summands)) else None


def _alike(terms: torch.Tensor) -> float:
    """How much larger rounding errors are in the weights than in the sum; infinite if one can vary.

    Rounding goes in all directions, of which there are as many as elements.
    """
    count, elements = terms.shape
    terms = terms / torch.linalg.vector_norm(terms, dim=1, keepdim=True)
    least = float(torch.linalg.eigvalsh(terms @ terms.T)[0])
    return math.sqrt(count / elements / least) if least > 0 else math.inf


def addend(evidence: Evidence) -> Addend | None:
    """A bias or the module's own input is added too often or not at all. The repair: undo that."""
    if evidence.key.kind is not Kind.OUTPUT:
        return None
    bias, shape = evidence.bias(), evidence.reference.shape
    fed = evidence.tensor(Kind.INPUT, evidence.key.name)
    addends = {True: None if bias is None else bias.expand(shape), False: fed}
    for is_bias, values in addends.items():
        if values is None or values.shape != shape:
            continue
        times = round(evidence.surplus(values), 2)
        if times and evidence.repairs(functools.partial(evidence.less, values=values, times=times)):
            return Addend(Cause.ADDEND, bias=is_bias, surplus=times)
    return None


def gradient(evidence: Evidence) -> GradientFactor | None:
    """The gradient enters a moment with another factor, or not at all. The repair: with its own.

    A step adds ``(1 - beta) * g`` to the first moment and ``(1 - beta) * g**2`` to the second one;
    ``g`` is the gradient after clipping.
    """
    kind, numbers = evidence.key.kind, evidence.numbers
    if kind not in MOMENTS or BETAS[kind] not in numbers:
        return None
    main_grad = evidence.tensor(Kind.MAIN_GRAD, evidence.key.name, STEP_LEVEL)
    if main_grad is None or main_grad.shape != evidence.reference.shape:
        return None
    norm = evidence.tensor(Kind.GRAD_NORM, "grad_norm", STEP_LEVEL)
    limit = numbers.get("clip_grad")
    clipping = 1.0 if norm is None or limit is None else max(1.0, float(norm) / limit)
    power = 1 if kind is Kind.EXP_AVG else 2
    share = (1 - numbers[BETAS[kind]]) * (main_grad.float() / clipping) ** power
    numbers = {**numbers, "clipping": clipping} if clipping > 1 else numbers
    fault = counted(dataclasses.replace(evidence, numbers=numbers), share, power)
    if isinstance(fault, ConstantFactor):
        return GradientFactor(fault.cause, fault.axes, ratio=fault.ratio, sizes=fault.sizes)
    return GradientFactor(fault.cause, ratio=0.0) if fault else None


def entropy(evidence: Evidence) -> LossTerm | None:
    """One term of the cross entropy is scaled or missing. The repair: count it once."""
    for term, value in _terms(evidence).items():
        if (fault := counted(evidence, value)) is not None:
            return LossTerm(fault.cause, fault.axes, term=term, fault=fault)
    return None


def _terms(evidence: Evidence) -> dict[Term, torch.Tensor]:
    """The terms whose sum the tensor is; none if the reference's logits and labels do not give it.

    Of the loss ``[b, s]``, or of its gradient in the logits ``[s, b, v]``.
    """
    place = evidence.key.kind, evidence.key.name
    if place not in ((Kind.OUTPUT, ROOT), (Kind.GRAD_OUTPUT, HEAD)):
        return {}
    logits = evidence.tensor(Kind.OUTPUT, HEAD)
    if logits is None or logits.ndim != 3:
        return {}
    evidence.work.spend(4 * logits.numel())
    # Exponentials are taken of what remains of the logits without the largest one.
    logits = logits.float() - logits.float().amax(-1, keepdim=True)
    total = logits.logsumexp(-1)
    for labels in _labels(evidence, logits):
        if place == (Kind.OUTPUT, ROOT):
            label = logits.gather(-1, labels[..., None])[..., 0]
            terms = {Term.LOGARITHM: total.T, Term.LABEL: -label.T}
        else:
            gradient = evidence.tensor(Kind.GRAD_OUTPUT, ROOT)
            if gradient is None or gradient.ndim != 2 or gradient.T.shape != labels.shape:
                continue
            scale = gradient.T[..., None].float()
            ones = torch.zeros_like(logits).scatter_(-1, labels[..., None], 1.0)
            softmax = (logits - total[..., None]).exp()
            terms = {Term.SOFTMAX: softmax * scale, Term.ONE: -ones * scale}
        value = sum(terms.values(), torch.zeros(()))
        if value.shape == evidence.reference.shape and evidence.near(value):
            return terms
    return {}


def _labels(evidence: Evidence, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inputs of the model that can be the labels, with the dims of the logits."""
    for index in itertools.count():
        labels = evidence.tensor(Kind.INPUT, ROOT, index=index)
        if labels is None:
            return
        fits = labels.dtype == torch.int64 and labels.ndim == 2
        fits = fits and labels.T.shape == logits.shape[:2]
        if fits and int(labels.min()) >= 0 and int(labels.max()) < logits.shape[-1]:
            yield labels.T
