# SPDX-License-Identifier: Apache-2.0
"""Numbers, ranks and culprits as text, the same in every output.

Errors are written in percent and in multiples of the machine epsilon: ``20.5 % (26.4 ε)``.
"""

import itertools
import math
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import ChangedFunction, Execution
from megatron_ttrace.trace.findings import (
    FaultNote,
    Miscounted,
    Note,
    OtherHyperparameters,
    Remark,
    Sample,
)
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import NotExercised, Reason, Unexercised
from megatron_ttrace.trace.places import Clue
from megatron_ttrace.trace.records import (
    ROOT,
    STEP_LEVEL,
    Code,
    Culprit,
    Exactness,
    Kind,
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
EXPERT_AXES = ("ep", "etp", "edp")
AXES = ("tp", "cp", "pp", "dp", "vpp", *EXPERT_AXES)


MESSAGES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_name("messages.toml").read_text(encoding="utf-8")
)
"""All sentences, by the enumeration whose members they put into words."""


def messages[E: Enum](members: type[E], table: str = "") -> dict[E, str]:
    """The sentences of an enumeration's members, from the table of its name, or another one."""
    return {members[name]: text for name, text in MESSAGES[table or members.__name__].items()}


OUTCOME_WORDS = messages(Outcome)
_RESULT_SENTENCES = messages(Result)
STATISTICS = messages(Statistic)
_NOTES: dict[Remark | Reason, str] = {**messages(Remark), **messages(Reason, "Note")}
_REASONS = messages(Reason)
_CLUES = messages(Clue)
_NOT_EXERCISED = messages(Unexercised)
_CHANGED = messages(Execution)
_ISOLATE = "with --ttrace-isolate rounding does not spread, and fewer are blind; "


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
    return _scientific(value, 2) if value else "0"


def _scientific(value: float, digits: int) -> str:
    mantissa, exponent = f"{value:.{digits}e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def share(value: float | None) -> str:
    """A relative error: ``20.5 %``, or ``3.83e-7`` where percent would be hard to read."""
    if value is None or not 1e-4 <= value < 100:
        return sci(value)
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 99.95 else f"{percent:.3g} %"


def error_text(tensor: Culprit | Verdict) -> str:
    """``20.5 % (26.4 ε)``: the relative error, also in epsilons of the dtype if it is rounded."""
    if tensor.rel_err_eps is None or tensor.rel_err == 0:
        return sci(tensor.rel_err)
    if tensor.rel_err == math.inf and tensor.verdict is Outcome.DIVERGED:
        return "infinite: in the reference it is zero"
    error = share(tensor.rel_err)
    return f"{error} ({factor(tensor.rel_err_eps)} ε)" if tensor.tolerance != 0 else error


def tensor_text(tensor: Culprit | Verdict) -> str:
    """``decoder.layers.0.mlp output.0``."""
    return f"{clean(tensor.name, NAME_LIMIT)} {tensor.kind.value}.{tensor.index}"


def factor(value: float | None) -> str:
    """A ratio in three digits: ``0.42``, ``26.4``, ``1.2e4``."""
    if value is None:
        return "-"
    if math.isfinite(value) and abs(value) >= 99.95:
        return f"{value:.0f}" if abs(value) < 9999.5 else _scientific(value, 1)
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
    ranges: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1] = ranges[-1][0], number
        else:
            ranges.append((number, number))
    return ranges


def ranks_text(ranks: Iterable[int], limit: int = 12, to: str = "-", gap: str = ",") -> str:
    """``(0, 1, 2, 5)`` -> ``0-2,5``, with the tail counted where there are many ranges."""
    ranges = runs(ranks)
    shown = [str(a) if a == b else f"{a}{to}{b}" for a, b in ranges[:limit]]
    hidden = sum(b - a + 1 for a, b in ranges[limit:])
    return gap.join(shown) + (f" and {hidden} more" if hidden else "") if shown else "-"


def on_ranks(ranks: Iterable[int]) -> str:
    """``rank 3``, ``ranks 0-2``, or nothing known."""
    numbers = set(ranks)
    return f"rank{'s' * (len(numbers) > 1)} {ranks_text(numbers)}" if numbers else "no rank"


def when_text(tensor: Culprit | Verdict) -> str:
    """``iteration 1, microbatch 0``; step-level tensors have no microbatch."""
    step = f"iteration {tensor.iteration}"
    return step if tensor.microbatch == STEP_LEVEL else f"{step}, microbatch {tensor.microbatch}"


