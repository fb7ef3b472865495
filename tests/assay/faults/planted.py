# SPDX-License-Identifier: Apache-2.0
"""Mistakes of ``tests/assay/planted`` in real jobs, each of which must diverge."""

from tests.assay.faults import baseline
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Problem, Promise, action, of_command
from tests.assay.faults.processes import Started, bury
from tests.assay.planted import train
from tests.assay.planted.mistakes import MARK, PLANTED, load
from tests.integration.jobs import bits_of


@action
def plant(x: Experiment, name: str) -> None:
    """Check a mistake's job; what trains as without the mistake, bit for bit, is none there."""
    mark, (nproc, words) = x.home / "mark", load()[name].arguments(x.home)
    command = baseline.check(
        x.home,
        script=train.__file__,
        model=words,
        nproc=nproc,
        cache=x.home / "cache",
        variables={PLANTED: name, MARK: str(mark)},
    )
    started = Started(command)
    started.wait(4 * x.limit)
    x.codes.append(started.code)
    x.injected = mark.exists()
    problems = of_command(started, x.fault.promise, faulty=True, report=True)
    x.orphans()
    if started.code == 0:
        x.injected = _has_effect(x, name)
    x.problems += problems if x.injected else []


def _has_effect(x: Experiment, name: str) -> bool:
    """Whether losses, gradient norms or weights of untraced steps differ in a bit."""
    nproc, words = load()[name].arguments(x.home)
    logged = []
    for case, variables in (("with", {PLANTED: name}), ("without", {})):
        home = x.home / case
        home.mkdir()
        command = baseline.training(
            None, home, words, cache=x.home / "cache", nproc=nproc, **variables
        )
        if not Started(command).wait(2 * x.limit):
            x.problem(Problem.HANG, f"training {case} it")
        bury(0)
        logged.append(bits_of("".join(baseline.ended(home)[1])))
    return logged[0] != logged[1]


FAULTS = tuple(
    Fault(f"planted-{name}", Family.PLANTED, plant(name), Promise((1,)), faulty=True)
    for name, mistake in load().items()
    if mistake.job and not mistake.is_feature
)
