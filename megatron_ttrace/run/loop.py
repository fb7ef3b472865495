# SPDX-License-Identifier: Apache-2.0
"""The points of a training loop at which a run under check does something.

Each loop has a front (``mcore/fronts/``) that calls a :class:`Watch` before its model is built,
when it is built, and for each training step.

A traced step is a *rehearsal*: start values are put in, the loop's own ``train_step`` runs on the
iteration's real batches, then everything that a step changes is restored and the real training step
runs. So a traced run trains bitwise like an untraced one. With ``--ttrace-exit`` nothing is
restored.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron_ttrace.capture.calls import CallTap
from megatron_ttrace.capture.executed import ExecutedTap
from megatron_ttrace.jobs import edited, provenance
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import fronts, quiet
from megatron_ttrace.run.agreement import EndError, GivenUpError, Ranks, say_end
from megatron_ttrace.trace.errors import DEBUG, ExitCode, TTraceError

if TYPE_CHECKING:
    import torch

    from megatron_ttrace.mcore.arguments import MegatronArguments, Optimizer, Scheduler
    from megatron_ttrace.run.candidate import CandidateSession
    from megatron_ttrace.run.reference_run import ReferenceSession

    type Session = CandidateSession | ReferenceSession
    from megatron_ttrace.run.stall import Watchdog
    from megatron_ttrace.run.states import StateSession


def install(settings: Settings) -> None:
    """Watch the loop of this process, once: Megatron may parse its arguments again."""
    front = fronts.current()
    if front.is_wrapped():
        return
    if settings.role != "reference" and settings.bug is not None:
        introduce(settings.bug)
    front.wrap(Watch(settings))


def introduce(bug: str) -> None:
    """Put the fault of ``--ttrace-bug`` into the run under test; nothing else here knows of faults.

    On the candidate's ranks only, never in a reference run, after Megatron has parsed its arguments
    and before it builds anything.

    Raises:
        TTraceError: when there is no fault of this name, or this Megatron lacks its code.
    """
    # By name: the known bugs are in a room above this one.
    pkgutil.resolve_name("megatron_ttrace.evaluation.bugs.patching:introduce")(bug)


class Watch:
    """One run under check. An error of ours ends the check on all ranks, but not the training."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._ends_job = settings.exit_after or settings.role == "reference"
        self._session: Session | None = None
        self._recorder: StateSession | None = None
        self._step = 0
        self._watchdog: Watchdog | None = None
        self._executed = ExecutedTap(edited.folders())
        self._calls = CallTap()
        self._building = contextlib.ExitStack()
        if settings.role == "candidate":
            self._executed.start()
            self._calls.start()

    @functools.cached_property
    def _ranks(self) -> Ranks:
        # Not earlier: the process group must exist. Not twice: points are numbered.
        return Ranks(self._settings.timeout)

    def building(self) -> None:
        """See :class:`megatron_ttrace.mcore.fronts.front.Watch`."""
        if self._settings.role == "state":
            self._recorder = self._attempt("preparing the recording", self._make_recorder)
        else:
            with quiet.python_state_kept():
                self._session = self._attempt("preparing the check", self._make_session)
        if self._session is not None and self._ends_job:
            from megatron_ttrace.capture.initial import new_memory_is_nan

            self._building.enter_context(new_memory_is_nan())

    def built(
        self, chunks: list[torch.nn.Module], optimizer: Optimizer, scheduler: Scheduler
    ) -> None:
        """See :class:`megatron_ttrace.mcore.fronts.front.Watch`."""
        self._building.close()
        if self._session is not None and self._ends_job:
            from megatron_ttrace.capture.initial import clear_scratch

            clear_scratch(chunks)
        if (recorder := self._recorder) is not None:
            self._attempt(
                "preparing the recording",
                lambda: self._begin(recorder, chunks, optimizer, scheduler),
            )
        if (session := self._session) is not None:
            with quiet.python_state_kept():
                self._attempt(
                    "preparing the check",
                    lambda: self._begin(session, chunks, optimizer, scheduler),
                )

    def step(self, run: Callable[[], Any], iterator: Any) -> Any:
        """See :class:`megatron_ttrace.mcore.fronts.front.Watch`."""
        self._step += 1
        if self._recorder is not None:
            return self._record(self._recorder, run, iterator)
        session = self._session
        if session is not None and self._step in session.traced:
            code = self._attempt("checking", lambda: session.before_step(self._step, run, iterator))
            if code is not None and self._ends_job:
                self._leave(code)
            if session.finished:
                self._session = None
                self._stop_watching()
        return run()

    def _make_recorder(self) -> StateSession:
        from megatron_ttrace.run.states import StateSession

        recorder = StateSession(fronts.current().arguments(), self._settings, self._ranks)
        self._watch_ranks(ends_check=True)
        return recorder

    def _record(self, recorder: StateSession, step: Callable[[], Any], iterator: Any) -> Any:
        """A training step that is recorded; the last one ends the job."""
        self._attempt("recording", lambda: recorder.before_step(self._step, iterator))
        with recorder.running():
            result = step()
        code = self._attempt("recording", lambda: recorder.after_step(result))
        if code is not None:
            self._leave(code)
        return result

    def _watch_ranks(self, *, ends_check: bool) -> None:
        from megatron_ttrace.run.stall import Watchdog

        ranks = self._ranks
        if ranks.size > 1:
            logs = provenance.placed(self._settings.directory).absolute() / "logs"
            self._watchdog = Watchdog(logs, ranks.rank, ranks.size, ends_check=ends_check)

    def _begin(self, session: Session | StateSession, *built: Any) -> None:
        session.begin(*built)
        if self._watchdog is not None:
            self._watchdog.knows(session.model.names, session.model.mesh)

    def _stop_watching(self) -> None:
        if self._watchdog is not None:
            self._watchdog.stop()

    def _make_session(self) -> Session:
        from megatron_ttrace.run.candidate import CandidateSession

        args, settings, ranks = fronts.current().arguments(), self._settings, self._ranks
        if settings.role == "reference":
            return self._reference(args)
        session = CandidateSession(args, settings, ranks, self._executed, self._calls)
        self._watch_ranks(ends_check=settings.exit_after)
        return session

    def _reference(self, args: MegatronArguments) -> Session:
        """A reference's, on one device or on several ranks."""
        from megatron_ttrace.run import requirements
        from megatron_ttrace.run.launch import Order

        requirements.complete(args, self._settings)
        if self._settings.overrides is None:
            raise TTraceError("--ttrace-role reference is internal: start the candidate instead")
        order = Order.read(self._settings.overrides)
        if order.layout is None:
            from megatron_ttrace.run.reference_run import ReferenceSession as Kind
        else:
            from megatron_ttrace.run.sharded_reference import ShardedReferenceSession as Kind
        return Kind(args, self._settings, self._ranks, order)

    def _attempt[T](self, task: str, work: Callable[[], T]) -> T | None:
        """Run a part of the check on all ranks; if it fails on any, all give up or exit."""
        try:
            return self._ranks.together(task, work)
        except EndError as error:
            _show(error)
            say_end(error.cause, self._ranks.rank, error)
            self._leave(ExitCode.COULD_NOT_CHECK)
        except GivenUpError as error:
            _show(error)
            self._give_up(error)
        return None

    def _give_up(self, error: GivenUpError) -> None:
        cause = error.cause
        judged = self._session is not None and self._session.judged
        self._session = None
        self._stop_watching()
        self._executed.stop()
        self._calls.stop()
        if self._ends_job:
            say_end(cause, self._ranks.rank, error, ending="")
            self._leave(ExitCode.COULD_NOT_CHECK)
        if self._ranks.rank in (0, cause.rank):
            ending = "; training goes on, UNCHECKED"
            if judged:
                ending = "; the verdict stands, training goes on"
            print(f"ttrace: {cause.with_ending(ending)}", file=sys.stderr, flush=True)

    def _leave(self, code: int) -> None:
        """End this process with the contract's exit code, without Megatron's shutdown.

        ``os._exit`` after flushing: the interpreter's shutdown with live process groups can hang or
        change the exit code. All files of ours are closed by now.
        """
        if code != ExitCode.COULD_NOT_CHECK:
            try:
                self._ranks.meet("leaving")
            except (GivenUpError, EndError) as error:
                say_end(error.cause, self._ranks.rank, error, ending="")
                code = ExitCode.COULD_NOT_CHECK
        self._ranks.farewell()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(code))


def _show(error: BaseException) -> None:
    """Print where an unexpected error came from, with ``TTRACE_DEBUG`` and on its own rank."""
    if os.environ.get(DEBUG) and error.__cause__ is not None:
        traceback.print_exception(error.__cause__)
