# SPDX-License-Identifier: Apache-2.0
"""Draw the faults of a campaign by a seed, before anything runs, so that nothing is picked."""

import random
import signal

from tests.assay.faults import failures, inputs, planted, pulls, secrets
from tests.assay.faults.actions import (
    Damage,
    Full,
    Harm,
    Hostile,
    InTheWay,
    Limit,
    Signal,
    Stop,
    Thing,
    Two,
    Vanish,
    Vanishing,
    Where,
)
from tests.assay.faults.fault import Action, Family, Fault, Promise
from tests.assay.faults.processes import Stream, Target
from tests.assay.faults.training import Disturbed, Event, Failure

LISTS = (failures, planted, secrets, inputs, pulls)
"""Faults that are the same for every seed."""
SIGNALLED = r"(?i)signal|\bSIG[A-Z]+|killed"
WAITED = r"(?i)time|wait|answer|respon|still|stopped|signal|lost|gone"
DISK_SAID = (
    r"(?i)space|free|writ|large|read-only|no such|director|exists|gone|cannot|remov|loop|link"
)
LATEST = 1.05


class _Chooser:
    """Draws faults family by family, each family from numbers of its own."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.faults: list[Fault] = []

    def numbers(self, family: Family) -> random.Random:
        return random.Random(f"{self._seed}/{family.name}")

    def add(
        self,
        family: Family,
        action: Action,
        promise: Promise,
        *,
        faulty: bool,
        rerun: bool = False,
    ) -> None:
        count = sum(fault.family is family for fault in self.faults)
        name = f"{family.name.lower()}-{count:03d}"
        self.faults.append(Fault(name, family, action, promise, faulty, rerun))


def choose(seed: int) -> list[Fault]:
    """All faults of a campaign."""
    chooser = _Chooser(seed)
    for draw in (_signals, _ranks, _disk, _cache, _local, _two, _hostile, _training):
        draw(chooser)
    return [*chooser.faults, *(fault for listed in LISTS for fault in listed.FAULTS)]


def _signals(chooser: _Chooser) -> None:
    family = Family.SIGNALS
    numbers = chooser.numbers(family)
    codes = {
        signal.SIGINT: (130, 2, -2),
        signal.SIGTERM: (143, 2, -15),
        signal.SIGHUP: (129, 2, -1),
        signal.SIGKILL: (-9,),
    }
    for number in range(60):
        kind = list(codes)[number % 4]
        twice = kind is signal.SIGINT and number % 12 == 4
        action = Signal(
            target=Target.GROUP if number % 7 == 3 else Target.LAUNCHER,
            signals=(kind, kind) if twice else (kind,),
            moment=numbers.uniform(0, LATEST),
            gap=numbers.uniform(0.01, 0.3),
            fresh=number % 3 == 0,
            cold=number % 20 == 12,
        )
        chooser.add(
            family,
            action,
            Promise(codes[kind]),
            faulty=numbers.random() < 0.5,
            rerun=number % 6 == 3,
        )


def _ranks(chooser: _Chooser) -> None:
    family = Family.RANKS
    numbers = chooser.numbers(family)
    deadly = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGINT)
    targets = (Target.RANK0, Target.RANK1, Target.REFERENCE)
    for number in range(36):
        target = targets[number % 3]
        kind = deadly[0] if number % 2 else deadly[number // 2 % len(deadly)]
        # A rank that is interrupted ends by an exception, not by a signal.
        reason = "" if kind is signal.SIGINT else SIGNALLED
        chooser.add(
            family,
            Signal(
                target,
                (kind,),
                numbers.uniform(0, LATEST),
                fresh=target is Target.REFERENCE or number % 4 == 0,
            ),
            Promise(reason=reason),
            faulty=numbers.random() < 0.5,
            rerun=number % 6 == 5,
        )
    for number in range(14):
        target = targets[number % 3]
        chooser.add(
            family,
            Stop(target, numbers.uniform(0, 0.9), None, fresh=target is Target.REFERENCE),
            Promise(reason=WAITED),
            faulty=numbers.random() < 0.5,
            rerun=number % 7 == 6,
        )
    for number in range(10):
        target = (*targets, Target.LAUNCHER)[number % 4]
        chooser.add(
            family,
            Stop(
                target,
                numbers.uniform(0, 0.9),
                numbers.uniform(0.2, 3),
                fresh=target is Target.REFERENCE,
            ),
            Promise(()),
            faulty=numbers.random() < 0.5,
        )
    odd = (signal.SIGBUS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM, signal.SIGPIPE)
    for number in range(10):
        target = targets[number % 3]
        fresh = target is Target.REFERENCE
        action = Signal(target, (odd[number % 5],), numbers.uniform(0, LATEST), fresh=fresh)
        chooser.add(family, action, Promise(), faulty=number % 2 == 0)


def _disk(chooser: _Chooser) -> None:
    family = Family.DISK
    numbers = chooser.numbers(family)
    actions: list[Action] = [
        *(Full(Where.DIRECTORY, kib=round(4 * 2 ** numbers.uniform(0, 10))) for _ in range(8)),
        *(Full(Where.CACHE, kib=round(4 * 2 ** numbers.uniform(0, 10))) for _ in range(4)),
        Full(Where.TMPDIR, kib=4),
        *(Full(Where.DIRECTORY, inodes=numbers.randrange(2, 16)) for _ in range(3)),
        *(Full(Where.DIRECTORY, moment=numbers.uniform(0, 0.9)) for _ in range(4)),
        Full(Where.CACHE, moment=numbers.uniform(0, 0.9)),
        *(Full(where, read_only=True) for where in Where),
        *(Vanish(how, numbers.uniform(0.05, 0.9)) for how in Vanishing for _ in range(2)),
        *(Limit(round(2 ** numbers.uniform(10, 20))) for _ in range(4)),
    ]
    written = ("summary.json", "verdicts.jsonl", "report.html", "junit.xml", ".ttrace-run", ".lock")
    for name in written:
        thing = numbers.choice([thing for thing in Thing if thing is not Thing.FILE])
        actions.append(InTheWay(name, thing))
    actions.append(InTheWay("summary.json", Thing.DIRECTORY))
    actions.append(InTheWay("reference", Thing.OUTSIDE_DIRECTORY))
    folders = (Thing.FILE, Thing.DANGLING, Thing.LOOP, Thing.FIFO)
    for name in ("candidate", "logs", "reference", "", "reference.log", "logs/rank-00001.log"):
        thing = numbers.choice((*folders, Thing.FULL) if name.endswith(".log") else folders)
        actions.append(InTheWay(name, thing))
    for number, action in enumerate(actions):
        chooser.add(
            family,
            action,
            Promise(reason=DISK_SAID),
            faulty=numbers.random() < 0.5,
            rerun=isinstance(action, Full | Vanish)
            and not getattr(action, "read_only", False)
            and number % 4 == 0,
        )


def _cache(chooser: _Chooser) -> None:
    family = Family.CACHE
    numbers = chooser.numbers(family)
    for number in range(44):
        offline = number % 4 >= 2
        harm = Harm.BIT if number % 2 else list(Harm)[number // 2 % len(Harm)]
        action = Damage(
            harm,
            side="candidate" if offline and number % 8 >= 6 else "reference",
            file=(number * 0.381966) % 1,
            position=numbers.random(),
            offline=offline,
        )
        # Online a damaged reference is made again; offline there is nobody who could.
        chooser.add(family, action, Promise(verdict=not offline), faulty=numbers.random() < 0.7)
    in_use = (Harm.CUT, Harm.EMPTY, Harm.OVERWRITTEN, Harm.FIFO, Harm.DELETED, Harm.DIRECTORY)
    for number in range(16):
        action = Damage(in_use[number % 6], moment=numbers.uniform(0.2, 0.7))
        chooser.add(family, action, Promise(), faulty=number % 2 == 0)


def _local(chooser: _Chooser) -> None:
    family = Family.LOCAL
    numbers = chooser.numbers(family)
    errors = ("RuntimeError", "OSError", "MemoryError", "KeyError", "TTraceError")
    for number in range(44):
        exits = number % 3 == 2
        function, call = numbers.random(), numbers.random() ** 2
        error = errors[number % len(errors)]
        action = Failure(function, call, number % 2, error, checks=exits)
        chooser.add(family, action, Promise(), faulty=exits and numbers.random() < 0.6)


def _two(chooser: _Chooser) -> None:
    family = Family.TWO
    numbers = chooser.numbers(family)
    orders = ((True, False), (False, True))
    for number in range(12):
        share = Where.CACHE if number % 3 == 2 else Where.DIRECTORY
        killed = number in (4, 9)
        action = Two(
            share,
            orders[number % 2],
            numbers.uniform(0, 0.9) if number > 1 else 0.0,
            killed=killed,
            fresh=number % 4 != 3,
        )
        # Whoever finds the directory taken may say so; a shared cache takes nobody's answer.
        refused = share is Where.DIRECTORY and not killed
        chooser.add(family, action, Promise((2,) if refused else ()), faulty=True)


def _hostile(chooser: _Chooser) -> None:
    family = Family.HOSTILE
    numbers = chooser.numbers(family)
    right = Promise(())
    any_line = Promise()
    elastic = (
        ("TORCHELASTIC_USE_AGENT_STORE", "True"),
        ("TORCHELASTIC_RESTART_COUNT", "3"),
        ("TORCHELASTIC_RUN_ID", "none"),
    )
    distributed = (
        ("RANK", "7"),
        ("LOCAL_RANK", "3"),
        ("WORLD_SIZE", "64"),
        ("LOCAL_WORLD_SIZE", "8"),
        ("MASTER_ADDR", "203.0.113.7"),
        ("MASTER_PORT", "1"),
    )
    slurm = (("SLURM_PROCID", "5"), ("SLURM_NTASKS", "16"), ("SLURM_LOCALID", "5"))
    actions: list[tuple[Action, Promise]] = [
        (Hostile(directory="a  b c"), right),
        (Hostile(directory="line\nbreak\tand tab"), any_line),
        (Hostile(directory="\x1b[31mred\x07"), any_line),
        (Hostile(directory="größe-テスト-🜚"), right),
        (Hostile(directory="quote'\"$(touch x)`;&|"), right),
        (Hostile(directory="%s{0}[bold]%n"), right),
        (Hostile(directory="--ttrace-exit"), any_line),
        (Hostile(directory="x" * 200), right),
        (Hostile(directory="x" * 300), any_line),
        (Hostile(directory="/".join(["deep"] * 60)), right),
        (Hostile(directory="undecodable\udcff"), any_line),
        (Hostile(home="\x1b]0;title\x07"), any_line),
        (Hostile(home="[link=x]home[/link]"), right),
        (Hostile(script="\x1b[2Jabsent.py"), Promise(verdict=False)),
        (Hostile(script="absent\nttrace: equivalent"), Promise(verdict=False)),
        (Hostile(variables=elastic[:1]), right),
        (Hostile(variables=elastic), right),
        (Hostile(variables=distributed), right),
        (Hostile(variables=slurm), right),
        (Hostile(variables=(("HOME", None),)), right),
        (Hostile(variables=(("HOME", "/nonexistent"),)), right),
        (Hostile(variables=(("LANG", "C"), ("LC_ALL", "C")), directory="ünï", cold=True), right),
        (Hostile(variables=(("PYTHONIOENCODING", "ascii"),), cold=True), right),
        (Hostile(variables=(("PYTHONPATH", "{root}:/nonexistent::"),), cold=True), right),
        (Hostile(variables=(("TMPDIR", "/nonexistent"),)), right),
        (Hostile(variables=(("TMPDIR", "/proc"),)), any_line),
        (Hostile(variables=(("TTRACE_CACHE", "relative cache"),)), right),
        (Hostile(variables=(("TTRACE_CACHE", "/proc/none"),)), any_line),
        (Hostile(variables=(("TTRACE_CACHE", ""),)), right),
        (Hostile(variables=(("OMP_NUM_THREADS", "junk"),)), any_line),
        (Hostile(variables=(("COLUMNS", "3"), ("TERM", "dumb"))), right),
        (Hostile(variables=(("PYTHONHASHSEED", "7"), ("PYTHONUNBUFFERED", "1")), cold=True), right),
        (Hostile(stdin=Stream.CLOSED), right),
        (Hostile(stdout=Stream.CLOSED, cold=True), right),
        (Hostile(stderr=Stream.CLOSED, cold=True), right),
        (Hostile(stdin=Stream.CLOSED, stdout=Stream.CLOSED, stderr=Stream.CLOSED), right),
        (Hostile(stdout=Stream.FULL), right),
        (Hostile(stderr=Stream.FULL), right),
        (Hostile(stdout=Stream.BROKEN), right),
        (Hostile(stdout=Stream.BROKEN, stderr=Stream.BROKEN, cold=True), right),
    ]
    for number, (action, promise) in enumerate(actions):
        chooser.add(family, action, promise, faulty=(number + numbers.randrange(2)) % 2 == 0)


def _training(chooser: _Chooser) -> None:
    family = Family.TRAINING
    numbers = chooser.numbers(family)
    layouts = ("tp", "pp", "zero", "load")
    processes = (Target.RANK0, Target.RANK1, Target.REFERENCE, Target.LAUNCHER, Target.HELPER)
    for number in range(60):
        event = list(Event)[number % len(Event)]
        targets = processes
        if event is Event.STOP:
            # Nothing can train on without one of its ranks.
            targets = (Target.REFERENCE, Target.HELPER)
        target = numbers.choice(targets)
        # Some time before the end of a training its reference is made.
        is_early = target is Target.REFERENCE and event in (Event.KILL, Event.STOP, Event.PAUSE)
        action = Disturbed(
            event,
            target,
            numbers.uniform(0, 0.3 if is_early else 0.95),
            numbers.choice(layouts),
            kib=round(4 * 2 ** numbers.uniform(0, 10)) if event is Event.SMALL else 0,
            cached=numbers.random() < 0.5 and not is_early,
        )
        chooser.add(family, action, Promise(()), faulty=False)


def representative(seed: int) -> list[Fault]:
    """A few faults that are cheap, of every family that starts processes."""
    numbers, faults = random.Random(seed), choose(seed)
    chosen: list[Fault] = []
    for family, count in _WANTED.items():
        cheap = [fault for fault in faults if fault.family is family and not _is_dear(fault)]
        chosen += numbers.sample(cheap, count)
    return chosen + [fault for fault in faults if fault.id in _NAMED]


_WANTED = {
    **dict.fromkeys((Family.RANKS, Family.DISK, Family.CACHE, Family.TWO, Family.HOSTILE), 1),
    Family.SIGNALS: 2,
    Family.TRAINING: 1,
}
_NAMED = (
    "planted-zero_stale_parameter",
    *(
        fault.id
        for fault in failures.FAULTS
        if fault.action.layout == "tp" and fault.action.function in failures.REPRESENTATIVE
    ),
)


def _is_dear(fault: Fault) -> bool:
    """Whether a fault waits for a time-out, a cold start, a reference, or a checkpoint.

    Ranks that are not yet connected wait for one that has ended; others notice at once. After
    the end there is nothing to disturb.
    """
    action = fault.action
    if fault.family is Family.RANKS and isinstance(action, Signal):
        return action.cold or action.fresh or not 0.5 < action.moment < 0.9
    if isinstance(action, Stop):
        return action.seconds is None
    if isinstance(action, Disturbed):
        return action.layout != "tp" or action.event is Event.STOP
    return bool(getattr(action, "cold", False) or getattr(action, "fresh", False))
