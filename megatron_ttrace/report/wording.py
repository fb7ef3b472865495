# SPDX-License-Identifier: Apache-2.0
"""Numbers, ranks and culprits as text, the same in every output.

Errors are written in percent and in multiples of the machine epsilon: ``20.5 % (26.4 ε)``.
"""

from __future__ import annotations

import math
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import ChangedCode, Execution
from megatron_ttrace.trace.findings import (
    FaultNote,
    Miscounted,
    Note,
    OtherHyperparameters,
    Remark,
    Sample,
)
from megatron_ttrace.trace.judged import Judged, TooFew
from megatron_ttrace.trace.outcomes import NotExercised, Reason, Unexercised
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    Code,
    Culprit,
    Exactness,
    Outcome,
    Result,
    Run,
    Summary,
    TraceKey,
    Verdict,
)
from megatron_ttrace.trace.sanitise import NAME_LIMIT, NOTE_LIMIT, clean

COMMAND_LIMIT = 20_000
UNKNOWN = "unknown"
"""The explanation of a culprit for which no hypothesis passed its test."""
AXES = ("tp", "cp", "pp", "vpp", "ep", "etp", "dp", "edp")


MESSAGES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("messages.toml").read_text(encoding="utf-8")
)
"""All sentences, by the enumeration whose members they put into words."""


def messages[E: Enum](members: type[E], table: str = "") -> dict[E, str]:
    """The sentences of an enumeration's members, from the table of its name, or another one."""
    return {members[name]: text for name, text in MESSAGES[table or members.__name__].items()}


OUTCOME_WORDS = messages(Outcome)
RESULT_SENTENCES = messages(Result)
STATISTICS = messages(Statistic)
_NOTES: dict[Remark | Reason, str] = {**messages(Remark), **messages(Reason, "Note")}
_REASONS = messages(Reason)
_NOT_EXERCISED = messages(Unexercised)
_CHANGED = messages(Execution)


def code_text(code: Code) -> str:
    """``0.19.2 in /opt/Megatron-LM/megatron, commit 98e688712345 (modified)``."""
    text = f"{clean(code.version, 60)} in {clean(code.path, NOTE_LIMIT)}"
    if not code.commit:
        return text
    return f"{text}, commit {clean(code.commit[:12])}{' (modified)' if code.dirty else ''}"


def run_pairs(run: Run | None) -> list[tuple[str, str]]:
    """Everything about a run, labelled, as a page shows it."""
    if run is None:
        return []
    named = {
        "Megatron": code_text(run.megatron),
        "megatron_ttrace": code_text(run.ttrace),
        "command": shlex.join(run.command),
        "script": f"{run.script} (sha256 {run.script_sha256 or 'unknown'})",
        "run": run.id,
        "date": run.date,
        "user": f"{run.user} on {run.host}",
        "seed": str(run.seed),
        **run.environment,
    }
    return [(clean(name, 60), clean(value, COMMAND_LIMIT)) for name, value in named.items()]


def sci(value: float | None) -> str:
    """``0.205`` -> ``2.05e-1``; ``None`` -> ``-``."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def share(value: float | None) -> str:
    """A relative error: ``20.5 %``, or ``3.83e-7`` where percent would be hard to read."""
    if value is None or not 1e-4 <= value < 100:
        return sci(value)
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 99.95 else f"{percent:.3g} %"


def error_text(one: Culprit | Verdict) -> str:
    """``20.5 % (26.4 ε)``: the relative error, and in epsilons of the compute dtype."""
    known = one.rel_err_eps is not None and one.rel_err != 0
    return f"{share(one.rel_err)} ({factor(one.rel_err_eps)} ε)" if known else sci(one.rel_err)


def tensor_text(one: Culprit | Verdict, limit: int = NAME_LIMIT) -> str:
    """``decoder.layers.0.mlp output.0``."""
    return f"{clean(one.name, limit)} {one.kind.value}.{one.index}"


def factor(value: float | None) -> str:
    """A ratio in three digits: ``0.42``, ``26.4``, ``1.2e4``."""
    if value is None:
        return "-"
    if math.isfinite(value) and abs(value) >= 9999.5:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa}e{int(exponent)}"
    if math.isfinite(value) and abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.3g}"


def margin_text(margin: float | None) -> str:
    """``52.4×``: the error as a multiple of the tolerance."""
    return "-" if margin is None else f"{factor(margin)}×"


def exactness_text(exactness: Exactness | None) -> str:
    """Whether the tensors that must be bitwise equal are; empty if none must be."""
    if exactness is None or not exactness.expected:
        return ""
    if not exactness.lost:
        return f"{exactness.expected:,} tensors must be bitwise equal in this layout: all are"
    return (
        f"{exactness.lost:,} of {exactness.expected:,} tensors are not bitwise equal though this "
        f"layout does not reorder their arithmetic: first at {clean(exactness.first, NOTE_LIMIT)}, "
        f"error {sci(exactness.rel_err)}, {on_ranks(exactness.ranks)}"
    )


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of each run of consecutive numbers."""
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and number == found[-1][1] + 1:
            found[-1] = found[-1][0], number
        else:
            found.append((number, number))
    return found


