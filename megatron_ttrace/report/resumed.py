# SPDX-License-Identifier: Apache-2.0
"""The answer of ``ttrace resume`` in words: the answer, then one paragraph per cause."""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from megatron_ttrace.report.terminal import STYLES
from megatron_ttrace.report.wording import messages, on_ranks
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.resumed import Blame, Difference, How, Restart, Resumed, What, code_of
from megatron_ttrace.trace.sanitise import clean, some_of

_PLURAL, _HOW = messages(What), messages(How)
_NAMED = 3
_WIDTH = 80


def by_cause(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Differences with the same kind of state, wrong in the same way and on the same way."""
    groups: dict[object, list[Difference]] = {}
    for difference in differences:
        kind, name = difference.what, difference.name
        # Numbers of several parameter groups belong together, and all that a lost group had.
        owner, _, field = name.rpartition(".")
        before: float | str | None = difference.before
        if kind is What.NUMBER and difference.after is None:
            before, field = "", owner
        field = "" if kind.is_tensor or kind is What.SAMPLES else field
        key = kind, difference.how, difference.blame, field, before, difference.after
        groups.setdefault(key, []).append(difference)
    return list(groups.values())


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
    yield Text(f"ttrace: {headline(resumed)}", style=STYLES[resumed.verdict])
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
    wrong = [restart for restart in resumed.restarts if restart.verdict is Result.DIVERGED]
    blames = {difference.blame for restart in wrong for difference in restart.differences}
    for blame in (Blame.SAVING, Blame.LOADING, Blame.EITHER):
        if blame in blames:
            return f"diverged: {blame} a checkpoint changes the state (iteration {step})"
    return f"diverged: a restart does not go on as before (iteration {step})"


def _restart(restart: Restart) -> Iterator[Text]:
    layout = f"with {clean(restart.layout, 200)}" if restart.layout else "in the same layout"
    yield Text(f"restarted {layout}: {restart.verdict}", style="bold")
    if restart.reason:
        yield Text(f"  {clean(restart.reason.splitlines()[0], 400)}")
        return
    for alike in by_cause(restart.differences):
        for number, line in enumerate(_cause(alike)):
            yield Text(("  - " if not number else "    ") + clean(line, 400))
    if restart.verdict is Result.EQUIVALENT:
        stored = restart.stored - restart.otherwise
        read = f", {stored} of them also as they are stored" if restart.stored else ""
        yield Text(f"  {restart.compared} tensors of the state are equal{read}")
    for step in restart.steps if restart.differences else ():
        old, new = map(_number, step.loss)
        norm, other = map(_number, step.grad_norm)
        if (old, norm) != (new, other):
            yield Text(
                f"  iteration {step.iteration}: loss {new} instead of {old}, "
                f"grad norm {other} instead of {norm}"
            )
    for notice in restart.notices:
        yield Text(f"  note: {clean(notice, 400)}", style="dim")


def _cause(alike: Sequence[Difference]) -> Iterator[str]:
    """Differences with one cause, in words; the largest of them with its numbers."""
    worst = max(alike, key=lambda difference: difference.rel_err or 0.0)
    names = some_of([difference.name for difference in alike], _NAMED)
    changed = f"{_number(worst.after)} instead of {_number(worst.before)}"
    if len({difference.before for difference in alike}) > 1:
        changed = _number(worst.after)
    if worst.what.is_tensor:
        yield f"{worst.blame}: {_PLURAL[worst.what]} of {names}: {_HOW[worst.how]}"
        if worst.rel_err is not None:
            yield (
                f"{worst.name}: relative error {worst.rel_err:.3g}, {worst.wrong} of {worst.total} "
                "elements"
            )
        if worst.ranks:
            has = f", which has {worst.part}" if worst.part and len(worst.ranks) == 1 else ""
            yield f"wrong on {on_ranks(worst.ranks)}{has}"
    elif worst.what is What.NUMBER:
        yield f"{worst.blame}: {names}: {changed}"
    elif worst.what is What.RANDOM:
        ranks = on_ranks(rank for difference in alike for rank in difference.ranks)
        yield f"{worst.blame}: random state {worst.name} on {ranks}: {_HOW[worst.how]}"
    elif worst.what is What.SAMPLES:
        several = f"iterations {names} train" if len(alike) > 1 else f"iteration {names} trains"
        yield f"{worst.blame}: {several} on other samples"
    else:
        within = f" (tolerated: {worst.tolerance:.1g})" if worst.tolerance else ""
        restored = "although weights and optimizer state were restored"
        yield f"{worst.blame}: the {worst.name} is {changed}{within}, {restored}"
    for number, place in enumerate(_places(worst)):
        yield f"{'or at' if number else 'look at'} {place}"


def _places(difference: Difference) -> list[str]:
    """Where to look: the user's changes, if any ran then, and what has to do with it."""
    changed, where = difference.changed[:_NAMED], difference.where
    is_changed = where and code_of(where) in map(code_of, changed)
    ran = f"it was changed, and ran while {difference.blame}"
    return [f"{place}: {ran}" for place in changed] + [where] * bool(where and not is_changed)


def _number(value: float | None) -> str:
    return "missing" if value is None else f"{value:.9g}"
