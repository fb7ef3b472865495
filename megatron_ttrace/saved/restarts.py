# SPDX-License-Identifier: Apache-2.0
"""Run a job, restart it from its checkpoint, and compare: from a command to an answer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from megatron_ttrace.jobs import restarts
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.commands import disclosure
from megatron_ttrace.jobs.commands.command_line import Command
from megatron_ttrace.jobs.settings import Settings, checking
from megatron_ttrace.mcore.checkpoints.buckets import by_parameter
from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, open_checkpoint
from megatron_ttrace.mcore.optimizer import stored_main
from megatron_ttrace.saved.recorded import Moves, Recorded
from megatron_ttrace.saved.recorded import State as RecordedState
from megatron_ttrace.saved.resume import compare, could_not
from megatron_ttrace.trace import owned, shared
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.recorded import Point
from megatron_ttrace.trace.resumed import Restart, Resumed, What, worst
from megatron_ttrace.trace.states import Item, State

_OTHERWISE = "the checkpoint has other values than were saved: give another layout (--into)"
ANSWER = "resume.json"
"""The file with the answer."""


def resume(
    command: Command,
    settings: Settings,
    *,
    nproc: int,
    steps: int,
    into: Sequence[str],
    fork: bool,
    say: Callable[[str], None],
) -> Resumed:
    """Run everything, and write ``resume.json`` in the directory of the settings.

    ``steps`` precede the checkpoint; ``into`` are flags of other layouts.

    Raises:
        TTraceError: when the uninterrupted run or the restart in the same layout gives no state.
    """
    folder = settings.directory.resolve()
    # Nothing twice: every run repeats what is true of all.
    say = functools.cache(say)
    scripts.require_flags(command.script, "ttrace resume")
    plan = restarts.plan(command.arguments, nproc, steps, into, folder)
    from megatron_ttrace.jobs import job as jobs

    began = time.monotonic()
    with shared.claim(folder):
        _clear(folder)
        script = scripts.require(command.script)
        if fork:
            say(f"restarting {script}: importing torch and Megatron")
            fork = jobs.prepare(settings.device, script, arguments=command.arguments)
        runner = _Runner(command, settings, folder, fork, say)
        before = runner.record(plan.uninterrupted)
        if any(Point.SAVED not in rank.numbers for rank in before.ranks):
            raise TTraceError("the job saved nothing: does its script save checkpoints?")
        stored = _Checkpoint(folder / restarts.CHECKPOINT, before)
        answers = list(_answers(plan, runner, before, stored))
        options = [word for layout in into for word in ("--into", layout)]
        words = checking(
            script,
            command.arguments,
            nproc,
            None,
            *("--steps", str(steps), *options),
            command="resume",
        )
        resumed = Resumed(
            verdict=worst([restart.verdict for restart in answers]),
            command=tuple(disclosure.command(["ttrace", *words])),
            iteration=before.steps[steps - 1][0].iteration,
            checkpoint=str(folder / restarts.CHECKPOINT),
            restarts=tuple(answers),
            notices=(*plan.notices, *filter(None, [stored.notice])),
            seconds=time.monotonic() - began,
        )
        owned.write(folder / ANSWER, [json.dumps(resumed.to_json(), indent=1), "\n"])
    return resumed


def _clear(folder: Path) -> None:
    """Remove what an earlier command left. Runs remove what is in their own directories."""
    owned.require(folder, [ANSWER])
    for old in (folder / ANSWER, *folder.glob(f"{restarts.INTO}*")):
        owned.remove(old)


@dataclasses.dataclass
class _Runner:
    """Makes the runs of a plan, one after the other."""

    command: Command
    settings: Settings
    folder: Path
    fork: bool
    say: Callable[[str], None]

    def record(self, run: restarts.Run) -> Recorded:
        """Make a run. Raises ``TTraceError`` with the reason when it fails."""
        from megatron_ttrace.jobs import job as jobs

        order = self.folder / f"{run.name}.order.json"
        run.order.write(order)
        job = jobs.Job(
            script=Path(self.command.script),
            arguments=run.arguments,
            nproc=run.nproc,
            settings=dataclasses.replace(
                self.settings, directory=self.folder / run.name, role="state", overrides=order
            ),
            environment=dict(self.command.environment),
        )
        jobs.record(job, fork=self.fork, say=self.say)
        return Recorded.open(job.directory)


def _answers(
    plan: restarts.Plan, runner: _Runner, before: Recorded, stored: _Checkpoint
) -> Iterator[Restart]:
    """The answer for each restart, the same layout's first.

    A checkpoint that holds other values than were saved may be right for some layouts alone. If it
    was in all of these, one device decides.
    """
    restarted = perturbed = None
    answers: list[Restart] = []

    def compared(after: Recorded, layout: str) -> Restart:
        moves = Moves(perturbed, restarted) if perturbed and restarted else None
        answers.append(
            compare(before, after, layout, stored=stored.read, numbers=stored.numbers, moves=moves)
        )
        return answers[-1]

    runner.say("restarting in the same layout")
    try:
        restarted = runner.record(plan.restarted)
    except TTraceError as error:
        yield could_not("", error)
    else:
        if plan.into or not before.any("is_exact"):
            runner.say("restarting once more, perturbed, for tolerances")
            # Without it following steps are not compared, which is a notice.
            with contextlib.suppress(TTraceError):
                perturbed = runner.record(plan.perturbed)
        stored.also_from(restarted)
        yield compared(restarted, "")

    def again(run: restarts.Run) -> Restart:
        runner.say(f"restarting with {run.layout}")
        try:
            return compared(runner.record(run), run.layout)
        except TTraceError as error:
            return could_not(run.layout, error)

    yield from map(again, plan.into)
    if answers and all(answer.otherwise and not answer.differences for answer in answers):
        alone = restarts.elsewhere(plan)
        yield again(alone) if alone else could_not("another layout", TTraceError(_OTHERWISE))


class _Checkpoint:
    """What a run saved, as it is stored in the checkpoint's folder."""

    def __init__(self, folder: Path, saved: Recorded) -> None:
        self._names = {name: key for rank in saved.ranks for name, key in rank.stored.items()}
        self._checkpoint: Checkpoint | None = None
        self._read: RecordedState | None = None
        self.notice = ""
        self.numbers: Mapping[str, object] = {}
        try:
            pieces = [
                dataclasses.replace(piece, name=self._names.get(piece.name, piece.name))
                for rank in saved.ranks
                for piece in rank.buckets
            ]
            self._checkpoint = by_parameter(open_checkpoint(folder), pieces)
            self.numbers = self._checkpoint.numbers
        except TTraceError as error:
            self.notice = f"saving and loading cannot be distinguished: {error}"

    def also_from(self, restarted: Recorded) -> None:
        """Take what cannot be opened here from what Megatron read in the same layout."""
        if self._checkpoint is not None or any(
            Point.READ not in r.numbers for r in restarted.ranks
        ):
            return
        self._read = restarted.state(Point.READ)
        values = restarted.numbers(Point.READ)
        self.numbers = {name: min(by_rank) for name, by_rank in values.items() if len(by_rank) == 1}
        self.notice = ""

    def read(self, kind: What, name: str) -> torch.Tensor | None:
        """A tensor; ``None`` if it is stored in no logical form."""
        if self._read is not None:
            return self._read.tensor((kind, name)) if (kind, name) in self._read else None
        if self._checkpoint is None:
            return None
        parameter, _, slot = name.partition("/")
        stored = self._names.get(parameter, parameter)
        # A buffer is stored as weights are.
        state = State.WEIGHT if kind is What.BUFFER else State[kind.name]
        match = self._checkpoint.find(Item(state, stored, slot))
        if match is None:
            return None
        data = match[1].read()
        weights = self.read(What.WEIGHT, name) if kind is What.MAIN else None
        return data if weights is None else stored_main(data, weights)
