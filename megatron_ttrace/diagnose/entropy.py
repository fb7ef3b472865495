# SPDX-License-Identifier: Apache-2.0
"""The summands of the cross entropy, which is computed from the logits and the labels.

The loss of a token is the logarithm of the sum of all exponentials minus the logit of its label
(both without the largest logit); its gradient is the softmax minus one at the label. The
reference's logits and labels must give the reference's own value first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence
from megatron_ttrace.diagnose.summands import counted
from megatron_ttrace.mcore.roles import HEAD
from megatron_ttrace.trace.findings import LossTerm, Term
from megatron_ttrace.trace.records import ROOT, Kind


def terms(evidence: Evidence) -> LossTerm | None:
    """One term is scaled or missing. The repair: count it once."""
    for term, value in _terms(evidence).items():
        if (fault := counted(evidence, value)) is not None:
            return LossTerm(fault.cause, fault.axes, term=term, fault=fault)
    return None


def _terms(evidence: Evidence) -> dict[Term, torch.Tensor]:
    """The terms whose sum the tensor is; none if it is not this sum."""
    key = evidence.key
    is_loss = (key.kind, key.name) == (Kind.OUTPUT, ROOT)
    if not is_loss and (key.kind, key.name) != (Kind.GRAD_OUTPUT, HEAD):
        return {}
    logits = evidence.tensor(Kind.OUTPUT, HEAD)
    if logits is None or logits.ndim != 3:
        return {}
    evidence.work.spend(4 * logits.numel())
    # Exponentials are taken of what remains of the logits without the largest one.
    logits = logits.float() - logits.float().amax(-1, keepdim=True)
    total = logits.logsumexp(-1)
    for labels in _labels(evidence, logits):
        if is_loss and evidence.reference.ndim == 2:
            own = logits.gather(-1, labels[..., None])[..., 0]
            values = {Term.LOGARITHM: total.T, Term.LABEL: -own.T}
            if evidence.near(sum(values.values(), torch.zeros(()))):
                return values
        gradient = evidence.tensor(Kind.GRAD_OUTPUT, ROOT)
        if not is_loss and gradient is not None and gradient.T.shape == labels.shape:
            scale = gradient.T[..., None].float()
            softmax = (logits - total[..., None]).exp() * scale
            ones = torch.zeros_like(logits).scatter_(-1, labels[..., None], 1.0) * scale
            if softmax.shape == evidence.reference.shape and evidence.near(softmax - ones):
                return {Term.SOFTMAX: softmax, Term.ONE: -ones}
    return {}


def _labels(evidence: Evidence, logits: torch.Tensor) -> Iterator[torch.Tensor]:
    """Inputs of the model that can be the labels, with the dims of the logits."""
    for index in itertools.count():
        found = evidence.tensor(Kind.INPUT, ROOT, index=index)
        if found is None:
            return
        fits = found.dtype == torch.int64 and found.T.shape == logits.shape[:2]
        if fits and int(found.min()) >= 0 and int(found.max()) < logits.shape[-1]:
            yield found.T
