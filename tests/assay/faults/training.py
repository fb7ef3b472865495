# SPDX-License-Identifier: Apache-2.0
"""Exceptions while a training is traced: it goes on bit for bit, or ends as the docs say."""

import re

from tests.assay.faults import baseline
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Outcome, Problem, action, of_training
from tests.assay.faults.processes import Started, bury

_GAVE_UP = re.compile(r"(?im)^ttrace.*(unchecked|could not|not check|fail)")


@action
def fail(
    x: Experiment,
    function: str,
    call: int,
    rank: int,
    error: str = "RuntimeError",
    layout: str = "tp",
    outcome: Outcome = Outcome.TRAINS,
) -> None:
    """An exception in a function that a healthy run calls, on one rank.

    Args:
        x: the experiment.
        function: ``file:function``.
        call: which call of it (0: each of them).
        rank: of two.
        error: class of the exception, or a signal; "truncated": all mapped files.
        layout: of :data:`baseline.LAYOUTS`.
        outcome: what is promised.
    """
    mark = x.home / "raised.txt"
    failure = {"function": function, "call": call, "error": error, "mark": str(mark)}
    order = {str(rank): failure}
    x.output = f"{function} call {call}"
    cache = x.cache("local")
    command = baseline.training(x.base, x.home, layout, *baseline.TRACED, cache=cache, order=order)
    started = Started(command)
    hung = not started.wait(2 * x.limit)
    bury(0)
    codes, logs = baseline.ended(x.home)
    x.codes += codes or [started.code]
    x.injected = mark.is_file()
    if hung:
        x.problem(Problem.HANG, f"exit codes {codes}")
    elif x.injected:
        # Whichever rank reads a truncated file first says so.
        is_truncated = error == "truncated"
        named = None if is_truncated or outcome is Outcome.DIES else rank
        x.problems += of_training(codes, logs, x.base.bits[layout], outcome, rank=named)
        if is_truncated and not _GAVE_UP.search("".join(logs)):
            x.problem(Problem.NO_LINE, "".join(logs)[-300:])
