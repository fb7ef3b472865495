# SPDX-License-Identifier: Apache-2.0
"""Find a reference for this run (``jobs/reference_cache.py``), or start the run that makes one."""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Self

from megatron_ttrace import cpu
from megatron_ttrace.compare.sharding import Divided
from megatron_ttrace.jobs import argv, fingerprint, provenance, reference_cache
from megatron_ttrace.jobs import script as scripts
from megatron_ttrace.jobs.processes import forkserver, ranks
from megatron_ttrace.jobs.processes.child import environment_of, run_subprocess
from megatron_ttrace.jobs.processes.logs import (
    how_it_ended,
    last_lines,
    port_was_taken,
    reason_of,
    record_of,
)
from megatron_ttrace.jobs.processes.progress import OF_REFERENCE, Echo, print_to, say
from megatron_ttrace.jobs.processes.waiting import OutOfTimeError
from megatron_ttrace.jobs.reference_arguments import overrides_of
from megatron_ttrace.jobs.reference_layout import Layout
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.run.separation import Separation
from megatron_ttrace.run.start.handoff import Started
from megatron_ttrace.trace import codec, owned, shared
from megatron_ttrace.trace.errors import TTraceError, one_line
from megatron_ttrace.trace.meta import ReferenceMeta
from megatron_ttrace.trace.sealing import CHECKSUM
from megatron_ttrace.trace.store import META, TRACED, atomic_write, meta_as, verify

