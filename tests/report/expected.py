# SPDX-License-Identifier: Apache-2.0
"""What synthetic checks look like in every format, kept under ``expected/``.

``python -m tests.report.expected`` writes the files anew: look at what changed.
"""

import contextlib
import dataclasses
import io
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_ttrace.diagnose.origins import owner
from megatron_ttrace.report import junit, log_scalars, publish, table, terminal, wandb
from megatron_ttrace.report.explanations import verdict_of
from megatron_ttrace.trace.executed import ChangedCode, ChangedFunction, Execution
from megatron_ttrace.trace.findings import Cause, Explanation, FailingRanks, PartialSums
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import NotExercised, Unexercised
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Exactness,
    Kind,
    Outcome,
    Result,
    Summary,
    Verdict,
)
from tests.diagnose.judged_by_hand import localise
from tests.report.synthetic_report import (
    embedding_bug,
    healthy_verdicts,
    make_judged,
    make_summary,
    make_verdict,
    norm_bug,
)

Check = tuple[Summary, list[Verdict]]
FOLDER = Path(__file__).parent / "expected"


def healthy(**fields: Any) -> Check:
    """A check that passes, with other fields of the summary."""
    verdicts = healthy_verdicts()
    return dataclasses.replace(make_summary(verdicts), **fields), verdicts


def many_culprits(count: int, **fields: Any) -> Check:
    """The embedding's bug in several layers; ``fields`` of all culprits."""
    summary, verdicts = embedding_bug()
    (first,) = summary.culprits
    culprits = (
        dataclasses.replace(first, name=f"decoder.layers.{number}", **fields)
        for number in range(count)
    )
    return dataclasses.replace(summary, culprits=tuple(culprits)), verdicts


def norms_not_reduced(layers: int) -> list[Judged]:
    """Known bug 11 in a deep model: the gradients of all norms are partial sums over tp."""
    norms = [
        f"decoder.layers.{layer}.{norm}"
        for layer in range(layers)
        for norm in ("input_layernorm", "pre_mlp_layernorm")
    ]
    names = [*norms, "decoder.final_layernorm", "output_layer"]
    return [
        make_judged(
            f"{name}.{leaf}",
            Kind.MAIN_GRAD,
            verdict=Outcome.PASS if name == "output_layer" else Outcome.REPLICA_CONFLICT,
            rel_err=1e-3 if name == "output_layer" else 0.5,
            microbatch=STEP_LEVEL,
            # Each pipeline stage has ranks of its own.
            ranks=(number % 4, 4 + number % 4),
        )
        for number, name in enumerate(names)
        for leaf in ("weight", "bias")
    ]


def deep(layers: int = 16) -> Check:
    """The check that finds this."""

    def explain(judged: Judged) -> Explanation:
        ranks = FailingRanks(judged.ranks, 2, 8)
        places = (
            Place("megatron/core/a.py", 7, "Norm.__init__", Clue.MARKS),
            Place("megatron/core/b.py", 12, "reduce", Clue.REDUCES),
        )
        return Explanation(PartialSums(Cause.PARTIAL, ("tp",)), places, ranks)

    every = norms_not_reduced(layers)
    verdicts = [verdict_of(judged) for judged in every]
    summary = dataclasses.replace(
        make_summary(verdicts),
        culprits=tuple(localise(every, explain)),
        execution_order=tuple(dict.fromkeys(owner(judged.name) for judged in every)),
    )
    return summary, verdicts


def experts() -> Check:
    """Two experts of two layers differ, with long names."""
    verdicts = [
        make_verdict(
            f"decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc{layer + 1}",
            verdict=Outcome.DIVERGED,
            rel_err=2.0,
        )
        for layer in range(2)
        for expert in (7, 17)
    ]
    return make_summary(verdicts), verdicts


def missing() -> Check:
    """Failures without an error."""
    verdicts = [
        make_verdict("decoder.layers.3", verdict=Outcome.MISSING, rel_err=None, tolerance=None)
    ]
    return make_summary(verdicts), verdicts


