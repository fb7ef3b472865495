# SPDX-License-Identifier: Apache-2.0
"""Controls a cause: its consequences must also show elsewhere, or it is not reported.

A repair is tested on one tensor. If its cause were the true one, other tensors would differ too:
those computed from it, the norm that has an element twice, the update made with another learning
rate. Where all of these pass, something else made the tensor look as it does.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import Explanation, Finding, Miscounted, OtherHyperparameters
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import MOMENTS, STEP_LEVEL, Direction, Kind, Outcome

Explain = Callable[[Judged], Explanation]

_FAR = 25.0
"""Margin of an error that does not fall below the tolerance where the tensor is used."""
_RATE = "lr"
_READ = {
    Direction.FORWARD: (Kind.INPUT, Kind.OUTPUT, Kind.ROUTING, Kind.LOSS),
    Direction.BACKWARD: (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT, Kind.MAIN_GRAD),
}
"""What is computed from an activation, or from the gradient of one."""
_FROM_GRADIENT = (Kind.GRAD_NORM, *MOMENTS, Kind.PARAM_DELTA)


def controlled(explain: Explain, verdicts: Sequence[Judged], tolerances: Tolerances) -> Explain:
    """``explain`` without findings that measured verdicts contradict.

    ``verdicts`` are those of all tensors, in the reference's execution order.
    """
    places = {verdict.key: number for number, verdict in enumerate(verdicts)}

    def explained(verdict: Judged) -> Explanation:
        why = explain(verdict)
        if why.finding is None or verdict.key not in places:
            return why
        later = verdicts[places[verdict.key] + 1 :]
        predictions = (
            *_of_finding(verdict, why.finding, verdicts, tolerances),
            (_users(verdict, verdicts, later), math.inf),
        )
        if not any(_contradict(*prediction) for prediction in predictions):
            return why
        return dataclasses.replace(why, finding=None, other=None, alike=None)

    return explained


def _contradict(verdicts: Iterable[Judged], change: float) -> bool:
    """Whether some of these tensors were judged, and all of these pass and would not if changed.

    At least one of them would differ by the relative error ``change`` or more.
    """
    judged = [verdict for verdict in verdicts if verdict.verdict is not Outcome.UNCHECKED]
    return bool(judged) and all(
        verdict.verdict is Outcome.PASS and 2 * (verdict.tolerance or 0.0) < change
        for verdict in judged
    )


def _users(
    verdict: Judged, verdicts: Sequence[Judged], later: Sequence[Judged]
) -> Iterator[Judged]:
    """What is computed from a tensor that is far off, as far as this follows from the order."""
    if verdict.kind is Kind.DROPOUT or verdict.margin is None or verdict.margin < _FAR:
        return
    if verdict.kind is Kind.MAIN_GRAD:
        for other in verdicts:
            related = other.name == verdict.name or other.kind is Kind.GRAD_NORM
            if other.iteration == verdict.iteration and other.kind in _FROM_GRADIENT and related:
                yield other
    elif verdict.microbatch != STEP_LEVEL:
        read, batches = _READ.get(verdict.direction, ()), (verdict.microbatch, STEP_LEVEL)
        for other in later:
            same = other.iteration == verdict.iteration and other.microbatch in batches
            if same and other.kind in read:
                yield other


def _of_finding(
    verdict: Judged, finding: Finding, verdicts: Sequence[Judged], tolerances: Tolerances
) -> Iterator[tuple[list[Judged], float]]:
    """Tensors that the numbers of a finding change, and by how much."""
    now = [v for v in verdicts if v.iteration == verdict.iteration]
    if isinstance(finding, OtherHyperparameters) and not finding.following:
        changes = [
            abs(ours / right - 1) for n, ours, right in finding.values if n == _RATE and right
        ]
        updates = [v for v in now if (v.kind, v.name) == (Kind.PARAM_DELTA, verdict.name)]
        yield updates, max(changes, default=0.0)
    if isinstance(finding, Miscounted) and finding.statistic is Statistic.GRAD_NORM:
        # Of a part of a parameter it is not known how large it is.
        again = finding.most - 1 if finding.least == finding.most else 0
        squares = {
            v.name: tolerances.of(v.key).rms ** 2 * math.prod(v.shape)
            for v in now
            if v.kind is Kind.MAIN_GRAD and v.verdict is not Outcome.EXTRA
        }
        total = sum(squares.values())
        more = again * sum(squares.get(name, 0.0) for name in finding.names)
        change = abs(math.sqrt(max(0.0, 1 + more / total)) - 1) if total else 0.0
        norms = [v for v in now if v.kind is Kind.GRAD_NORM]
        # Parameters with a norm of their own are not in the one that is compared, and the
        # reference's may lack the same ones.
        sizes = [tolerances.of(v.key).rms for v in norms]
        if all(math.isclose(size, math.sqrt(total), rel_tol=1e-3) for size in sizes):
            yield norms, change
