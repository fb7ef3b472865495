# SPDX-License-Identifier: Apache-2.0
"""Typed conclusions as the records of the contract, which have text in them.

Why a module is a culprit, what was tested, what that suggests. Each type of finding has a renderer,
or is simple enough for a template in ``messages.toml``.
"""

import dataclasses
import itertools
import string
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from megatron_ttrace.report.ledger import citation_text
from megatron_ttrace.report.wording import (
    MESSAGES,
    STATISTICS,
    UNKNOWN,
    hyperparameters_text,
    messages,
    notes_text,
    on_ranks,
    ranks_text,
)
from megatron_ttrace.trace import findings as f
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import Cause, Explanation, FailingRanks
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.outcomes import Grounds, Reason
from megatron_ttrace.trace.places import Clue
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    BufferIndex,
    Culprit,
    DropoutIndex,
    Kind,
    LoadedIndex,
    TensorResult,
    Verdict,
)
from megatron_ttrace.trace.sanitise import beginning, clean

_MEASURED = [field.name for field in dataclasses.fields(TensorResult)]
_OF_CULPRITS = {field.name for field in dataclasses.fields(Culprit)} & {*_MEASURED} - {"name"}
_OTHERS = 4
"""Further parameters that a sentence names."""
_MEAN = 0.02
"""How far a mean of measured numbers may be from what is expected."""

Text = tuple[str, str]
"""What was tested, and what that suggests."""

_GROUNDS = messages(Grounds)
_ELEMENT = f.Note(f.Remark.ELEMENT)
_LOADED = {int(index): text for index, text in messages(LoadedIndex).items()}
_ORDERS = messages(f.RowOrder)
_MASKS = messages(f.MaskOrder)
_OPERANDS = messages(f.CastOperand)
_TERMS = messages(f.Term)
_SUSPECTS = messages(Statistic, "Suspects")
_LACKS, _SIZES = messages(f.Lack), MESSAGES["sizes"]
_TEMPLATES, _CAUSES, _ZERO, _DROPOUT = (
    {name: (text, hint) for name, (text, hint) in MESSAGES[table].items()}
    for table in ("Finding", "Cause", "Zero", "Dropout")
)


def verdict_of(judged: Judged) -> Verdict:
    """A line of ``verdicts.jsonl``."""
    values = {name: getattr(judged, name) for name in _MEASURED}
    return Verdict(**values, note=notes_text(judged.notes), reason=judged.reason)


def culprit_of(diagnosis: Diagnosis) -> Culprit:
    """A culprit of ``summary.json``."""
    verdict, why = diagnosis.verdict, diagnosis.why
    return Culprit(
        **{name: getattr(verdict, name) for name in _OF_CULPRITS},
        name=diagnosis.name,
        direction=diagnosis.direction,
        reason=reason_text(diagnosis),
        explanation=explanation_text(why, verdict),
        hint=hint_text(why, verdict),
        where=str(why.places[0]) if why.places else "",
        collectives=citation_text(why.collectives),
        cause=why.finding.cause if why.finding else None,
        axes=why.finding.axes if why.finding else (),
        group=diagnosis.group,
        places=why.places,
    )


def reason_text(diagnosis: Diagnosis) -> str:
    """The evidence for a culprit in one sentence."""
    verdict, before, alike = diagnosis.verdict, diagnosis.before, diagnosis.alike
    note, is_loaded = notes_text(verdict.notes), verdict.kind is Kind.LOADED
    statistics = [*STATISTICS.values()]  # what a verdict on elements that are counted is about
    text = _GROUNDS[diagnosis.grounds].format(
        name=verdict.name,
        kind=verdict.kind.value,
        note=note or "absent",
        index=_LOADED[verdict.index] if is_loaded else statistics[verdict.index % len(statistics)],
    )
    text += f"; {note}" * (verdict.reason is Reason.TWIN)
    text += f"; {notes_text([_ELEMENT])}" * (_ELEMENT in verdict.notes)
    if before is not None:
        text += f"; the tensor before it ({before.name} {before.kind}.{before.index}) passes"
    if diagnosis.shared:
        text += f"; shared with {' and '.join(diagnosis.shared)}, which may be wrong instead"
    if len(alike) > 1:
        failing = sum(judged.verdict.is_failure for judged in alike)
        text += f"; {failing} of {len(alike)} of its kind fail"
    return text


