# SPDX-License-Identifier: Apache-2.0
"""The candidate's loaded start, written for the reference: where it lies, where training stands."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import torch

from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.mcore import fingerprint
from megatron_ttrace.mcore.arguments import MegatronArguments, Scheduler
from megatron_ttrace.runtime.agreement import Ranks
from megatron_ttrace.runtime.start import handoff
from megatron_ttrace.trace.store import seal


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """A start that was handed over.

    Attributes:
        directory: where the state lies.
        step: steps that Adam has made; ``None`` without moments.
        iteration: of the training.
        consumed_train_samples: of the data.
        schedule: steps of the learning rate's schedule.
        content: a digest of the state.
    """

    directory: str
    step: float | None
    iteration: int
    consumed_train_samples: int
    schedule: int
    content: str

    def resume(self, args: MegatronArguments, scheduler: Scheduler) -> None:
        """Take its place in the data and in the schedule."""
        args.iteration = self.iteration
        args.consumed_train_samples = self.consumed_train_samples
        scheduler.num_steps = self.schedule
        scheduler.step(increment=0)


def hand_over(
    model: TracedModel,
    directory: Path,
    args: MegatronArguments,
    scheduler: Scheduler,
    ranks: Ranks,
    device: torch.device,
) -> Started:
    """Write the state that all ranks loaded; all ranks call it together."""
    told = "handing over the loaded state"
    ranks.from_one(0, told, lambda: shutil.rmtree(directory, ignore_errors=True))
    digests = ranks.exchange(told, lambda: handoff.write(model, directory), device)
    started = Started(
        directory=str(directory.resolve()),
        step=handoff.steps_of(model),
        iteration=args.iteration,
        consumed_train_samples=args.consumed_train_samples,
        schedule=scheduler.num_steps,
        content=fingerprint.digest({"ranks": digests}),
    )
    ranks.from_one(
        0, told, lambda: seal(directory, {"role": "start", **dataclasses.asdict(started)})
    )
    return started