ORDER = "overrides.json"
_POLL_SECONDS = 0.005
_LOG, _REPLAY_LOG = "reference.log", "replay.log"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The instructions for a reference run, in its :data:`ORDER` file.

    Attributes:
        overrides: Megatron's arguments that it takes over (``jobs/reference_arguments.py``).
        fingerprint: digest of ``identity``.
        identity: of the job that the reference is made for.
        directory: where the trace is written.
        started: the candidate's start if it was loaded from a checkpoint.
        separation: the losses' shares to find with an existing reference, instead of making one.
        layout: of a reference on several ranks.
        divided: by how much each tensor is divided in this layout.
    """

    overrides: dict[str, Any]
    fingerprint: str
    identity: dict[str, Any]
    directory: str
    started: Started | None = None
    separation: Separation | None = None
    layout: Layout | None = None
    divided: Divided = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        """From the file."""
        return codec.decode(cls, json.loads(path.read_text(encoding="utf-8")))


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """What starts another run of this process's script.

    Attributes:
        command: the program, its script and words, with those for a reference.
        environment: all variables.
    """

    command: tuple[str, ...]
    environment: dict[str, str]

    @classmethod
    def now(cls, settings: Settings) -> Self:
        """As variables are at this moment; words as the script was given them."""
        words = [*argv.given(), *argv.ours(), *shlex.split(settings.reference_args)]
        return cls((*_program(), *words, "--ttrace-role", "reference"), dict(os.environ))


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """The reference that a candidate needs, as all was when it was ordered.

    Megatron adds to its arguments while it builds the model, and the script may change its own
    words and variables.

    Attributes:
        identity: of the candidate's job.
        overrides: Megatron's arguments that the reference takes over.
        experts: whether the model has experts.
        settings: the candidate's; its directory holds wherever the script goes meanwhile.
        started: its start if it was loaded from a checkpoint.
        origin: what starts the reference.
        cache: of references, if there is one.
        made: the directory in which it is made, once that has begun.
    """

    identity: dict[str, Any]
    overrides: dict[str, Any]
    experts: bool
    settings: Settings
    started: Started | None
    origin: Origin
    cache: Path | None = None
    made: list[Path] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, slots=True)
class PendingReference:
    """A reference that was ordered.

    Attributes:
        complete: waits for it, and returns its directory, and the checksum of the ``meta.json``
            that was verified with all its files; or raises ``TTraceError``, when the user's
            reference does not fit or is damaged, or making one failed.
        made: the directory in which it is made, once that has begun: one, at most.
        future: of ``complete``, if it is found or made in a thread of its own.
    """

    complete: Callable[[], tuple[str, str]]
    made: Sequence[Path] = ()
    future: Future[tuple[str, str]] | None = None

    def announced(self) -> str:
        """Where a reference is that can be compared with before it was replayed.

        Waits for it; empty when it is complete, or may not be read earlier.
        """
        while self.future is not None and not self.future.done():
            if self.made and (self.made[0] / TRACED).exists():
                return str(self.made[0])
            wait([self.future], _POLL_SECONDS)
        return ""


def order(args: MegatronArguments, settings: Settings, started: Started | None) -> PendingReference:
    """Order a reference trace that fits this candidate. Called on rank 0 only.

    ``started`` is the candidate's start if it was loaded from a checkpoint. If :func:`is_apart`, it
    is found or made at once, in a thread of its own, else when it is waited for.
    """
    apart = is_apart(settings)
    place = settings.directory.absolute() if apart else settings.directory
    wanted = Wanted(
        identity=fingerprint.identity(args, settings),
        overrides=overrides_of(args),
        experts=bool(args.num_experts),
        settings=dataclasses.replace(settings, directory=place),
        started=started,
        origin=Origin.now(settings),
        cache=reference_cache.place(),
    )
    ensure, log = functools.partial(_ensure, wanted), sys.stdout
    if not apart:
        return PendingReference(ensure)

    def ensure_apart() -> tuple[str, str]:
        print_to(log)
        try:
            return ensure()
        except Exception as error:
            # Until then nobody asks, and the last line would say that it is being made.
            reason = str(error).partition("\n")[0] or one_line(error)
            say(f"{reason}: the check ends as soon as the ranks need it")
            raise

    # Nothing waits for its thread: ranks that are forks end without an interpreter's shutdown.
    try:
        future = ThreadPoolExecutor(1, "reference").submit(ensure_apart)
    except RuntimeError:  # a limit leaves no room for a thread
        return PendingReference(ensure)
    return PendingReference(future.result, wanted.made, future)


def is_apart(settings: Settings) -> bool:
    """Whether a reference is made while the candidate's ranks build their models.

    In a check of its own on a CPU. On a GPU it needs the memory, and training may, too. One that
    exists is looked at before: if it does not fit, nobody should wait for models.
    """
    if settings.reference is not None or settings.reference_layout is not None:
        return False
    return cpu.active() and forkserver.available()


def _ensure(wanted: Wanted) -> tuple[str, str]:
    """The directory and checksum of what was ordered."""
    identity, settings = wanted.identity, wanted.settings
    if wanted.started is not None:
        start = dataclasses.asdict(wanted.started)
        identity["start"] = {name: value for name, value in start.items() if name != "directory"}
    if settings.reference is not None:
        document = verify(settings.reference)
        meta = meta_as(ReferenceMeta, settings.reference, document)
        difference = fingerprint.other_megatron(identity, meta.identity)
        if difference and not settings.allow_other_megatron:
            raise TTraceError(f"--ttrace-reference {settings.reference}: {difference}")
        differences = fingerprint.differences(
            identity, meta.identity, any_megatron=settings.allow_other_megatron
        )
        modules = {
            name: known
            for name, known in meta.modules.items()
            if not (settings.allow_other_megatron and name.startswith("megatron."))
        }
        if module := fingerprint.changed(modules):
            differences.append(f"module {module}, or a variable that it reads, is different here")
        if file := fingerprint.changed_file(meta.reads, absent=False):
            differences.append(f"{file} is different here")
        if differences:
            raise TTraceError(
                f"--ttrace-reference {settings.reference} has a different configuration: "
                + "; ".join(differences[:3])
                + ". Omit the flag to make a matching reference"
            )
        return str(settings.reference), str(document[CHECKSUM])
    directory = settings.directory / "reference"
    name = fingerprint.digest(identity)
    checksum = reference_cache.obtain(
        directory, wanted.cache, name, lambda aside: _make(aside, name, wanted), settings.timeout
    )
    return str(directory), checksum


def _make(home: Path, name: str, wanted: Wanted) -> None:
    settings, overrides = wanted.settings, wanted.overrides
    # Reports are for others to read, tensors only in a cache that says so.
    owned.make(home, reference_cache.mode())
    divided: Divided = ()
    where, log = "one device", settings.directory / _LOG
    if layout := settings.reference_layout:
        from megatron_ttrace.run import trial

        padding = overrides["make_vocab_size_divisible_by"]
        overrides = {**overrides, **layout.overrides(padding, experts=wanted.experts)}
        divided = trial.checked(layout, settings)
        where = f"{layout.ranks} ranks ({layout})"
        log = ranks.log_of(settings.directory / shared.REFERENCE_LOGS, 0)
    order = Order(
        overrides=overrides,
        fingerprint=name,
        identity=wanted.identity,
        directory=str(home.resolve()),
        started=wanted.started,
        layout=layout,
        divided=divided,
    )
    say(f"making the reference on {where} (log: {provenance.shown(log)})")
    began = time.monotonic()
    wanted.made.append(home)
    _run(order, wanted.origin, log, settings.timeout)
    say(f"reference made in {time.monotonic() - began:.1f} s")


def say_next(meta: ReferenceMeta) -> None:
    """Print what follows, and how long the reference's step took."""
    where = "the reference" if meta.layout else "one device"
    took = f" ({where} took {meta.seconds:.1f} s)" if meta.seconds is not None else ""
    say(f"next, all ranks trace the step{took}")