def number(value: Any) -> int | None:
    """An integer of the configuration, which may have been written by anybody."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return int(value)
    except (ValueError, OverflowError):
        return None


def result_text(summary: Summary) -> str:
    """The answer in a few words; ``model``: of another implementation, if one was compared."""
    against = summary.config.get("against")
    model = against.get("model") if isinstance(against, Mapping) else None
    if not isinstance(model, str) or summary.verdict is Result.COULD_NOT_CHECK:
        return _RESULT_SENTENCES[summary.verdict]
    same = summary.verdict is Result.EQUIVALENT
    return f"{'computes the same as' if same else 'differs from'} {clean(model)}"


def layout_text(config: Mapping[str, Any]) -> str:
    """``tp 2 × pp 2, vpp 2, experts ep 2, 4 ranks``: the axes that split anything.

    The product of the first is the number of ranks. Of two runs, the layout of both.
    """
    sizes = {axis: number(config.get(axis)) for axis in AXES}
    split = {
        axis: f"{axis} {size}" for axis, size in sizes.items() if size is not None and size > 1
    }
    world = number(config.get("world_size"))
    dense = " × ".join(split[axis] for axis in split if axis not in ("vpp", *EXPERT_AXES))
    text = dense or ("1 device" if world in (None, 1) else "no parallel axis")
    text += f", {split['vpp']}" if "vpp" in split else ""
    if experts := " × ".join(split[axis] for axis in split if axis in EXPERT_AXES):
        text += f", experts {experts}"
    shards = number(config.get("weight_shards"))
    text += f", weights in {shards} shards" if shards is not None and shards > 1 else ""
    text += f", {world} ranks" if world is not None and world > 1 else ""
    first = config.get("against")
    if isinstance(first, Mapping) and "model" not in first:
        return f"{text}, against {layout_text(first)}"
    return text


def sentence(tensor: Culprit | Verdict) -> str:
    """A failure in one line: what, in which direction, on which ranks, how bad, and when."""
    text = f"{tensor_text(tensor)} {OUTCOME_WORDS[tensor.verdict]} in the "
    text += f"{tensor.direction.value} direction on {on_ranks(tensor.ranks)}"
    if tensor.rel_err is not None:
        text += f": relative error {error_text(tensor)}"
        if tensor.margin is not None:
            text += f", {margin_text(tensor.margin)} its tolerance {sci(tensor.tolerance)}"
    note = clean(tensor.note, NOTE_LIMIT) if isinstance(tensor, Verdict) else ""
    return f"{text} ({when_text(tensor)})" + (f". {note}" if note else "")


def first_of(texts: Sequence[str], most: int) -> list[str]:
    """The first texts of a list, and how many more there are."""
    more = len(texts) - most
    return [*texts[:most], f"and {more} more"] if more > 0 else [*texts]


def not_exercised_text(part: NotExercised) -> str:
    """What a pass says nothing about, and why: ``not exercised: gradient clipping (...)``."""
    value, limit = _number(part.value), _number(part.limit)
    if value == limit and part.value is not None and part.value != part.limit:
        # Rounding must not make them equal.
        value = f"{part.value:.7g}"
    names = ", ".join(first_of([clean(name) for name in part.names], 3))
    text = _NOT_EXERCISED[part.what].format(
        value=value,
        limit=limit,
        share=f"{100 * part.value / part.limit:.1f} %" if part.value and part.limit else "",
        names=names,
        among=f", most of {names}" if names else "",
    )
    return f"not exercised: {text}"


def _number(value: float | None) -> str:
    """Counts as such, measured numbers in three digits."""
    if value is not None and math.isfinite(value) and value == int(value):
        return f"{int(value):,}"
    return factor(value)


def culprit_name(culprit: Culprit) -> str:
    """The name of a module; what the whole model returns is described."""
    is_loss = culprit.name == ROOT and culprit.kind in (Kind.OUTPUT, Kind.GRAD_OUTPUT)
    return clean(culprit.name, 240) + (" (the loss of each token, or logits)" if is_loss else "")


def isolated_texts(culprits: Sequence[Culprit]) -> list[str]:
    """What a check with modules isolated found: each of its culprits fails on its own."""
    texts = [
        f"{clean(culprit.name, NOTE_LIMIT)} ({culprit.kind}) fails on its own; cause: "
        f"{clean(culprit.explanation, NOTE_LIMIT) or 'unknown'}"
        for culprit in culprits
    ]
    nothing = "no module fails on its own: errors add up, or arise between modules"
    return first_of(texts, 3) or [nothing]


def changed_texts(summary: Summary) -> list[str]:
    """The changed code by where it ran, a line for each, what ran in the culprit first.

    What ran elsewhere and is among the places to look at is not said to have run elsewhere.
    """
    lines, changed = [], summary.changed_code
    named = {
        (Execution.ELSEWHERE, place.file, place.function)
        for culprit in summary.culprits
        for place in culprit.places
    }
    for ran, replaces in itertools.product(Execution, (False, True)):
        places = [
            _edit_text(function)
            for function in (changed.functions if changed else ())
            if (function.ran, function.replaces) == (ran, replaces)
            and (ran, function.file, function.function) not in named
        ]
        if changed and places:
            text = _CHANGED[ran].format(since="it was imported" if replaces else changed.since)
            lines.append(clean(f"{text}: {', '.join(first_of(places, 4))}", NOTE_LIMIT))
    return lines


def _edit_text(function: ChangedFunction) -> str:
    """The file, and what of it, if that is known."""
    if not function.line:
        return function.file
    return f"{function.file}:{function.line} ({function.function or 'outside of functions'})"


def notices(summary: Summary) -> list[str]:
    """Everything that a reader must know beside the answer, one sentence each."""
    return [
        *changed_texts(summary),
        *(clean(notice, NOTE_LIMIT) for notice in summary.notices),
        *map(not_exercised_text, summary.not_exercised),
    ]


def reason_text(reason: Reason | None) -> str:
    """Why tensors were not checked, for people."""
    return "no reason recorded" if reason is None else _REASONS.get(reason, reason.value)


PLACES = ("look at", "or at")
"""Labels of places in files."""


def cause_pairs(culprit: Culprit, most: int = 3) -> list[tuple[str, str]]:
    """What was tested, what it suggests, at most so many places to look at; all labelled.

    What is not known is left out.
    """
    texts = [
        ("cause", culprit.explanation or UNKNOWN),
        ("hint", culprit.hint),
        ("observed", culprit.collectives),
    ]
    texts += [(PLACES[0], culprit.where)] if not culprit.places else []
    for number, place in enumerate(culprit.places[:most]):
        texts.append((PLACES[number > 0], f"{place}: {_CLUES[place.clue]}"))
    return [(label, clean(text, NOTE_LIMIT)) for label, text in texts if text]


def not_judged_text(statistic: Statistic, why: str) -> str:
    """The notice that it was not checked which elements are in a statistic."""
    return f"which elements are in {STATISTICS[statistic]} is not judged because of {clean(why)}"


def hyperparameters_text(finding: OtherHyperparameters) -> str:
    """``the optimizer steps it with lr 0.005 instead of 0.001``."""
    texts = (
        f"{clean(name)} {ours:.7g} instead of {right:.7g}" for name, ours, right in finding.values
    )
    begin = "its next step has" if finding.following else "the optimizer steps it with"
    return f"{begin} {', '.join(texts)}"


def notes_text(notes: Iterable[Note]) -> str:
    """Remarks on a tensor, beside its outcome."""
    return "; ".join(map(note_text, notes))


def note_text(note: Note) -> str:
    """One remark on a tensor."""
    text = note.text
    match note:
        case FaultNote(finding=Miscounted(statistic=statistic)):
            text = STATISTICS[statistic]
        case FaultNote(finding=OtherHyperparameters() as finding):
            text = hyperparameters_text(finding)
    samples = "; in the reference ".join(map(_sample, note.samples))
    ranks: Any = note.ranks if note.what is Remark.SAME_START else on_ranks(note.ranks)
    return _NOTES[note.what].format(
        value=note.value, limit=note.limit, ranks=ranks, text=text, samples=samples
    )


def _sample(values: Sample) -> str:
    mean, std = values.mean, values.std
    return f"mean {mean:.3g}, std {std:.3g}" if std else f"all {mean:.6g}"


def same_start_text(alike: Sequence[Judged]) -> str:
    """The notice about parameters of different layers whose initial values are equal."""
    first = f"{alike[0].name}: {notes_text(alike[0].notes)}"
    return f"{len(alike)} parameters have the same initial values as another layer's: {first}"


def excused_text(excused: Sequence[Judged]) -> str:
    """The notice about tensors that pass for one reason though they differ."""
    first = f"{excused[0].key}: {notes_text(excused[0].notes)}"
    return f"tensors that differ and pass: {len(excused):,}, the first of them {first}"


def repeated_text(first: TraceKey, moved: int) -> str:
    """The notice that the reference is not deterministic."""
    return (
        f"the model is not deterministic: one device repeated the step and got other values for "
        f"{moved:,} tensors, the first of them {first}; tensors whose tolerance comes from this, "
        "and not from rounding, are unchecked"
    )


def too_few_text(
    unchecked: int,
    judged: int,
    allowed: float,
    reasons: Iterable[tuple[Reason | None, int]],
    isolate: bool = False,
) -> str:
    """Why too few tensors were checked, and the flag that accepts it.

    ``reasons`` are the most frequent ones, each with its number of tensors. ``isolate``: advise to
    check each module alone.
    """
    most = (f"{reason.value if reason else 'no reason known'} ({n:,})" for reason, n in reasons)
    percent = 100 * unchecked / judged
    return (
        f"could not check enough: {unchecked:,} of {judged:,} tensors ({percent:.1f} %) "
        f"are unchecked, more than {100 * allowed:.4g} %; most: {', '.join(most)}; "
        f"{_ISOLATE if isolate else ''}"
        f"--ttrace-allow-unchecked {math.ceil(percent) / 100:g} accepts it"
    )