def explanation_text(why: Explanation, verdict: Judged) -> str:
    """What was tested, and on which ranks it holds; :data:`UNKNOWN` without a finding."""
    if why.finding is None:
        return UNKNOWN
    text = _texts(why.finding, verdict)[0]
    if why.other is not None:
        text += f" (as simple, and it fits as well: {_texts(why.other, verdict)[0]})"
    if why.alike is not None:
        alike, failing = why.alike
        count = f"all {failing}" if alike == failing else f"{alike} of the {failing}"
        text += f", as are {count} main gradients that fail"
    return text + (f", {on}" if why.ranks and (on := failing_text(why.ranks)) else "")


def hint_text(why: Explanation, verdict: Judged) -> str:
    """What the finding suggests, or the error's pattern without one; this was not tested."""
    if why.finding is not None:
        summed = why.collectives.summed if why.collectives else frozenset()
        hint = _texts(why.finding, verdict, summed)[1]
        # What the user's own code returns may be meant as a share, or not.
        places = itertools.takewhile(lambda place: place.clue is not Clue.OWN, why.places)
        made = next((place.function for place in places if place.clue is Clue.ORIGIN), "")
        if made and hint and isinstance(why.finding, f.ConstantFactor):
            return f"a number made in {made} is off by the same factor; otherwise {hint}"
        return hint
    return _texts(why.observed, verdict)[0] if why.observed is not None else ""


def failing_text(failing: FailingRanks) -> str:
    """``on all 4 ranks``, ``only on ranks 1,3 (tp 1)``; empty for a single device."""
    ranks = failing.ranks
    if failing.world <= 1 or not ranks:
        return ""
    if len(ranks) == failing.holders:
        if len(ranks) == 1:
            return f"on rank {ranks[0]}, the only one that holds it"
        return f"on all {len(ranks)} ranks" + (" that hold it" * (len(ranks) < failing.world))
    shared = " ({} {})".format(*failing.shared) if failing.shared else ""
    return f"only on {on_ranks(ranks)}{shared}"


def _texts(finding: f.Finding, verdict: Judged, summed: AbstractSet[str] = frozenset()) -> Text:
    """``summed``: axes over which something was added up where it fails."""
    if isinstance(finding, f.Composed):
        steps = (_texts(step, verdict, summed) for step in finding.steps)
        texts, hints = map(list, zip(*steps, strict=True))
        first = finding.steps[0]
        if isinstance(first, f.PartialSums) and not first.mean:
            texts[0] = f"partial sums over {' and '.join(first.axes)}"
        return "; with that repaired: ".join(texts), "; ".join(filter(None, hints))
    axes = " and ".join(finding.axes)
    is_load = (verdict.kind, verdict.index) == (Kind.BUFFER, BufferIndex.LOADS)
    if isinstance(finding, f.PartialSums) and is_load:
        # Loads of experts are shares of their sum: without a reduction, too, they have its mean.
        return _rendered(finding)[0], f"a missing reduction over {axes}"
    if isinstance(finding, f.PartialSums) and summed >= {*finding.axes}:
        hint = f"a reduction over {axes} ran: it left this out, or something was added after it"
        return _rendered(finding)[0], hint
    if verdict.kind is Kind.DROPOUT and isinstance(finding, f.ConstantFactor):
        if verdict.index % len(DropoutIndex) == DropoutIndex.PROBABILITY:
            return _DROPOUT["PROBABILITY"]
        if verdict.index % len(DropoutIndex) == DropoutIndex.RECOMPUTED:
            return _DROPOUT["RECOMPUTED" if finding.ratio < 1 else "REPEATED"]
        more = "AFTERWARDS" if verdict.key.microbatch == STEP_LEVEL else "APART"
        return _DROPOUT["ALIKE" if finding.ratio < 1 else more]
    if type(finding) is not f.Finding:
        return _rendered(finding)
    if finding.cause is Cause.ZERO:
        return _ZERO.get(verdict.kind.name, ("all zero", ""))
    if finding.cause is Cause.PARTS:
        text = f"the sum, or mean, of the different parts that ranks along {axes} should have"
        return text, f"a reduction over ranks along {axes}, which have different parts"
    if finding.cause is Cause.CUT_OFF:
        return notes_text([f.Note(f.Remark.CUT_OFF)]), ""
    return _CAUSES.get(finding.cause.name, (notes_text(verdict.notes), ""))