@contextlib.contextmanager
def replayed(
    args: MegatronArguments,
    settings: Settings,
    started: Started | None,
    reference: ReferenceMeta,
    separation: Separation,
) -> Iterator[Path]:
    """Replay a reference to separate losses; yields the directory of the shares.

    ``started`` is the candidate's start if it was loaded from a checkpoint.

    Raises:
        TTraceError: when the replay failed.
    """
    log = settings.directory / _REPLAY_LOG
    say(f"replaying the reference once per loss (log: {log})")
    home = settings.directory / f"{shared.SHARES}{shared.run_id()}"
    owned.make(home, owned.PRIVATE_FOLDER)
    try:
        order = Order(
            overrides=overrides_of(args),
            fingerprint=reference.fingerprint,
            identity=reference.identity,
            directory=str(home.resolve()),
            started=started,
            separation=separation,
        )
        # Without it there is still a verdict, so it must not use up the patience of others.
        _run(order, Origin.now(settings), log, settings.timeout / 2)
        yield home
    finally:
        owned.discard(home)


def _run(order: Order, origin: Origin, log: Path, timeout: float) -> None:
    """Start a reference run and wait for its end. Raises ``TTraceError`` when it failed."""
    home = Path(order.directory)
    atomic_write(home / ORDER, json.dumps(dataclasses.asdict(order), default=str))
    command = [*origin.command, "--ttrace-overrides", str(home / ORDER)]
    logs = [log]
    if order.layout is not None:
        logs = [ranks.log_of(log.parent, rank) for rank in range(order.layout.ranks)]
    for _ in range(2):
        code, log = _run_ranks(command, origin.environment, logs, timeout)
        if code == 0 or not port_was_taken(log):
            break
    shown = provenance.shown(log)
    if code != 0:
        if reason := reason_of(log) if code > 0 else "":
            raise TTraceError(f"the reference run failed: {reason} (log: {shown})")
        lines = last_lines(log).replace(str(log), str(shown))
        raise TTraceError(f"the reference run {how_it_ended(code)}\n{lines}")
    if not (home / META).exists():
        raise TTraceError(f"the reference run ended without a complete trace; see {shown}")


def _run_ranks(
    command: list[str], inherited: dict[str, str], logs: list[Path], timeout: float
) -> tuple[int, Path]:
    """Run a reference on one device or on several ranks of this machine, one for each log.

    Returns:
        Zero, or the exit code of the rank that failed first; and the log that says why.
    """
    common = environment_of(len(logs), {shared.VARIABLE: shared.run_id()}, inherited)
    processes = [
        ({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, log)
        for rank, log in enumerate(logs)
    ]
    rank = 0
    if forkserver.available():
        owned.make(logs[0].parent, owned.PRIVATE_FOLDER)
        # The parent is in the folder in which the run began, and names logs as its user does.
        named = [(variables, provenance.shown(log)) for variables, log in processes]
        code, rank = forkserver.request_ranks(command, named, timeout)
    elif len(logs) == 1:
        code = run_subprocess(command, *processes[0], timeout)
    else:
        code, rank = _start_ranks(command, logs, timeout)
    if code > 0 and all(log.is_file() for log in logs):
        return code, min(logs, key=_failed_at)
    return code, logs[rank]


def _failed_at(log: Path) -> tuple[bool, int]:
    """Sorts the rank that failed first, and not because of another, before all others."""
    record = record_of(log)
    return (record.follows, record.at) if record else (True, log.stat().st_mtime_ns)


def _start_ranks(command: list[str], logs: list[Path], timeout: float) -> tuple[int, int]:
    """Run a reference's ranks as new processes; returns as ``forkserver.request_ranks``."""
    folder, variables = logs[0].parent, {shared.VARIABLE: shared.run_id()}
    echo = Echo(logs[0], say, OF_REFERENCE)
    deadline = time.monotonic() + timeout

    def watch() -> None:
        echo.flush()
        if time.monotonic() > deadline:
            raise OutOfTimeError(f"no reference after {timeout:.0f} s (logs: {folder})")

    observed = ranks.run_ranks(
        len(logs), command, folder, fork=False, environment=variables, progress=watch
    )
    echo.flush()
    return next(((end.code, end.rank) for end in observed.ends if end.code), (0, 0))


def _program() -> list[str]:
    if scripts.is_program:
        return scripts.command(argv.script())
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.name not in (None, "__main__"):
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, argv.script()]
