# SPDX-License-Identifier: Apache-2.0
"""The answer of a running job: written, and sent to the trackers that it has open."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping

from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import fronts
from megatron_ttrace.trace.collectives import Ledger
from megatron_ttrace.trace.records import Summary, Verdict


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one rank concludes from the findings of all."""

    summary: Summary
    verdicts: list[Verdict]
    ledger: Ledger

    def settled(self, alone: Summary, timings: Mapping[str, float]) -> Answer:
        """This answer, and what a check with modules isolated found."""
        from megatron_ttrace.report import wording

        texts = wording.isolated_texts(alone.culprits)
        summary = dataclasses.replace(
            self.summary,
            notices=(*(f"isolated: {text}" for text in texts), *self.summary.notices),
            timings={**self.summary.timings, **timings},
        )
        return dataclasses.replace(self, summary=summary)


def publish(answer: Answer, settings: Settings) -> None:
    """Write the report; send it to the trackers that Megatron has opened.

    Where training goes on, only what is short is done at once: the verdict's files, and what goes
    into the job's own log and trackers. A process makes the rest.
    """
    from megatron_ttrace import report
    from megatron_ttrace.report import later

    tensorboard, wandb = fronts.current().writers()
    # The loop's own run, or one that the script has opened. ``getattr`` would import a package that
    # nothing has used yet (``forkserver.preload``).
    run = getattr(wandb, "run", None) or vars(sys.modules.get("wandb", sys)).get("run")
    report.publish(
        answer.summary,
        answer.verdicts,
        settings.directory,
        wandb_run=run,
        tensorboard=tensorboard,
        wandb=settings.wandb,
        wandb_online=settings.wandb_online,
        collectives=answer.ledger.collectives,
        pages=settings.exit_after,
    )
    if not settings.exit_after:
        later.start(
            settings.directory,
            html=run is None or not settings.wandb,
            wandb=settings.wandb and run is None,
            online=settings.wandb_online,
        )
