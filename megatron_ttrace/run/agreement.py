# SPDX-License-Identifier: Apache-2.0
"""All ranks check, or all give up: they agree before and after each collective of ours.

A rank that failed must not leave the others in a collective. So every part of a check ends at a
numbered point where all ranks meet. They do so over the job's key-value store, with a few messages
per rank and no collective. A rank that fails announces it at once, which wakes all ranks that wait
at a point. Some failures end the job (Megatron's own step failed on one rank, or the training state
could not be restored): while steps are traced, a thread on every rank watches for that.
"""

import contextlib
import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any, Self

import torch
import torch.distributed as dist

from megatron_ttrace.jobs import failures
from megatron_ttrace.run import channel
from megatron_ttrace.trace import codec, ends
from megatron_ttrace.trace.errors import ExitCode, TTraceError, one_line

_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.005
_CROWD = 10
"""Ranks from which on the first pause is not longer: ten times as long as one rank's."""
_WATCH_SECONDS = 1.0
_BEAT_SECONDS = 5.0
_REPORT_AFTER_SECONDS = 10.0
_FAREWELL_SECONDS = 5.0
_RANKS_PER_SECOND = 2000
"""Ranks that may poll the store per second while they wait."""

_OK, _FAILED = "ok", "failed"


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a check or a job ended: the first failure of any rank.

    Attributes:
        rank: the rank that failed.
        host: its host.
        task: what it was doing.
        why: the error, in one line (a reference's last lines may follow).
        of_everyone: whether the reason concerns the whole job, not this rank.
        lost: whether the rank only lost its connection to the others.
    """

    rank: int
    host: str
    task: str
    why: str
    of_everyone: bool = False
    lost: bool = False

    @property
    def line(self) -> str:
        """One line for the user."""
        if self.of_everyone:
            return self.why
        return f"rank {self.rank} on {self.host}, {self.task}: {self.why}"

    def with_ending(self, ending: str) -> str:
        """The line with what follows from it; the last lines of a log come after that."""
        line, *lines = self.line.split("\n")
        return "\n".join([f"{line}{ending}", *lines])

    @classmethod
    def of_message(cls, text: str) -> Self:
        """The cause that another rank announced. Raises ``ValueError`` when it is not one."""
        return codec.decode(cls, json.loads(text))


class _CausedError(TTraceError):
    def __init__(self, cause: Cause) -> None:
        super().__init__(cause.line)
        self.cause = cause


class GivenUpError(_CausedError):
    """The check is over on every rank; training can continue."""


class EndError(_CausedError):
    """The job must end: a rank is lost, or its training state."""


class _LateError(TTraceError):
    """A rank has not answered within the time limit."""


class Ranks:
    """This rank's end of all agreements of one job.

    ``device`` has the tensors by which ranks exchange data: the model's, once there is one.
    """

    def __init__(self, timeout: float, *, store: Any = None, rank: int = 0, size: int = 1) -> None:
        """Find the other ranks.

        ``timeout`` are the seconds without a sign of life after which a rank counts as lost. By
        default the key-value store is the job's own, or one in memory for a single rank, and rank
        and size are those of the process group.
        """
        if store is None and dist.is_initialized():
            rank, size = dist.get_rank(), dist.get_world_size()
            # The only handle on the store of init_process_group; torch's elastic code uses it, too.
            store = dist.distributed_c10d._get_default_store() if size > 1 else None
        self.rank, self.size = rank, size
        self.device = torch.device("cpu")
        self._timeout = timeout
        self._store = dist.HashStore() if store is None else store  # type: ignore[attr-defined]
        self._counts = {"check": 0, "back": 0}
        self._given_up: GivenUpError | None = None

    def meet(self, task: str) -> None:
        """Wait for all ranks. Raises as :meth:`together`."""
        self.together(task, lambda: None)

    def together[T](self, task: str, work: Callable[[], T]) -> T:
        """Do something on every rank; return when all ranks have.

        Raises:
            GivenUpError: on every rank, when it failed on any.
            EndError: when the other ranks cannot be reached.
        """
        if self._given_up is not None:
            raise self._given_up
        try:
            value = work()
        except (GivenUpError, EndError):
            raise
        except Exception as error:
            raise self.give_up(error, task) from error
        except BaseException as error:
            self.give_up(error, task)  # interrupted: the others should not wait
            raise
        self._arrive("check", task)
        return value

    def from_one(self, source: int, task: str, work: Callable[[], Any]) -> Any:
        """Do something on one rank; all ranks get its result, a JSON value.

        Raises:
            GivenUpError: on every rank, when it failed.
        """
        key = f"check/{self._counts['check'] + 1}/value"

        def publish() -> None:
            if self.rank == source:
                with self._heartbeat():
                    value = work()
                self._store.set(_key(key), json.dumps(value))

        self.together(task, publish)
        return json.loads(self._ask(lambda: self._store.get(_key(key))).decode())

    def exchange(self, task: str, value: Callable[[], Any]) -> list[Any]:
        """The JSON values of all ranks, by rank, on every rank.

        Raises:
            GivenUpError: on every rank, when any could not provide one.
            EndError: when the collective failed.
        """
        text = self.together(task, lambda: channel.encode(value()))
        if self.size == 1:
            return [channel.decode(text, 0)]
        with self.watching():
            length = torch.tensor([len(text)], dtype=torch.int64, device=self.device)
            lengths = [int(size.item()) for size in self._moved(task, channel.gather, length)]
            message = self.together(task, lambda: channel.buffer(text, max(lengths), self.device))
            messages = self._moved(task, channel.gather, message)
            return [
                channel.decode(bytes(received[:size].cpu().numpy()), rank)
                for rank, (received, size) in enumerate(zip(messages, lengths, strict=True))
            ]

    def collect[T](
        self, task: str, value: Callable[[], T], merge: Callable[[list[T]], T]
    ) -> T | None:
        """The merged JSON values of all ranks on the last rank; ``None`` on all others.

        The values travel up a tree, and each rank merges what it receives with its own. So no rank
        has more of them than what :func:`channel.FAN_IN` ranks send, merged.

        Raises:
            GivenUpError: on every rank, when any could not provide or merge its part.
            EndError: when a message could not be sent.
        """
        merged = self.together(task, value)
        groups, up = channel.tree(self.rank, self.size)
        failed = False
        with self.watching():
            for group in groups:
                parts = [self._moved(task, channel.receive, rank, self.device) for rank in group]
                try:
                    if not failed:
                        values = map(channel.unpacked, parts, group)
                        merged = merge([merged, *values])
                except Exception as error:  # noqa: BLE001 - the rank above still waits for a message
                    self.give_up(error, task)
                    failed = True
            if up is not None:
                message = b"" if failed else channel.packed(merged)
                self._moved(task, channel.send, message, up, self.device)

        self.meet(task)
        return merged if up is None else None

    def reduce[T](self, task: str, value: Callable[[], T], merge: Callable[[list[T]], T]) -> T:
        """The merged JSON values of all ranks on every rank. Raises as :meth:`collect`."""
        merged = self.collect(task, value, merge)
        if self.size == 1:
            return merged  # type: ignore[return-value]
        text = self.together(task, lambda: b"" if merged is None else channel.packed(merged))
        with self.watching():
            message = self._moved(task, channel.broadcast, text, self.size - 1, self.device)
        return self.together(task, lambda: channel.unpacked(message, self.size - 1))  # type: ignore[no-any-return]

    def _moved[*P, T](self, task: str, move: Callable[[*P], T], *args: *P) -> T:
        """Communicate. A rank that fails in it leaves the others waiting."""
        try:
            return move(*args)
        except Exception as error:
            raise self.end(error, task) from error

    def give_up(self, error: BaseException, task: str) -> GivenUpError | EndError:
        """Announce that this rank failed; returns the error to raise."""
        if isinstance(error, GivenUpError | EndError):
            return error
        if self._given_up is None:
            cause = self._announce("failed", self._cause(error, task))
            self._given_up = GivenUpError(cause)
            self._wake()
        return self._given_up

    def end(self, error: BaseException, task: str) -> EndError:
        """Announce that the job must end; returns the error to raise."""
        if isinstance(error, EndError):
            return error
        cause = self._announce("fatal", self._cause(error, task))
        self._announce("failed", cause)
        self._wake()
        return EndError(cause)

    def all_back(self) -> None:
        """Wait until every rank has restored its training state, at most for the time limit.

        A slower rank is not lost: training goes on, and waits for it in its next collective. If
        that rank cannot restore its state, it ends the job itself.

        Raises:
            EndError: when the store is lost.
        """
        task = "restoring the training state"
        try:
            self._arrive("back", task)
        except _LateError as late:
            if self.rank in (0, self.size - 1):
                print(f"ttrace: {task}: {late}; training waits for it", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Within this context the process ends as soon as another rank announces that the job must.

        This rank may be in a collective of Megatron's that the other rank will never join.
        """
        if self.size == 1:
            yield
            return
        over = threading.Event()
        pause = max(_WATCH_SECONDS, self.size / _RANKS_PER_SECOND)
        thread = threading.Thread(target=self._watch, args=(over, pause), daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()

    @classmethod
    def waiting_code(cls) -> CodeType:
        """The code in which a rank waits for the others."""
        return cls._await.__code__

    def farewell(self) -> None:
        """Let rank 0, which may hold the store, leave last."""
        with contextlib.suppress(Exception):
            left = self._store.add(_key("left"), 1)
            deadline = time.monotonic() + _FAREWELL_SECONDS
            while self.rank == 0 and left < self.size and time.monotonic() < deadline:
                time.sleep(0.02)
                left = self._store.add(_key("left"), 0)

    def _watch(self, over: threading.Event, pause: float) -> None:
        lost = 0
        while not over.wait(pause):
            try:
                if not self._store.check([_key("fatal")]):
                    lost = 0
                    continue
                cause = Cause.of_message(self._store.get(_key("fatal")).decode())
            except Exception:  # noqa: BLE001 - whatever a lost store raises
                lost += 1
                if lost < 2 or over.is_set():
                    continue
                cause = self._lost().cause
            if over.is_set():
                return
            say_end(cause, self.rank)
            with contextlib.suppress(Exception):
                self._store.add(_key("left"), 1)
            os._exit(int(ExitCode.COULD_NOT_CHECK))

    def _arrive(self, lane: str, task: str) -> None:
        self._counts[lane] += 1
        at = f"{lane}/{self._counts[lane]}"
        self._ask(lambda: self._store.set(_key(f"{at}/{self.rank}"), "1"))
        if self._ask(lambda: self._store.add(_key(f"{at}/arrived"), 1)) == self.size:
            self._ask(lambda: self._store.compare_set(_key(f"{at}/done"), "", _OK))
        try:
            if self._await(at, task) == _OK:
                return
        except _LateError as late:
            if lane == "check":
                raise self.give_up(late, task) from late
            raise
        cause = Cause.of_message(self._ask(lambda: self._store.get(_key("failed"))).decode())
        if self._ask(lambda: self._store.check([_key("fatal")])):
            raise EndError(cause)
        self._given_up = GivenUpError(cause)
        raise self._given_up

    def _await(self, at: str, task: str) -> str:
        """How a point ended. Raises ``_LateError`` when a rank shows no sign of life for long."""
        began = alive = time.monotonic()
        beat, asked, is_reported = -1, began, False
        pause = _FIRST_PAUSE * min(self.size, _CROWD)
        longest = max(_LONGEST_PAUSE, self.size / _RANKS_PER_SECOND)
        while not self._ask(lambda: self._store.check([_key(f"{at}/done")])):
            now = time.monotonic()
            if now - asked > min(_BEAT_SECONDS, self._timeout / 4):
                asked = now
                beats = self._ask(lambda: self._store.add(_key("beat"), 0))
                if beats != beat:
                    beat, alive = beats, now if beat >= 0 else alive
            if now - alive > self._timeout:
                raise _LateError(f"no answer from {self._missing(at)} within {self._timeout:.0f} s")
            if now - began > _REPORT_AFTER_SECONDS and not is_reported:
                is_reported = True
                if self.rank in (0, self.size - 1):
                    print(f"ttrace: waiting for {self._missing(at)}: {task}", flush=True)
            time.sleep(pause)
            pause = min(2 * pause, longest)
        return str(self._ask(lambda: self._store.get(_key(f"{at}/done"))).decode())

    def _missing(self, at: str) -> str:
        missing = [
            rank
            for rank in range(self.size)
            if not self._ask(lambda rank=rank: self._store.check([_key(f"{at}/{rank}")]))  # type: ignore[misc]
        ]
        shown = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        return f"rank{'s' if len(missing) > 1 else ''} {shown}"

    @contextlib.contextmanager
    def _heartbeat(self) -> Iterator[None]:
        """Tell the others regularly that this rank is alive: its work may take long."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(min(_BEAT_SECONDS, self._timeout / 4)):
                with contextlib.suppress(Exception):
                    self._store.add(_key("beat"), 1)

        threading.Thread(target=beat, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def _announce(self, key: str, cause: Cause) -> Cause:
        """Leave the cause for the others; returns the one that was announced first."""
        try:
            text = json.dumps(dataclasses.asdict(cause))
            return Cause.of_message(self._store.compare_set(_key(key), "", text).decode())
        except Exception:  # noqa: BLE001 - the store is lost: there is no rank to tell
            return cause

    def _wake(self) -> None:
        """Let no rank wait for this one, neither at the current point nor at the next."""
        count = self._counts["check"]
        with contextlib.suppress(Exception):
            for number in (count, count + 1):
                self._store.compare_set(_key(f"check/{number}/done"), "", _FAILED)

    def _ask[T](self, question: Callable[[], T]) -> T:
        try:
            return question()
        except RuntimeError as error:  # what torch's stores raise, a lost connection included
            raise self._lost() from error

    def _lost(self) -> EndError:
        why = "lost the connection to the job's key-value store (rank 0 or the launcher ended)"
        task = "agreeing with other ranks"
        return EndError(Cause(self.rank, socket.gethostname(), task, why, lost=True))

    def _cause(self, error: BaseException, task: str) -> Cause:
        ours = isinstance(error, TTraceError)
        return Cause(
            self.rank,
            socket.gethostname(),
            task,
            str(error) if ours else one_line(error),
            of_everyone=self.size == 1 or (ours and self.rank == 0),
        )


def say_end(
    cause: Cause, rank: int, error: BaseException | None = None, ending: str = "; the job ends"
) -> None:
    """Write the record of why this rank ends; rank 0 and the rank that failed also print it.

    ``error`` announced the cause; if this rank failed, its ``__cause__`` is what was raised.
    ``ending`` is that of the printed line.
    """
    code, follows = int(ExitCode.COULD_NOT_CHECK), rank != cause.rank or cause.lost
    origin = error.__cause__ if error is not None else None
    while isinstance(origin, TTraceError) and origin.__cause__ is not None:
        origin = origin.__cause__
    if origin is not None and not isinstance(origin, TTraceError):
        record = failures.record_of(origin, code, follows=follows)
        if record.frames:  # else the cause says which part of the check failed
            ends.write(record)
    if rank in (0, cause.rank):
        ends.tell(cause.with_ending(ending), code, follows=follows)
    else:
        ends.write(ends.EndRecord(code=code, at=0, message=cause.line, follows=follows))
    sys.stdout.flush()


def _key(name: str) -> str:
    return f"ttrace/{name}"
