# SPDX-License-Identifier: Apache-2.0
"""Draw the faults of a campaign by a seed, before anything runs, so that nothing is picked."""

import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

from tests.assay.faults import failures, inputs
from tests.assay.faults.actions import (
    Harm,
    Thing,
    Vanishing,
    Where,
    damage,
    damage_in_use,
    full,
    hostile,
    in_the_way,
    limit,
    signals,
    stop,
    two,
    vanish,
)
from tests.assay.faults.fault import Action, Family, Fault, Outcome, Promise
from tests.assay.faults.processes import Stream, Target

LISTS = (failures, inputs)
"""Faults that are the same for every seed."""
SIGNALLED = r"(?i)signal|\bSIG[A-Z]+|killed"
WAITED = r"(?i)time|wait|answer|respon|still|stopped|signal|lost|gone"
DISK_SAID = (
    r"(?i)space|free|writ|large|read-only|no such|director|exists|gone|cannot|remov|loop|link"
)
LATEST = 1.05


def choose(seed: int) -> list[Fault]:
    """All faults of a campaign: those that a seed draws family by family, and the lists."""
    faults: list[Fault] = []
    for family, draw in _DRAWN.items():
        cases = draw(random.Random(f"{seed}/{family.name}"))
        faults += [
            Fault(f"{family.name.lower()}-{number:03d}", family, *case)
            for number, case in enumerate(cases)
        ]
    return [*faults, *(fault for listed in LISTS for fault in listed.FAULTS)]


type _Case = tuple[Action, Promise, bool] | tuple[Action, Promise, bool, bool]
"""Action, promise, whether the candidate is faulty, and whether a healthy check follows."""


def _signals(numbers: random.Random) -> Iterator[_Case]:
    codes = {
        signal.SIGINT: (130, 2, -2),
        signal.SIGTERM: (143, 2, -15),
        signal.SIGHUP: (129, 2, -1),
        signal.SIGKILL: (-9,),
    }
    for number in range(60):
        kind = list(codes)[number % 4]
        twice = kind is signal.SIGINT and number % 12 == 4
        action = signals(
            target=Target.GROUP if number % 7 == 3 else Target.LAUNCHER,
            numbers=(kind, kind) if twice else (kind,),
            moment=numbers.uniform(0, LATEST),
            gap=numbers.uniform(0.01, 0.3),
            fresh=number % 3 == 0,
            cold=number % 20 == 12,
        )
        yield action, Promise(codes[kind]), numbers.random() < 0.5, number % 6 == 3