def ranks_text(ranks: Iterable[int], limit: int = 12) -> str:
    """``(0, 1, 2, 5)`` -> ``0-2,5``, with the tail counted where there are many ranges."""
    found = runs(ranks)
    shown = [str(a) if a == b else f"{a}-{b}" for a, b in found[:limit]]
    rest = sum(b - a + 1 for a, b in found[limit:])
    return ",".join(shown) + (f" and {rest} more" if rest else "") if shown else "-"


def on_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2``, or nothing known."""
    held = sorted(set(ranks))
    if not held:
        return "no rank"
    return f"rank{'s' if len(held) > 1 else ''} {ranks_text(held)}"


def when_text(one: Culprit | Verdict) -> str:
    """``iteration 1, microbatch 0``; step-level tensors have no microbatch."""
    step = f"iteration {one.iteration}"
    return step if one.microbatch == STEP_LEVEL else f"{step}, microbatch {one.microbatch}"


def number(value: Any) -> int | None:
    """An integer of the configuration, which may have been written by anybody."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


def layout_text(config: Mapping[str, Any]) -> str:
    """``tp 2 × pp 2, 4 ranks``: the axes that split anything. Of two runs, that of both."""
    if isinstance(first := config.get("against"), Mapping):
        return f"{_layout_text(config)}, against {_layout_text(first)}"
    return _layout_text(config)


def _layout_text(config: Mapping[str, Any]) -> str:
    sizes = {axis: number(config.get(axis)) for axis in AXES}
    split = [f"{axis} {size}" for axis, size in sizes.items() if size is not None and size > 1]
    world = number(config.get("world_size"))
    one = "1 device" if world in (None, 1) else "no parallel axis"
    text = " × ".join(split) or one
    return f"{text}, {world} ranks" if world is not None and world > 1 else text


def sentence(one: Culprit | Verdict) -> str:
    """A failure in one line: what, in which direction, on which ranks, how bad, and when."""
    text = (
        f"{tensor_text(one)} {OUTCOME_WORDS[one.verdict]} in the {one.direction.value} direction "
        f"on {on_ranks(one.ranks)}"
    )
    if one.rel_err is not None:
        text += f": relative error {error_text(one)}"
        if one.margin is not None:
            text += f", {margin_text(one.margin)} its tolerance {sci(one.tolerance)}"
    note = f". {clean(one.note, NOTE_LIMIT)}" if isinstance(one, Verdict) and one.note else ""
    return f"{text} ({when_text(one)}){note}"


_NAMES = 3


def not_exercised_text(one: NotExercised) -> str:
    """What a pass says nothing about, and why: ``not exercised: gradient clipping (...)``."""
    names = ", ".join(clean(name) for name in one.names[:_NAMES])
    more = f", and {len(one.names) - _NAMES} more" if len(one.names) > _NAMES else ""
    share = f"{100 * one.value / one.limit:.1f} %" if one.value and one.limit else ""
    text = _NOT_EXERCISED[one.what].format(
        value=_number(one.value), limit=_number(one.limit), share=share, names=names + more
    )
    return f"not exercised: {text}"


def _number(value: float | None) -> str:
    """Counts as such, measured numbers in three digits."""
    if value is not None and math.isfinite(value) and value == int(value):
        return f"{int(value):,}"
    return factor(value)


_MAX_ISOLATED = 3
"""Culprits of a check with modules isolated that are told."""


def isolated_texts(culprits: Sequence[Culprit]) -> list[str]:
    """What a check with modules isolated found: each of its culprits fails on its own."""
    told = []
    for culprit in culprits[:_MAX_ISOLATED]:
        cause = clean(culprit.explanation, NOTE_LIMIT) or "unknown"
        name = clean(culprit.name, NOTE_LIMIT)
        told.append(f"{name} ({culprit.kind}) fails on its own; cause: {cause}")
    if not told:
        return ["no module fails on its own: errors add up, or arise between modules"]
    more = len(culprits) - len(told)
    return [*told, f"and {more} more"] if more else told