def changed() -> Check:
    """Changed code that ran, elsewhere or not, or that replaces Megatron's; a hostile name."""
    functions = [
        ChangedFunction("megatron/core/a.py", f"f{number}", number, ran)
        for ran in Execution
        for number in range(1, 7)
    ]
    hostile = ChangedFunction("b\x1b.py", "", 3, Execution.IN_CULPRIT)
    whole = ChangedFunction("megatron/core/b.py", "", 0, Execution.ELSEWHERE)
    users = ChangedFunction("adaptor.py", "f", 9, Execution.IN_CULPRIT, replaces=True)
    order = (hostile, *functions[:6], users, whole, *functions[6:])
    return healthy(changed_code=ChangedCode("core_v0.19.0", order))


UNEXERCISED = (
    NotExercised(Unexercised.CLIP, 0.3141, 1.0),
    NotExercised(Unexercised.UNCHECKED, 150, 5000),
    NotExercised(Unexercised.IDLE_EXPERTS, 5, 32, ("a", "b", "c", "d", "e")),
    *(NotExercised(Unexercised.CAPACITY),) * 7,
)
LOST = Exactness(7, 2, "decoder.layers.1 output.0", (1,), 1e-9)
CHECKS: dict[str, Callable[[], Check]] = {
    "healthy": healthy,
    "exact": lambda: healthy(exactness=Exactness(7, 0)),
    "inexact": lambda: healthy(exactness=LOST),
    "unexercised": lambda: healthy(not_exercised=UNEXERCISED),
    "changed": changed,
    "diverged": embedding_bug,
    "conflict": norm_bug,
    "isolate": lambda: (
        dataclasses.replace(norm_bug()[0], config={"isolate": True, "tp": 2}),
        norm_bug()[1],
    ),
    "unknown": lambda: many_culprits(20, explanation="unknown", cause=None, hint="", where=""),
    "one-cause": lambda: many_culprits(9, group=1),
    "no-culprit": lambda: many_culprits(0),
    "deep": deep,
    "experts": experts,
    "missing": missing,
    "no-answer": lambda: (
        Summary(Result.COULD_NOT_CHECK, {}, (), {}, {}, {}, (), ("the reference crashed",)),
        [],
    ),
}


def text_of(
    check: Check,
    directory: Path = Path("ttrace-out"),
    isolating: Sequence[str] = (),
    said: set[str] | None = None,
    **options: Any,
) -> str:
    """The report as it goes into a log, or to a terminal with these ``options``."""
    file = io.StringIO()
    terminal.render(*check, Console(file=file, **options), directory, isolating, said=said)
    return file.getvalue()


def published(check: Check, directory: Path, **options: Any) -> str:
    """The printed report of a check whose files are written."""
    file = io.StringIO()
    publish(*check, directory, console=Console(file=file), wandb=False, **options)
    return file.getvalue()


class Writer:
    """A SummaryWriter that remembers."""

    def __init__(self) -> None:
        self.scalars: dict[tuple[str, int], float] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.scalars[tag, global_step] = scalar_value


def fields_of(check: Check) -> str:
    """Fields and alert of W&B, and TensorBoard's scalars."""
    writer = Writer()
    log_scalars(*check, writer)
    content = {
        "summary": wandb.summary_fields(*check),
        "alert": wandb.alert_text(*check),
        "rows": [wandb._row(row) for row in table.layer_rows(check[1])[:3]],
        "scalars": {f"{tag} {step}": value for (tag, step), value in writer.scalars.items()},
    }
    return json.dumps(content, indent=1, ensure_ascii=False, default=str) + "\n"


FORMATS: dict[str, Callable[[Check], str]] = {
    "txt": text_of,
    "wide.txt": lambda check: text_of(check, width=120, force_terminal=True, color_system=None),
    "xml": lambda check: junit.render(*check, "0123456789abcdef"),
    "json": fields_of,
}
EVERY_FORMAT = ("healthy", "conflict", "deep", "missing", "no-answer")
FILES = [
    (name, ending)
    for name in CHECKS
    for ending in FORMATS
    if ending == "txt" or name in EVERY_FORMAT
]


def rendered(name: str, ending: str) -> str:
    """A check in a format, with one newline at its end; from a folder without earlier results."""
    with tempfile.TemporaryDirectory() as empty, contextlib.chdir(empty):
        return FORMATS[ending](CHECKS[name]()).rstrip("\n") + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, ending in FILES:
        (FOLDER / f"{name}.{ending}").write_text(rendered(name, ending))
