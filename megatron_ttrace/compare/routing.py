# SPDX-License-Identifier: Apache-2.0
"""Is a router's choice of experts the reference's, or a tie?

The *regret* of the reference's choice is the candidate's own scores of the experts that it chose,
less those that the reference chose. Where scores agree within their tolerance, so does ``regret /
sqrt(n)``, with n scores in it (docs/tolerance.md). A larger regret is a choice that rounding cannot
explain.

With groups of experts (``group_limited_topk`` in megatron/core/transformer/moe/moe_utils.py) g
groups are chosen first, by the sum of their k/g best scores. Where the two runs took experts of
different groups, the regret is by how much one of these is below the lowest of the best groups.
"""

from collections.abc import Iterable

import torch

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.trace.captured import Groups, Routed
from megatron_ttrace.trace.checksum import checksum
from megatron_ttrace.trace.records import Kind, TraceKey


def choice(routed: Routed, reference: torch.Tensor) -> tuple[Sums, int]:
    """Compare two choices.

    Args:
        routed: the candidate's.
        reference: experts that the reference chose for the same tokens, [tokens, k].

    Returns:
        Sums on the scale of the scores, and the number of tokens that were routed differently.
    """
    scores = routed.scores if routed.by is None else routed.by
    chosen, groups = routed.chosen, routed.groups
    ours, theirs = chosen.sort(dim=1).values, reference.to(chosen.device).sort(dim=1).values
    differs = (ours != theirs).any(dim=1)
    exact = scores.double()
    regret = exact.gather(1, ours).sum(dim=1) - exact.gather(1, theirs).sum(dim=1)
    terms = (_among(ours, exact.shape[1]) ^ _among(theirs, exact.shape[1])).sum(dim=1)
    if groups is not None:
        elsewhere, lost = _group_regret(exact, ours, theirs, groups)
        regret = torch.where(elsewhere, lost, regret)
        terms = torch.where(elsewhere, 2 * max(chosen.shape[1] // groups.chosen, 1), terms)
    regret = torch.where(differs, regret, torch.zeros_like(regret))
    # An expert that nobody may choose has an infinite score, which is the size of nothing.
    sized = exact.where(exact.isfinite(), 0.0)
    return _sums(sized, regret, terms, ours), int(differs.sum())


def unseen(keys: Iterable[TraceKey]) -> list[str]:
    """Routers whose experts got tokens although nobody asked for the reference's choice."""
    routed = {key.name for key in keys if key.kind is Kind.ROUTING}
    experts = (name for name in routed if name.endswith(".experts"))
    routers = {f"{name.removesuffix('experts')}router" for name in experts}
    return sorted(routers - routed)


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
    return _sums(exact, (exact * changed).sum(dim=0), differ, kept), int(differ.sum())


def _sums(by: torch.Tensor, regret: torch.Tensor, terms: torch.Tensor, ours: torch.Tensor) -> Sums:
    """On the scale of what experts were chosen by; each regret is the sum of so many ``terms``.

    So its square is at most that number times the terms' squared errors. These scores are a part of
    all, like a rank's: ties of a few tokens say nothing about the rest.
    """
    terms = terms.clamp(min=1)
    n = int(terms[regret != 0].sum()) or by.numel()
    size = float(by.square().mean()) * n
    return Sums(
        n=n,
        diff=float((regret.square() / terms).sum()),
        reference=size,
        candidate=size,
        dot=size,
        worst=float((regret.abs() / terms).max()) if len(regret) else 0.0,
        nonfinite=int((~torch.isfinite(regret)).sum()),
        checksum=checksum(ours),
    )


def _among(indices: torch.Tensor, size: int) -> torch.Tensor:
    """Which of ``size`` are chosen, by token."""
    chosen = torch.zeros(len(indices), size, dtype=torch.bool, device=indices.device)
    return chosen.scatter(1, indices, True)


def _group_regret(
    scores: torch.Tensor, ours: torch.Tensor, theirs: torch.Tensor, groups: Groups
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens whose experts lie in other groups than the reference's; how far off a group is.

    By these scores, of the best groups: so a choice of groups must be that of its own scores.
    """
    tokens, k = theirs.shape
    each = scores.shape[1] // groups.number
    best = max(k // groups.chosen, 1)
    totals = scores.view(tokens, groups.number, each).topk(best, dim=2).values.sum(dim=2)
    lowest = totals.topk(groups.chosen, dim=1).values[:, -1:]
    here, there = (_among(chosen // each, groups.number) for chosen in (ours, theirs))
    short = (lowest - totals).clamp(min=0)
    return (here != there).any(dim=1), short.where(here | there, 0).amax(dim=1)
