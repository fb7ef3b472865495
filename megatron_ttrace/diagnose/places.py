# SPDX-License-Identifier: Apache-2.0
"""Where to look: the suspects that fit the cause of a failure best."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from megatron_ttrace.diagnose.anchors import anchor_of, is_sent
from megatron_ttrace.diagnose.code import (
    Code,
    Outcomes,
)
from megatron_ttrace.diagnose.edits import MOST, with_elsewhere
from megatron_ttrace.diagnose.points import Points
from megatron_ttrace.trace.collectives import Ledger, Numbers
from megatron_ttrace.trace.executed import ChangedFunction
from megatron_ttrace.trace.findings import (
    Cause,
    Finding,
    OtherSetting,
)
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import Kind


class Places:
    """Finds the places to look at."""

    def __init__(
        self,
        ledger: Ledger,
        verdicts: Iterable[Judged],
        expected: Numbers | None = None,
        changed: Iterable[ChangedFunction] = (),
    ) -> None:
        """``expected``: numbers of the reference's functions; ``changed``: the user's changes."""
        self._ledger, self._code = ledger, Code(ledger)
        self._expected, self._changed = expected or {}, [*changed]
        self._outcomes = Outcomes(verdicts)

    def of(self, diagnosis: Diagnosis) -> Diagnosis:
        """The same, with the places to look at, most likely first."""
        verdict, why, sent = diagnosis.verdict, diagnosis.why, is_sent(diagnosis)
        finding = why.observed if isinstance(why.observed, OtherSetting) else why.finding
        is_thawed = finding == Finding(Cause.THAWED)
        is_loaded = verdict.kind is Kind.LOADED and not is_thawed  # by no function on record
        ranked = [] if is_loaded else self.ranked(verdict, finding, sent=sent)
        # What has no name of its own (a generator) is shown as what it is written in: once.
        places: list[Place] = []
        for _, one in ranked:
            if len(places) < MOST and not any(map(one.is_at, places)):
                places.append(one)
        anchor = "" if sent or is_thawed else anchor_of(self._ledger.sources, verdict, self._code)
        number = self._code.number(anchor)
        if (is_loaded or number is None) and (place := Place.of(anchor, Clue.RAN)):
            places = [place, *places[: MOST - 1]]
        places = with_elsewhere(places, self._changed, self._code, number, is_loaded=is_loaded)
        return dataclasses.replace(diagnosis, why=dataclasses.replace(why, places=tuple(places)))

    def ranked(
        self, verdict: Judged, finding: Finding | None, *, sent: bool = False
    ) -> list[tuple[float, Place]]:
        """All suspects of a failure with their points, the best first.

        ``sent``: it was right on the ranks that sent it.
        """
        points = Points(self._code, self._ledger, self._outcomes, verdict, finding, sent=sent)
        points.facts(self._expected)
        points.changes(self._changed)
        places = [(score, points.place(n)) for n, score in points.scores().items() if score > 0]
        return sorted(places, key=lambda ranked: -ranked[0])