def _rendered(finding: f.Finding) -> Text:
    if render := _RENDERERS.get(type(finding)):
        return render(finding)
    name = type(finding).__name__
    flags = (key.partition(".")[2] for key in _TEMPLATES if key.startswith(f"{name}."))
    values = ((flag, getattr(finding, flag)) for flag in flags)
    # A number that is given may be 0.
    present = [flag for flag, value in values if value is not None and value is not False]
    text, hint = _TEMPLATES[".".join([name, *present[:1]])]
    return _WORDS.format(text, it=finding), _WORDS.format(hint, it=finding)


def _layers(finding: f.MisplacedLayers) -> Text:
    missing, total, held = finding.missing, finding.total, sum(finding.held)
    counts = f"the stages hold {' + '.join(map(str, finding.held))} = {held}"
    if finding.cause is not Cause.LAYER_NUMBERS:
        which = f"layer{'s' * (len(missing) > 1)} {_ranges(missing)} of {total}"
        hint = f"{total} // {finding.divisor} layers each, and the remainder is dropped"
        return f"{which} on no pipeline stage: {counts} layers", hint if finding.divisor else ""
    holders = {
        "by several": finding.twice,
        "by none": missing,
        "without being in the reference": finding.strange,
    }
    wrong = ", ".join(f"{_ranges(layers)} {how}" for how, layers in holders.items() if layers)
    hint = "the offset of a stage's layer numbers" if held == total else ""
    return f"layers held by pipeline stages: {wrong}; {counts} of {total}", hint


_UNSCALED = (
    "the same values as in the reference, which has more microbatches: no division by their number"
)


def _factor(finding: f.ConstantFactor) -> Text:
    if finding.cause is Cause.SIGN:
        return "the sign is flipped", ""
    large = abs(finding.ratio) > 1
    size = max(abs(finding.ratio), 1 / abs(finding.ratio))
    number = f"{size:.3f}" if size < 1000 else f"{size:.4g}"
    text = f"{number} times too {'large' if large else 'small'}"
    if finding.ratio < 0:
        text += " with its sign flipped"
    if not finding.sizes:
        return f"{text}, a constant factor that is not the size of an axis", ""
    text += f" = {'the root of ' * finding.root}{' or '.join(map(_size, finding.sizes))}"
    if finding.cause is Cause.SOFTMAX_SCALE:
        return text, f"applied {'never' if large else 'twice'}"
    axes = [
        "·".join(names)
        for names in finding.sizes
        if {"microbatches", "shards"} & {*names} or not _SIZES.keys() & {*names}
    ]
    if not axes:
        return text, "it was multiplied, or divided, once too often or not at all"
    fault = (
        "a missing division, or a doubled factor or reduction"
        if large
        else "a doubled division, or a missing factor or reduction"
    )
    if finding.unscaled and any("dp" in names for names in finding.sizes):
        fault = f"{_UNSCALED}, or {fault}"
    return text, f"{fault} over {' or '.join(axes)}"


def _gradient_factor(finding: f.GradientFactor) -> Text:
    if not finding.ratio:
        return "its gradient is not in it", _ZERO["EXP_AVG"][1]
    text, hint = _factor(finding)
    return f"its gradient is in it {text}", hint


def _loss_term(finding: f.LossTerm) -> Text:
    term = _TERMS[finding.term]
    if type(finding.fault) is f.Finding:
        return f"{term} is missing", ""
    text, hint = _rendered(finding.fault)
    return f"{term} is {text}", hint


def _shift(finding: f.Shift) -> Text:
    sign = "minus " if finding.constant < 0 else ""
    text = f"{finding.constant:.4g} is added to all values = {sign}the logarithm of "
    hint = f"a sum of exponentials is {'too large' if finding.constant > 0 else 'too small'}"
    return text + " or ".join(map(_size, finding.sizes)), hint


def _size(names: Sequence[str]) -> str:
    axes = "·".join(name for name in names if name not in _SIZES)
    meanings = [_SIZES[name] for name in names if name in _SIZES]
    return " times ".join([*([f"the size of {axes}"] if axes else []), *meanings])


def _listed(factors: Sequence[tuple[int, float]]) -> str:
    return ", ".join(f"rank {rank}: {value:.4g}" for rank, value in factors[:6])


