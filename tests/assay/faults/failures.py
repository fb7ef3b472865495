# SPDX-License-Identifier: Apache-2.0
"""Functions that all ranks run, each of which fails on one rank while a training is traced.

It goes on bit for bit, or ends as the docs say.
"""

import re

from megatron_ttrace.trace import compiled
from tests.assay.faults import baseline
from tests.assay.faults.experiment import Experiment
from tests.assay.faults.fault import Family, Fault, Outcome, Problem, action, of_training
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
        x.problems.append((Problem.HANG, f"exit codes {codes}"))
    elif x.injected:
        # Whichever rank reads a truncated file first says so.
        is_truncated = error == "truncated"
        named = None if is_truncated or outcome is Outcome.DIES else rank
        x.problems += of_training(codes, logs, x.base.bits[layout], outcome, rank=named)
        if is_truncated and not _GAVE_UP.search("".join(logs)):
            x.problems.append((Problem.NO_LINE, "".join(logs)[-300:]))


CANDIDATE, REHEARSAL = "run/candidate.py:CandidateSession.", "run/rehearsal.py:Rehearsal."
COMPARISON, OPTIMIZER = "run/comparison.py:Comparison.", "mcore/optimizer.py:Snapshot."
SINK, STORE, STEP = (
    *("compare/sinks.py:CompareSink.", "trace/store.py:TraceReader."),
    "capture/step.py:StepTap.",
)
MODEL = "megatron/core/models/gpt/gpt_model.py:GPTModel.forward"
PLACES = {
    Outcome.TRAINS: (
        *(f"{CANDIDATE}{name}" for name in ("__init__", "begin")),
        *(f"{REHEARSAL}{name}" for name in ("_keep", "equal_start", "_fill", "serve", "trace")),
        *(f"{COMPARISON}{name}" for name in ("initial", "findings")),
        *(f"{SINK}{name}" for name in ("__init__", "placed", "tensor", "repeat")),
        *(f"{STORE}{name}" for name in ("__init__", "tensor")),
        *(f"{STEP}{name}" for name in ("_gradients", "_update", "_losses")),
        *(f"capture/modules.py:ModuleTap.{name}" for name in ("_attach", "__exit__")),
        *("trace/shared.py:require", "compare/tolerance.py:of_reference"),
        *("capture/batches.py:Served.__init__", f"{OPTIMIZER}__init__"),
        *("trace/copies.py:Copies.copy", f"{CANDIDATE}_microbatch_numbers"),
        *(
            "compare/tokens.py:match",
            "compare/wire.py:encode",
            "run/agreement.py:Ranks.watching",
            "run/stall.py:Watchdog.__init__",
            "run/stall.py:Watchdog.knows",
        ),
        *(f"run/channel.py:{name}" for name in ("buffer", "decode")),
    ),
    Outcome.ENDS: (f"{REHEARSAL}_settle", f"{OPTIMIZER}restore", "run/channel.py:gather", MODEL),
}
TRAINS, ENDS, EXITS, DIES = Outcome.TRAINS, Outcome.ENDS, Outcome.EXITS, Outcome.DIES
SUMS = "compare/native.py:sums"
ROUTER = "capture/experts.py:RouterTap.remove"
ACTIONS = (
    *(
        fail(place, 1, rank, layout="zero", outcome=outcome)
        for outcome, places in PLACES.items()
        for place in places
        for rank in (0, 1)
    ),
    *(
        # Only the first tensor-parallel rank has batches to match.
        fail(place, 1, int("match" not in place), outcome=outcome)
        for outcome, places in PLACES.items()
        for place in places
    ),
    fail("trace/shared.py:prepare", 1, 0, layout="zero", outcome=TRAINS),
    fail("run/launch.py:_ensure", 1, 0, layout="zero", outcome=TRAINS),
    fail("saved/conclusion.py:publish", 1, 1, layout="zero", outcome=TRAINS),
    fail("saved/conclusion.py:conclude", 1, 1, layout="zero", outcome=TRAINS),
    fail(f"{SINK}tensor", 70, 1, layout="zero", outcome=TRAINS),
    fail(f"{STEP}_update", 2, 0, layout="zero", outcome=TRAINS),
    fail(f"{STORE}tensor", 3, 1, "OSError", "zero", TRAINS),
    fail(f"{COMPARISON}findings", 1, 1, "OSError", "zero", TRAINS),
    fail(f"{REHEARSAL}_fill", 1, 0, "MemoryError", "zero", TRAINS),
    fail(f"{REHEARSAL}trace", 1, 1, "SIGKILL", "zero", DIES),
    fail("trace/shared.py:require", 1, 0, "SIGKILL", "zero", DIES),
    fail(f"{SINK}tensor", 5, 1, layout="experts", outcome=TRAINS),
    fail(f"{SINK}positions", 1, 1, layout="experts", outcome=TRAINS),
    fail("capture/experts.py:DispatchTap._follow", 1, 0, layout="experts", outcome=TRAINS),
    fail(ROUTER, 1, 1, layout="experts", outcome=TRAINS),
    fail(ROUTER, 0, 0, layout="experts", outcome=ENDS),
    fail("capture/modules.py:ModuleTap.__exit__", 1, 1, layout="experts", outcome=TRAINS),
    fail(f"{SINK}tensor", 5, 1, layout="pp", outcome=TRAINS),
    fail(f"{REHEARSAL}trace", 1, 0, layout="pp", outcome=TRAINS),
    fail(MODEL, 1, 0, layout="pp", outcome=ENDS),
    fail(f"{REHEARSAL}_fill", 1, 1, layout="fsdp", outcome=TRAINS),
    fail(f"{SINK}tensor", 5, 0, layout="fsdp", outcome=TRAINS),
    fail(f"{OPTIMIZER}restore", 1, 0, layout="fsdp", outcome=ENDS),
    fail(f"{SINK}replace", 3, 1, layout="fp8", outcome=TRAINS),
    fail("run/low_precision.py:restart_scales", 1, 1, layout="fp8", outcome=TRAINS),
    fail(f"{REHEARSAL}trace", 1, 1, layout="exit", outcome=EXITS),
    fail(f"{SINK}tensor", 5, 1, layout="exit", outcome=EXITS),
    fail("saved/conclusion.py:conclude", 1, 1, layout="exit", outcome=EXITS),
    # Between the check of a file's size and the access to its mapping.
    *((fail(SUMS, 3, 1, "truncated", outcome=TRAINS),) if compiled.load("trace.mapped") else ()),
)
REPRESENTATIVE = (f"{STEP}_gradients", f"{OPTIMIZER}restore", SUMS)
"""In a hook, while the training state is put back, and while the reference is truncated."""
FAULTS = tuple(
    Fault(f"failure-{number:03d}", Family.LOCAL, action) for number, action in enumerate(ACTIONS)
)
