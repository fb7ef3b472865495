# SPDX-License-Identifier: Apache-2.0
"""Which culprits share a cause: they are reported once, however many layers show it."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator

from megatron_ttrace.mcore.roles import any_layer
from megatron_ttrace.trace.findings import (
    Cause,
    Composed,
    ConstantFactor,
    Finding,
    LossShare,
    OtherHyperparameters,
    PartialSums,
    UnequalShares,
)
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.records import Direction, Kind

Groups = dict[tuple[object, ...], int]
"""Numbers of the groups that are known, by what their culprits have in common."""
_OF_ALL = (Direction.GRADIENT, Direction.UPDATE)


def group_of(
    groups: Groups, direction: Direction, verdict: Judged, grounds: Grounds, finding: Finding | None
) -> int:
    """The number of the group of culprits with one cause.

    One finding is one cause. Where its numbers are each tensor's own, or nothing was found, the
    same tensor of other layers is alike.
    """
    stage = direction, verdict.kind, grounds
    # A start that fails, fails for all parameters alike.
    name = "" if grounds is Grounds.START else any_layer(verdict.name)
    keys: list[tuple[object, ...]] = [
        (*stage, verdict.index, verdict.verdict, name, finding.cause if finding else None)
    ]
    if isinstance(finding, ConstantFactor) and not finding.sizes:
        keys += [(*stage, finding.cause, place) for place in _near(finding.ratio)]
    elif finding is not None and type(finding) is not Finding:
        keys.append((*stage, _shares(finding) or _without_ratio(finding)))
        if isinstance(finding, OtherHyperparameters):
            # A parameter with more that is wrong has this, too.
            keys += [(*stage, number) for number in finding.values]
    elif finding and (verdict.kind is not Kind.INITIAL or finding.cause is Cause.RANDOM_STATE):
        keys.append((*stage, finding))
    number = next((groups[key] for key in keys if key in groups), len(set(groups.values())) + 1)
    for key in keys:
        groups.setdefault(key, number)
    return number


def looked_for_together(diagnoses: Iterable[Diagnosis]) -> Iterator[Diagnosis]:
    """Put culprits without a cause into one group if the same functions are to be looked at.

    Only of what reduces gradients or updates weights, which is one for all parameters.
    """
    groups: dict[tuple[object, ...], int] = {}
    for diagnosis in diagnoses:
        verdict, why, group = diagnosis.verdict, diagnosis.why, diagnosis.group
        if diagnosis.direction in _OF_ALL and not why.finding and why.places:
            stage = verdict.kind, verdict.index, verdict.verdict, diagnosis.grounds
            group = groups.setdefault((*stage, why.places), group)
        yield dataclasses.replace(diagnosis, group=group)


def _near(ratio: float) -> tuple[int, int]:
    """Two numbers, of which ratios share one that differ by less than a percent."""
    place = math.floor(100 * math.log(abs(ratio))) if ratio else 0
    return place, place + 1


def _shares(finding: Finding) -> Finding | tuple[object, ...] | None:
    """What shares that do not count once have in common, whichever ranks hold a tensor.

    Where each share is missing from all but one of several groups of ranks, they hold partial sums.
    """
    if not isinstance(finding, UnequalShares):
        return None
    axes = {share.axis for _, shares in finding.by_ranks for share in shares}
    lacking = Counter(
        (share.module, number)
        for _, shares in finding.by_ranks
        for share in shares
        if share.missing
        for number, _ in share.counts
    )
    others = len(finding.by_ranks) - 1
    if others and len(axes) == 1 and lacking and {*lacking.values()} == {others}:
        return PartialSums(Cause.PARTIAL, (*axes,))
    counts = {
        (share.axis, share.missing, *sorted(round(count, 2) + 0.0 for _, count in share.counts))
        for _, shares in finding.by_ranks
        for share in shares
    }
    return (finding.cause, *sorted(counts))


def _without_ratio(finding: Finding) -> Finding:
    """A factor that is a size of the layout, without its digits."""
    if isinstance(finding, ConstantFactor) and finding.sizes:
        return dataclasses.replace(finding, ratio=0.0)
    if isinstance(finding, Composed):
        steps = tuple(map(_without_ratio, finding.steps))
        return dataclasses.replace(finding, steps=steps)
    if isinstance(finding, LossShare):
        return dataclasses.replace(finding, fault=_without_ratio(finding.fault))
    return finding