def _product(finding: f.ProductFactors) -> Text:
    text = f"the product is off by a factor ({_listed(finding.factors)})"
    text += ", its bias is right" if finding.has_bias else ""
    if not finding.dtype:
        return text, ""
    inverse = "the inverse of " if finding.inverse else ""
    text += f": that is {inverse}the scale of a cast to FP8 ({finding.dtype}) of "
    text += _OPERANDS[finding.operand]
    if finding.inverse:
        lost = "what was cast is not what was multiplied"
        return text, f"the scale was undone and never applied: {lost}"
    return text, "the scale was applied and never undone"


def _copies(finding: f.WrongCopies) -> Text:
    verb = "hold wrong copies" if len(finding.wrong) > 1 else "holds a wrong copy"
    text = f"{on_ranks(finding.wrong)} {verb}, the copies on {on_ranks(finding.right)} are right"
    return text, ""


def _shares(finding: f.UnequalShares) -> Text:
    texts = ["; ".join(map(_weights, weights)) for _, weights in finding.by_ranks]
    text = texts[0]
    if len(texts) > 1:
        ranks = [on_ranks(ranks) for ranks, _ in finding.by_ranks]
        text = "; ".join(f"on {who} {how}" for who, how in zip(ranks, texts, strict=True))
    own_mean = any(_are_means(share) for _, weights in finding.by_ranks for share in weights)
    return text, "each rank takes the mean over its own tokens" if own_mean else ""


def _are_means(share: f.ShareWeights) -> bool:
    """Whether ranks may have taken the mean over their own n tokens, of N on R ranks.

    Each then counts N / (R n) times, so that the reciprocals have the mean 1.
    """
    counts = [count for _, count in share.counts if count > 0]
    is_mean = abs(sum(1 / count for count in counts) / len(counts) - 1) < _MEAN if counts else False
    return share.axis == "dp" and len(counts) == len(share.counts) > 1 and is_mean


def _weights(weights: f.ShareWeights) -> str:
    of = f"{weights.module}'s" if weights.module else "its"
    axis = weights.axis
    if weights.missing:
        numbers = [number for number, _ in weights.counts]
        return f"{of} share of {axis} {_ranges(numbers)} is missing"
    counts = ", ".join(
        f"{axis} {number}: {round(count, 3) + 0.0:.3f}" for number, count in weights.counts[:8]
    )
    return f"{of} shares count unequally ({counts} instead of 1)"


def _loss_share(finding: f.LossShare) -> Text:
    whose = " and ".join(f"the {loss}'s" for loss in finding.losses)
    many = len(finding.losses) > 1
    share, be = f"{whose} share{'s' * many} of the gradient", "are" if many else "is"
    fault = finding.fault
    if type(fault) is f.Finding:
        return f"{share} {be} missing", ""
    text, hint = _rendered(fault)
    is_size = isinstance(fault, f.ConstantFactor) and fault.cause is not Cause.SIGN
    return f"{share}{f' {be}' if is_size else ':'} {text}", hint


def _addend(finding: f.Addend) -> Text:
    addend = "the bias" if finding.bias else "the module's input (residual)"
    times = f"added {finding.surplus + 1:g} times"
    return f"{addend} is {'missing' if finding.surplus == -1 else times}", ""


def _in_part(finding: f.InPart) -> Text:
    text, hint = "these are zero", ""
    if type(finding.fault) is not f.Finding:
        text, hint = _rendered(finding.fault)
    spans = "; ".join(
        f"rank {rank}: {first}..{last} of {total}"
        for rank, (first, last), total in finding.spans[:_OTHERS]
    )
    return f"in some of its elements ({spans}): {text}; the rest is right", hint


def _offset(finding: f.OffsetRows) -> Text:
    wrong, right = ("{}..{}".format(*span) for span in (finding.held, finding.own))
    if finding.shift is None:
        wrong = f"{wrong}, which belong to another rank,"
        return f"rank {finding.rank} holds {finding.dim} {wrong} instead of {right}", ""
    moved = f"{finding.dim} {wrong} stand where {right} belong"
    return f"wrong offset: {moved} (shifted by {finding.shift})", ""


def _reordered(finding: f.ReorderedRows) -> Text:
    text = _ORDERS[finding.order].format(
        moved=finding.moved, total=finding.total, dim=finding.dim, blocks=finding.blocks
    )
    halves = finding.order is f.RowOrder.HALVES
    return text, "gate and up projection are mistaken for each other" if halves else ""


