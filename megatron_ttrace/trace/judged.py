# SPDX-License-Identifier: Apache-2.0
"""What is concluded about tensors and modules, before ``report/`` puts it into words."""

import dataclasses
from typing import Self

from megatron_ttrace.trace.findings import Explanation, Note, Remark
from megatron_ttrace.trace.outcomes import Grounds, Reason
from megatron_ttrace.trace.records import Direction, Outcome, TensorResult


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Judged(TensorResult):
    """A verdict whose notes are not text yet."""

    notes: tuple[Note, ...] = ()
    reason: Reason | None = None

    def unchecked(self, reason: Reason, text: str = "", remark: Remark | None = None) -> Self:
        """The verdict on the same tensor where it is not judged, for a reason.

        ``text`` is of the note, which has the reason's words if it has no others (``remark``).
        """
        notes = (Note(remark or reason, text=text),)
        return dataclasses.replace(self, verdict=Outcome.UNCHECKED, reason=reason, notes=notes)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A culprit, and everything that is known about it.

    Attributes:
        direction: the stage of the step in which it went wrong.
        verdict: of the tensor that represents it.
        before: of the tensor before that in execution order, if it passes.
        alike: of all tensors of the same kind, for one that belongs to the whole step.
        shared: modules whose tensor this is, too.
        group: number of the culprits that share a cause; 0 if this is not known.
    """

    name: str
    direction: Direction
    grounds: Grounds
    verdict: Judged
    why: Explanation
    before: Judged | None = None
    alike: tuple[Judged, ...] = ()
    shared: tuple[str, ...] = ()
    group: int = 0