def _ranks(numbers: random.Random) -> Iterator[_Case]:
    deadly = (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGINT)
    targets = (Target.RANK0, Target.RANK1, Target.REFERENCE)
    for number in range(36):
        target = targets[number % 3]
        kind = deadly[0] if number % 2 else deadly[number // 2 % len(deadly)]
        fresh = target is Target.REFERENCE or number % 4 == 0
        action = signals(target, (kind,), numbers.uniform(0, LATEST), fresh=fresh)
        # A rank that is interrupted ends by an exception, not by a signal.
        promise = Promise(reason="" if kind is signal.SIGINT else SIGNALLED)
        yield action, promise, numbers.random() < 0.5, number % 6 == 5
    for number in range(14):
        target = targets[number % 3]
        fresh = target is Target.REFERENCE
        action = stop(target, numbers.uniform(0, 0.9), None, fresh=fresh)
        yield action, Promise(reason=WAITED), numbers.random() < 0.5, number % 7 == 6
    for number in range(10):
        target = (*targets, Target.LAUNCHER)[number % 4]
        moment, seconds = numbers.uniform(0, 0.9), numbers.uniform(0.2, 3)
        action = stop(target, moment, seconds, fresh=target is Target.REFERENCE)
        yield action, Promise(()), numbers.random() < 0.5
    odd = (signal.SIGBUS, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM, signal.SIGPIPE)
    for number in range(10):
        target = targets[number % 3]
        fresh = target is Target.REFERENCE
        action = signals(target, (odd[number % 5],), numbers.uniform(0, LATEST), fresh=fresh)
        yield action, Promise(), number % 2 == 0


def _disk(numbers: random.Random) -> Iterator[_Case]:
    actions: list[Action] = [
        *(full(Where.DIRECTORY, kib=round(4 * 2 ** numbers.uniform(0, 10))) for _ in range(8)),
        *(full(Where.CACHE, kib=round(4 * 2 ** numbers.uniform(0, 10))) for _ in range(4)),
        full(Where.TMPDIR, kib=4),
        *(full(Where.DIRECTORY, inodes=numbers.randrange(2, 16)) for _ in range(3)),
        *(full(Where.DIRECTORY, moment=numbers.uniform(0, 0.9)) for _ in range(4)),
        full(Where.CACHE, moment=numbers.uniform(0, 0.9)),
        *(full(where, kib=0) for where in Where),
        *(vanish(how, numbers.uniform(0.05, 0.9)) for how in Vanishing for _ in range(2)),
        *(limit(round(2 ** numbers.uniform(10, 20))) for _ in range(4)),
    ]
    written = ("summary.json", "verdicts.jsonl", "report.html", "junit.xml", ".ttrace-run", ".lock")
    others = [thing for thing in Thing if thing is not Thing.FILE]
    actions += [in_the_way(name, numbers.choice(others)) for name in written]
    actions.append(in_the_way("summary.json", Thing.DIRECTORY))
    actions.append(in_the_way("reference", Thing.OUTSIDE_DIRECTORY))
    folders = (Thing.FILE, Thing.DANGLING, Thing.LOOP, Thing.FIFO)
    for name in ("candidate", "logs", "reference", "", "reference.log", "logs/rank-00001.log"):
        things = (*folders, Thing.FULL) if name.endswith(".log") else folders
        actions.append(in_the_way(name, numbers.choice(things)))
    for number, action in enumerate(actions):
        is_over = action.name in ("full", "vanish") and action.arguments.get("kib") != 0
        rerun = is_over and number % 4 == 0
        yield action, Promise(reason=DISK_SAID), numbers.random() < 0.5, rerun


def _cache(numbers: random.Random) -> Iterator[_Case]:
    for number in range(44):
        offline = number % 4 >= 2
        action = damage(
            Harm.BIT if number % 2 else list(Harm)[number // 2 % len(Harm)],
            side="candidate" if offline and number % 8 >= 6 else "reference",
            file=(number * 0.381966) % 1,
            position=numbers.random(),
            offline=offline,
        )
        # Online a damaged reference is made again; offline there is nobody who could.
        yield action, Promise(verdict=not offline), numbers.random() < 0.7
    in_use = (Harm.CUT, Harm.EMPTY, Harm.OVERWRITTEN, Harm.FIFO, Harm.DELETED, Harm.DIRECTORY)
    for number in range(16):
        moment = numbers.uniform(0.2, 0.7)
        yield damage_in_use(in_use[number % 6], moment), Promise(), number % 2 == 0


def _two(numbers: random.Random) -> Iterator[_Case]:
    for number in range(12):
        share = Where.CACHE if number % 3 == 2 else Where.DIRECTORY
        killed = number in (4, 9)
        order = (False, True) if number % 2 else (True, False)
        delay = numbers.uniform(0, 0.9) if number > 1 else 0.0
        action = two(share, order, delay, killed=killed, fresh=number % 4 != 3)
        # Whoever finds the directory taken may say so; a shared cache takes nobody's answer.
        refused = share is Where.DIRECTORY and not killed
        yield action, Promise((2,) if refused else ()), True


def _hostile(numbers: random.Random) -> Iterator[_Case]:
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
        (hostile(directory="a  b c"), right),
        (hostile(directory="line\nbreak\tand tab"), any_line),
        (hostile(directory="\x1b[31mred\x07"), any_line),
        (hostile(directory="größe-テスト-🜚"), right),
        (hostile(directory="quote'\"$(touch x)`;&|"), right),
        (hostile(directory="%s{0}[bold]%n"), right),
        (hostile(directory="--ttrace-exit"), any_line),
        (hostile(directory="x" * 200), right),
        (hostile(directory="x" * 300), any_line),
        (hostile(directory="/".join(["deep"] * 60)), right),
        (hostile(directory="undecodable\udcff"), any_line),
        (hostile(home="\x1b]0;title\x07"), any_line),
        (hostile(home="[link=x]home[/link]"), right),
        (hostile(script="\x1b[2Jabsent.py"), Promise(verdict=False)),
        (hostile(script="absent\nttrace: equivalent"), Promise(verdict=False)),
        (hostile(variables=elastic[:1]), right),
        (hostile(variables=elastic), right),
        (hostile(variables=distributed), right),
        (hostile(variables=slurm), right),
        (hostile(variables=(("HOME", None),)), right),
        (hostile(variables=(("HOME", "/nonexistent"),)), right),
        (hostile(variables=(("LANG", "C"), ("LC_ALL", "C")), directory="ünï", cold=True), right),
        (hostile(variables=(("PYTHONIOENCODING", "ascii"),), cold=True), right),
        (hostile(variables=(("PYTHONPATH", "{root}:/nonexistent::"),), cold=True), right),
        (hostile(variables=(("TMPDIR", "/nonexistent"),)), right),
        (hostile(variables=(("TMPDIR", "/proc"),)), any_line),
        (hostile(variables=(("TTRACE_CACHE", "relative cache"),)), right),
        (hostile(variables=(("TTRACE_CACHE", "/proc/none"),)), any_line),
        (hostile(variables=(("TTRACE_CACHE", ""),)), right),
        (hostile(variables=(("OMP_NUM_THREADS", "junk"),)), any_line),
        (hostile(variables=(("COLUMNS", "3"), ("TERM", "dumb"))), right),
        (hostile(variables=(("PYTHONHASHSEED", "7"), ("PYTHONUNBUFFERED", "1")), cold=True), right),
        (hostile(stdin=Stream.CLOSED, cold=True), right),
        (hostile(stdout=Stream.CLOSED, cold=True), right),
        (hostile(stderr=Stream.CLOSED, cold=True), right),
        (
            hostile(stdin=Stream.CLOSED, stdout=Stream.CLOSED, stderr=Stream.CLOSED, cold=True),
            right,
        ),
        (hostile(stdout=Stream.FULL, cold=True), right),
        (hostile(stderr=Stream.FULL, cold=True), right),
        (hostile(stdout=Stream.BROKEN, cold=True), right),
        (hostile(stdout=Stream.BROKEN, stderr=Stream.BROKEN, cold=True), right),
    ]
    for number, (action, promise) in enumerate(actions):
        yield action, promise, (number + numbers.randrange(2)) % 2 == 0


def _training(numbers: random.Random) -> Iterator[_Case]:
    layouts = ("tp", "pp", "zero", "load")
    ranks = (Target.RANK0, Target.RANK1, Target.LAUNCHER)
    harms = (Harm.CUT, Harm.OVERWRITTEN, Harm.DELETED)
    for number in range(60):
        event = number % 9
        # Nothing can train on without one of its ranks.
        targets = () if event == 1 else ranks
        target = numbers.choice((*targets, Target.REFERENCE, Target.HELPER))
        # Some time before the end of a training its reference is made.
        is_early = target is Target.REFERENCE and event < 3
        moment = numbers.uniform(0, 0.3 if is_early else 0.95)
        fresh = is_early or numbers.random() < 0.5
        how: dict[str, Any] = {"fresh": fresh, "layout": numbers.choice(layouts)}
        match event:
            case 0:
                action = signals(target, (signal.SIGKILL,), moment, **how)
            case 1:
                # Nobody but its parent's parent can know of a helper, once it is the last one.
                seconds = 120.0 if target is Target.HELPER else None
                action = stop(target, moment, seconds, **how)
            case 2:
                action = stop(target, moment, 2.0, **how)
            case 3:
                kib = round(4 * 2 ** numbers.uniform(0, 10))
                action = full(Where.DIRECTORY, kib, **how)
            case 4:
                action = full(Where.DIRECTORY, moment=moment, **how)
            case 5:
                action = vanish(Vanishing.REMOVED, moment, **how)
            case _:
                action = damage_in_use(harms[event - 6], moment, **how)
        is_fatal = event == 0 and target in ranks
        outcome = Outcome.EITHER if is_fatal else Outcome.TRAINS
        yield action, Promise((), outcome=outcome), False


_DRAWN: dict[Family, Callable[[random.Random], Iterator[_Case]]] = {
    Family.SIGNALS: _signals,
    Family.RANKS: _ranks,
    Family.DISK: _disk,
    Family.CACHE: _cache,
    Family.TWO: _two,
    Family.HOSTILE: _hostile,
    Family.TRAINING: _training,
}