_MAX_CHANGED = 4


def changed_texts(changed: ChangedCode | None) -> list[str]:
    """The changed code by where it ran, a line for each, what ran in the culprit first."""
    said = []
    for ran, text in _CHANGED.items():
        those = [one for one in changed.functions if one.ran is ran] if changed else []
        shown = [
            f"{one.file}:{one.line} ({one.function or 'outside of functions'})"
            for one in those[:_MAX_CHANGED]
        ]
        if changed and shown:
            more = len(those) - len(shown)
            shown += [f"and {more} more"] if more else []
            line = f"{text.format(since=changed.since)}: {', '.join(shown)}"
            said.append(clean(line, NOTE_LIMIT))
    return said


def notices(summary: Summary) -> list[str]:
    """Everything that a reader must know beside the answer, one sentence each."""
    said = changed_texts(summary.changed_code)
    said += [clean(notice, NOTE_LIMIT) for notice in summary.notices]
    return said + [not_exercised_text(one) for one in summary.not_exercised]


def reason_text(reason: Reason | None) -> str:
    """Why tensors were not checked, for people."""
    return "no reason recorded" if reason is None else _REASONS.get(reason, reason.value)


def cause_pairs(culprit: Culprit) -> list[tuple[str, str]]:
    """What was tested, what it suggests, where to look; labelled, without what is not known."""
    found = {
        "cause": clean(culprit.explanation, NOTE_LIMIT) or UNKNOWN,
        "hint": clean(culprit.hint, NOTE_LIMIT),
        "observed": clean(culprit.collectives, NOTE_LIMIT),
        "look at": clean(culprit.where, NOTE_LIMIT),
    }
    return [(label, text) for label, text in found.items() if text]


def not_judged_text(statistic: Statistic, why: str) -> str:
    """The notice that it was not checked which elements are in a statistic."""
    return f"which elements are in {STATISTICS[statistic]} is not judged: {clean(why)} is unknown"


def hyperparameters_text(values: Iterable[tuple[str, float, float]]) -> str:
    """``the optimizer steps it with lr 0.005 instead of 0.001``."""
    each = (f"{clean(name)} {ours:.7g} instead of {right:.7g}" for name, ours, right in values)
    return f"the optimizer steps it with {', '.join(each)}"


def notes_text(notes: Iterable[Note]) -> str:
    """What is said of a tensor beside its outcome."""
    return "; ".join(map(note_text, notes))


def note_text(note: Note) -> str:
    """One remark on a tensor."""
    text = note.text
    match note:
        case FaultNote(finding=Miscounted(statistic=statistic)):
            text = STATISTICS[statistic]
        case FaultNote(finding=OtherHyperparameters(values=values)):
            text = hyperparameters_text(values)
    samples = "; in the reference ".join(map(_sample, note.samples))
    ranks: Any = note.ranks if note.what is Remark.SAME_START else on_ranks(note.ranks)
    return _NOTES[note.what].format(
        value=note.value, limit=note.limit, ranks=ranks, text=text, samples=samples
    )


def _sample(one: Sample) -> str:
    return f"mean {one.mean:.3g}, std {one.std:.3g}" if one.std else f"all {one.mean:.6g}"


def same_start_text(alike: Sequence[Judged]) -> str:
    """The notice about parameters of different layers whose initial values are equal."""
    first = f"{alike[0].name}: {notes_text(alike[0].notes)}"
    return f"{len(alike)} parameters begin with another layer's numbers: {first}"


def repeated_text(first: TraceKey, moved: int) -> str:
    """The notice that the reference is not deterministic."""
    return (
        f"the model is not deterministic: one device repeated the step and got other values for "
        f"{moved:,} tensors, the first of them {first}; tensors whose tolerance comes from this, "
        "and not from rounding, are unchecked"
    )


def too_few_text(found: TooFew) -> str:
    """Why too few tensors were checked, and the flag that accepts it."""
    most = ", ".join(
        f"{reason.value if reason else 'no reason known'} ({count:,})"
        for reason, count in found.reasons
    )
    percent = 100 * found.unchecked / found.judged
    return (
        f"could not check enough: {found.unchecked:,} of {found.judged:,} tensors "
        f"({percent:.1f} %) are unchecked, more than {100 * found.allowed:.4g} %; "
        f"most: {most}; "
        f"--ttrace-allow-unchecked {math.ceil(percent) / 100:g} accepts it"
    )
