# SPDX-License-Identifier: Apache-2.0
"""The answer of ``ttrace resume`` in words: the answer, then one paragraph per cause."""

import dataclasses
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.resumed import Blame, Difference, How, Restart, Resumed, What
from megatron_ttrace.trace.sanitise import clean

_PLURAL = {
    What.WEIGHT: "weights",
    What.MAIN: "main weights",
    What.EXP_AVG: "first moments (exp_avg)",
    What.EXP_AVG_SQ: "second moments (exp_avg_sq)",
    What.BUFFER: "buffers",
    What.OTHER: "optimizer state",
}
_NAMED = 3
_WIDTH = 80
_COLOURS = {
    Result.EQUIVALENT: "green",
    Result.DIVERGED: "red",
    Result.COULD_NOT_CHECK: "yellow",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Culprit:
    """Differences with one cause: the same kind of state, wrong in the same way."""

    differences: tuple[Difference, ...]

    @property
    def first(self) -> Difference:
        """The largest of them."""
        return max(self.differences, key=lambda one: one.rel_err or 0.0)


def culprits(differences: Sequence[Difference]) -> list[Culprit]:
    """Differences by what they are, how they differ and what is to blame, in order."""
    groups: dict[object, list[Difference]] = {}
    for one in differences:
        # Of numbers, those of several parameter groups.
        last = "" if one.what.is_tensor else one.name.rpartition(".")[2]
        key = one.what, one.how, one.blame, last, one.before, one.after
        groups.setdefault(key, []).append(one)
    return [Culprit(tuple(group)) for group in groups.values()]


def render(resumed: Resumed, console: Console, folder: Path) -> None:
    """Print the answer for people."""
    width = max(min(console.width, _WIDTH), 20)
    for line in lines(resumed, folder):
        indent = len(line.plain) - len(line.plain.lstrip(" -"))
        folded = textwrap.fill(
            line.plain,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print(Text(folded, style=line.style), soft_wrap=True, highlight=False)


def lines(resumed: Resumed, folder: Path) -> Iterator[Text]:
    """All that is printed."""
    yield Text(f"ttrace: {headline(resumed)}", style=f"bold {_COLOURS[resumed.verdict]}")
    for restart in resumed.restarts:
        yield Text()
        yield from _restart(restart)
    if resumed.notices:
        yield Text()
    for notice in resumed.notices:
        yield Text(f"note: {clean(notice, 400)}", style="dim")
    yield Text(f"details: {clean(str(folder / 'resume.json'), 300)}", style="dim")


def headline(resumed: Resumed) -> str:
    """The answer in one line."""
    verdict, step = resumed.verdict, resumed.iteration
    if verdict is Result.COULD_NOT_CHECK:
        return f"could not check every restart (from iteration {step})"
    count = len(resumed.restarts)
    layouts = "the same layout" if count == 1 else f"{count} layouts"
    if verdict is Result.EQUIVALENT:
        return f"equivalent: training goes on as before, restarted in {layouts}"
    wrong = [one for one in resumed.restarts if one.verdict is Result.DIVERGED]
    blames = {d.blame for one in wrong for d in one.differences}
    what = "a restart does not go on as before"
    for blame in (Blame.SAVING, Blame.LOADING, Blame.EITHER):
        if blame in blames:
            what = f"{blame} a checkpoint changes the state"
            break
    return f"diverged: {what} (iteration {step})"


def _restart(restart: Restart) -> Iterator[Text]:
    layout = f"with {clean(restart.layout, 200)}" if restart.layout else "in the same layout"
    yield Text(f"restarted {layout}: {restart.verdict}", style="bold")
    if restart.reason:
        yield Text(f"  {clean(restart.reason.splitlines()[0], 400)}")
        return
    for culprit in culprits(restart.differences):
        for number, line in enumerate(_culprit(culprit)):
            yield Text(("  - " if not number else "    ") + clean(line, 400))
    if restart.verdict is Result.EQUIVALENT:
        read = f", {restart.stored} of them also as they are stored" if restart.stored else ""
        yield Text(f"  {restart.compared} tensors of the state are equal{read}")
    for step in restart.steps if restart.differences else ():
        (old, new), (norm, other) = step.loss, step.grad_norm
        if step.loss[0] != step.loss[1] or norm != other:
            yield Text(
                f"  iteration {step.iteration}: loss {_number(new)} instead of {_number(old)}, "
                f"grad norm {_number(other)} instead of {_number(norm)}"
            )
    for notice in restart.notices:
        yield Text(f"  note: {clean(notice, 400)}", style="dim")


def _culprit(culprit: Culprit) -> Iterator[str]:
    first = culprit.first
    count = len(culprit.differences)
    if first.what.is_tensor:
        names = [one.name for one in culprit.differences]
        shown = ", ".join(names[:_NAMED]) + (
            f" and {count - _NAMED} more" if count > _NAMED else ""
        )
        yield f"{first.blame}: {_PLURAL[first.what]} of {shown}: {_HOW[first.how]}"
        if first.rel_err is not None:
            yield (
                f"{first.name}: relative error {first.rel_err:.3g}, {first.wrong} of {first.total} "
                "elements"
            )
        if first.ranks:
            ranks = ", ".join(map(str, first.ranks[:8]))
            has = f", which has {first.part}" if first.part and len(first.ranks) == 1 else ""
            yield f"wrong on rank{'s' if len(first.ranks) > 1 else ''} {ranks}{has}"
    elif first.what is What.NUMBER:
        listed = ", ".join(one.name for one in culprit.differences[:_NAMED])
        more = f" and {count - _NAMED} more" if count > _NAMED else ""
        yield (
            f"{first.blame}: {listed}{more}: {_number(first.after)} instead of "
            f"{_number(first.before)}"
        )
    elif first.what is What.RANDOM:
        ranks = ", ".join(str(rank) for one in culprit.differences for rank in one.ranks)
        yield f"{first.blame}: random state {first.name} on ranks {ranks}: {_HOW[first.how]}"
    elif first.what is What.SAMPLES:
        yield f"{first.blame}: iteration {first.name} trains on other samples"
    else:
        within = f" (tolerated: {first.tolerance:.1g})" if first.tolerance else ""
        yield (
            f"{first.blame}: the {first.name} is {_number(first.after)} "
            f"instead of {_number(first.before)}{within}, although the whole state was restored"
        )
    if first.where:
        yield f"look at {first.where}"


_HOW = {
    How.DIFFERENT: "other values",
    How.MISSING: "lost",
    How.EXTRA: "not there before",
    How.SHAPE: "another shape",
    How.INCOMPLETE: "no rank has some of the elements",
    How.CONFLICT: "ranks with the same part have different values",
}


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.9g}"
