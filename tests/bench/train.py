# SPDX-License-Identifier: Apache-2.0
"""The training script of the benchmarks: plain and dearer iterations in turns, in one process.

``BENCH`` in the environment is the JSON of a :class:`Plan`. Each rank writes ``rank-R.json`` with
a list of :class:`Turn`, then ends. All turns train on the first iteration's batches.
"""

import megatron_ttrace

megatron_ttrace.enable()  # before Megatron is imported: it may have to run without CUDA

import dataclasses
import functools
import json
import os
import runpy
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.training import training

from megatron_ttrace.jobs import argv
from megatron_ttrace.run import candidate, loop
from megatron_ttrace.run.candidate import CandidateSession
from tests.bench.memory import Peak, Turn

SCRIPT = Path(__file__).resolve().parents[2] / "launch" / "pretrain_gpt.py"
WARM_UP = 2
"""Turns that are not counted: the first allocate memory, and one dear turn its own."""
_NEVER = 1 << 30


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        out: directory for the results.
        pairs: of a plain and a dear iteration.
        tool: what makes an iteration dear: ``ttrace``, ``savers``, ``statistics`` or ``tensor``
            (levels of msprobe), ``none``.
    """

    out: str
    pairs: int
    tool: str


def main(plan: Plan) -> None:
    """Train."""
    if "--ttrace-role" not in argv.words():
        turns = _Turns(plan)
        if plan.tool == "ttrace":
            _trace_in_turns(turns)
        train = training.train

        @functools.wraps(train)
        def watched(*args: Any, **kwargs: Any) -> Any:
            turns.watch()
            return train(*args, **kwargs)

        training.train = watched
    sys.argv[0] = str(SCRIPT)
    runpy.run_path(str(SCRIPT), run_name="__main__")


class _Turns:
    """The iterations of one rank."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.number = -WARM_UP
        self.steps: list[float] = []
        self.report = 0.0
        self._found: list[Turn] = []
        self._probe: Any = None
        self._batches: list[Any] | None = None

    @property
    def is_dear(self) -> bool:
        """Whether this turn is: every second one is."""
        return self.number % 2 == 1

    @property
    def is_last(self) -> bool:
        """Whether no turn follows."""
        return self.number == 2 * self.plan.pairs + 1

    @property
    def is_sampled(self) -> bool:
        """Whether this turn's memory is measured, not its time.

        Of the first turn, before anything dear left memory behind, and of a last pair.
        """
        return self.number == -WARM_UP or self.number >= 2 * self.plan.pairs

    def watch(self) -> None:
        """Called before training starts, when ttrace has wrapped the step."""
        step = training.train_step
        training.train_step = functools.wraps(step)(functools.partial(self._turn, step))

    def timed(self, step: Any) -> Any:
        """Megatron's own step, timed."""

        @functools.wraps(step)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = step(*args, **kwargs)
            self.steps.append(time.perf_counter() - began)
            return result

        return wrapped

    def _turn(self, step: Any, forward: Any, iterator: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps = []
        dist.barrier()
        with Peak() if self.is_sampled else nullcontext(Peak()) as peak:
            began = time.perf_counter()
            with self._probed(args[0]):
                result = step(forward, self._same(iterator), *args, **kwargs)
            seconds = time.perf_counter() - began
        self._found.append(
            Turn(
                self.number,
                self.is_dear,
                seconds - self.report,
                self.report,
                self.steps,
                peak.anonymous,
                peak.resident,
            )
        )
        if self.is_last:
            self._end()
        self.number += 1
        return result

    def _same(self, iterator: Any) -> Any:
        """The first iteration's batches, each time."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.rerun_state_machine import RerunDataIterator

        if iterator is None:
            return None
        if self._batches is None:
            self._batches = [next(iterator) for _ in range(get_num_microbatches())]
        return RerunDataIterator(iter([dict(batch) for batch in self._batches]))

    def _probed(self, model: Any) -> Any:
        if self.plan.tool not in ("statistics", "tensor") or not self.is_dear:
            return nullcontext()
        from tests.bench.probe import Probe

        if self._probe is None:
            self._probe = Probe(self.plan.tool, Path(self.plan.out))
        return self._probe.dumping(model)

    def _end(self) -> None:
        path = Path(self.plan.out, f"rank-{dist.get_rank()}.json")
        path.write_text(json.dumps([dataclasses.asdict(turn) for turn in self._found]))
        dist.barrier()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _trace_in_turns(turns: _Turns) -> None:
    """Trace the first iteration again in every dear turn, and conclude after the last one.

    A user traces different iterations. Each of them needs a trace of the reference, of gigabytes.
    """
    around, conclude = loop.Watch.step, CandidateSession._conclude

    def around_step(watch: Any, run: Any, iterator: Any) -> Any:
        watch._step = 0 if turns.is_dear else _NEVER
        session = watch._session
        result = around(watch, turns.timed(run), iterator)
        if turns.is_dear:
            assert session is not None, "the run was not checked"
            session.finished, watch._session = False, session
        return result

    def conclude_last(session: Any, *args: Any) -> Any:
        if turns.is_last:
            began = time.perf_counter()
            code = conclude(session, *args)
            turns.report = time.perf_counter() - began
            return code
        session.comparison._measured.clear()
        session.comparison.counted.clear()
        return None

    loop.Watch.step = around_step
    CandidateSession._conclude = conclude_last
    # Training has begun when a turn is the first step again.
    candidate.as_training_begins = lambda model, args, initial: initial  # type: ignore[assignment]
    # As before a later traced step, there were steps.
    CandidateSession._warm_up = lambda *_: None  # type: ignore[method-assign]


if __name__ == "__main__":
    main(Plan(**json.loads(os.environ["BENCH"])))