def _tokens(finding: f.WrongTokens) -> Text:
    ids = "{}..{}".format(*finding.ids)
    if finding.owners is not None:
        first, last = finding.owners
        ids += f" (the part of tp {first}{f' to {last}' if last > first else ''})"
    text = f"positions whose token id lies in {ids} are wrong, the rest right"
    if finding.zero:
        return f"{text}; they are zero", ""
    if finding.rows is None:
        return text, ""
    rows = f"rows {'{}..{}'.format(*finding.rows)}"
    if finding.rows[0] == finding.rows[1]:
        rows = f"row {finding.rows[0]}"
    how = "in addition to their own" if finding.added else "instead of their own"
    return f"{text}; they hold {rows} of the table {how}", ""


def _rows(finding: f.WrongRows) -> Text:
    share = len(finding.indices) / finding.total
    whose = ", the slice of {} {},".format(*finding.slice_of) if finding.slice_of else ""
    which = f"{finding.dim} {_ranges(finding.indices)} ({share:.0%}){whose}"
    if finding.fault is None or finding.cause is Cause.ZERO:
        return f"{which} are {'zero' if finding.fault else 'wrong'}, the rest right", ""
    text, hint = _rendered(finding.fault)
    return f"in {which}: {text}; the rest is right", hint


def _masks(finding: f.WrongMasks) -> Text:
    masks = _MASKS[finding.order].format(shift=finding.shift)
    return f"the gradient of {finding.tensor} was computed with {masks}", ""


def _blocks(finding: f.BlockWeight) -> Text:
    steps = f"{_ranges(finding.steps)} of 0..{finding.ring - 1}"
    how = "is missing" if finding.missing else f"counts {finding.weight:.3f} times"
    share = f"what the block of step {steps} of the ring adds to the gradient of {finding.tensor}"
    return f"{share} {how}", ""


def _miscounted(finding: f.Miscounted) -> Text:
    statistic = STATISTICS[finding.statistic]
    if finding.cause is Cause.OTHER_NORM:
        text = "clipped by the norm of other parameters than in the reference"
    elif finding.cause is Cause.COUNTED_TWICE:
        text = f"counted {finding.most} times in {statistic}"
        if not finding.least:
            text = f"some elements are {text}, and others never"
    else:
        some = "some elements are " if finding.most else ""
        if finding.statistic is Statistic.REDUCED:
            some = "gradients of some ranks are "  # at least the rank's own are
        text = f"{some}never counted in {statistic}"
        if finding.statistic is Statistic.STEPPED:
            text = f"{some}never updated by any optimizer"
    names = [clean(name) for name in finding.names[1:]]
    if names:
        shown = beginning(names, _OTHERS)
        text += f", as are elements of {len(names)} more parameters: {shown}"
    hint = _LACKS[finding.lack] if finding.lack else _SUSPECTS[finding.statistic]
    if finding.cause is Cause.COUNTED_TWICE and not finding.least:
        hint = "which elements of it a rank takes for its own"
    return text, "" if finding.cause is Cause.OTHER_NORM else hint


class _Words(string.Formatter):
    """Templates in which ``{it.axes:and}`` lists axes."""

    def format_field(self, value: Any, spec: str) -> str:
        if spec in ("and", "or"):
            return f" {spec} ".join(value)
        if spec == "numbers":
            return " and ".join(f"{number:.7g}" for number in value)
        if spec == "ranges":
            return _ranges(value)
        return _listed(value) if spec == "factors" else str(super().format_field(value, spec))


_WORDS = _Words()

_RENDERERS: dict[type, Callable[[Any], Text]] = {
    f.MisplacedLayers: _layers,
    f.LossTerm: _loss_term,
    f.Shift: _shift,
    f.ConstantFactor: _factor,
    f.GradientFactor: _gradient_factor,
    f.ProductFactors: _product,
    f.WrongCopies: _copies,
    f.UnequalShares: _shares,
    f.LossShare: _loss_share,
    f.Addend: _addend,
    f.InPart: _in_part,
    f.OffsetRows: _offset,
    f.ReorderedRows: _reordered,
    f.WrongTokens: _tokens,
    f.WrongRows: _rows,
    f.WrongMasks: _masks,
    f.BlockWeight: _blocks,
    f.Miscounted: _miscounted,
    f.OtherHyperparameters: lambda it: (
        hyperparameters_text(it),
        "what sets them after a step" if it.following else "its parameter group",
    ),
}


def _ranges(indices: Sequence[int]) -> str:
    """``0..3, 8`` for ``[0, 1, 2, 3, 8]``."""
    return ranks_text(indices, 3, "..", ", ")
