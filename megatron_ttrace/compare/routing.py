# SPDX-License-Identifier: Apache-2.0
"""Is a router's choice of experts the reference's, or a tie?

The *regret* of the reference's choice is the candidate's own scores of the experts that it chose,
less those that the reference chose. Where scores agree within their tolerance, so does
``regret / sqrt(2k)`` (docs/tolerance.md). A larger regret is a choice that rounding cannot explain.

With groups of experts (``group_limited_topk`` in megatron/core/transformer/moe/moe_utils.py) g
groups are chosen first, by the sum of their k/g best scores. Where the reference took experts of a
group T that is not among the candidate's, the regret is the lowest chosen group's score less T's.
"""

import torch

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.trace.captured import Groups, Routed
from megatron_ttrace.trace.checksum import checksum


def choice(routed: Routed, reference: torch.Tensor) -> tuple[Sums, int]:
    """Compare two choices.

    Args:
        routed: the candidate's.
        reference: experts that the reference chose for the same tokens, [tokens, k].

    Returns:
        Sums on the scale of the scores (``diff`` of regrets over ``sqrt(2k)``), and the number of
        tokens that were routed differently.
    """
    scores = routed.scores if routed.by is None else routed.by
    chosen, groups = routed.chosen, routed.groups
    k = chosen.shape[1]
    ours, theirs = chosen.sort(dim=1).values, reference.to(chosen.device).sort(dim=1).values
    differs = (ours != theirs).any(dim=1)
    exact = scores.double()
    regret = exact.gather(1, ours).sum(dim=1) - exact.gather(1, theirs).sum(dim=1)
    if groups is not None:
        elsewhere, lost = _group_regret(exact, theirs, groups)
        regret = torch.where(elsewhere, lost, regret)
    regret = torch.where(differs, regret, torch.zeros_like(regret))
    # An expert that nobody may choose has an infinite score, which is the size of nothing.
    sized = exact.where(exact.isfinite(), 0.0)
    return _sums(sized, regret, 2 * k, ours), int(differs.sum())


def left(
    probabilities: torch.Tensor, kept: torch.Tensor, reference: torch.Tensor
) -> tuple[Sums, int]:
    """Compare what two runs left of one choice within the experts' capacity.

    An expert keeps the tokens of the highest probability, so its regret is at most the square root
    of the number of assignments that differ, times the error of its probabilities. One that keeps
    more or fewer tokens has a regret as well, of either sign.

    ``probabilities`` are the candidate's, of all that was chosen; ``kept`` is what the candidate
    kept, ``reference`` what the reference kept of the same tokens; all are [tokens, experts].

    Returns:
        Sums on the scale of the probabilities, and the number of assignments that differ.
    """
    exact = probabilities.double()
    changed = kept.double() - reference.to(kept.device).double()
    differ = changed.abs().sum(dim=0)
    regret = (exact * changed).sum(dim=0) / differ.clamp(min=1.0).sqrt()
    return _sums(exact, regret, 1, kept), int(differ.sum())


def _sums(by: torch.Tensor, regret: torch.Tensor, terms: int, ours: torch.Tensor) -> Sums:
    """On the scale of what experts were chosen by; a regret is the sum of so many ``terms``."""
    size = float(by.square().sum())
    return Sums(
        n=by.numel(),
        diff=float(regret.square().sum()) / terms,
        reference=size,
        candidate=size,
        dot=size,
        worst=float(regret.abs().max()) if len(regret) else 0.0,
        nonfinite=int((~torch.isfinite(regret)).sum()),
        checksum=checksum(ours),
    )


def _group_regret(
    scores: torch.Tensor, theirs: torch.Tensor, groups: Groups
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose experts lie, in the reference, in groups not chosen here; and by how far."""
    tokens, k = theirs.shape
    each = scores.shape[1] // groups.number
    best = max(k // groups.chosen, 1)
    totals = scores.view(tokens, groups.number, each).topk(best, dim=2).values.sum(dim=2)
    lowest = totals.topk(groups.chosen, dim=1).values[:, -1:]
    touched = torch.zeros_like(totals, dtype=torch.bool).scatter(1, theirs // each, True)
    lost = ((lowest - totals).clamp(min=0) * touched).sum(dim=1)
    return lost > 0, lost
