# SPDX-License-Identifier: Apache-2.0
"""Every type of finding and every kind of grounds has its words."""

import dataclasses
from enum import Enum
from typing import Any

import pytest

from megatron_ttrace.report import explanations
from megatron_ttrace.report.wording import MESSAGES, messages
from megatron_ttrace.trace import findings
from megatron_ttrace.trace.blamed import Blaming
from megatron_ttrace.trace.collectives import Citation, Operation, Phase
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.executed import Execution
from megatron_ttrace.trace.findings import (
    Cause,
    Explanation,
    FailingRanks,
    Finding,
    Note,
    Remark,
    ShareWeights,
    UnequalShares,
)
from megatron_ttrace.trace.judged import Diagnosis, Judged
from megatron_ttrace.trace.outcomes import Grounds, Unexercised
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import BufferIndex, Direction, Kind, LoadedIndex, Outcome, Result
from megatron_ttrace.trace.resumed import How
from tests.report.synthetic_report import make_judged
from tests.report.test_ledger import RAN

NOTE = Note(Remark.SHAPE, text="the note")
VERDICT = make_judged("a.b", verdict=Outcome.DIVERGED, notes=(NOTE,))


def reason_text(grounds: Grounds, verdict: Judged = VERDICT, **around: Any) -> str:
    """The reason of a culprit of which only this is known."""
    return explanations.reason_text(
        Diagnosis(
            name="a",
            direction=Direction.FORWARD,
            grounds=grounds,
            verdict=verdict,
            why=Explanation(),
            **around,
        )
    )


def types_of_findings() -> set[type]:
    """All of them, as they are defined."""
    types = (kind for kind in vars(findings).values() if isinstance(kind, type))
    return {kind for kind in types if issubclass(kind, Finding)}


def test_every_type_of_finding_has_a_renderer() -> None:
    """A new type needs a sentence."""
    assert len(types_of_findings()) > 15
    simple = {getattr(findings, name.partition(".")[0]) for name in MESSAGES["Finding"]}
    assert not simple & explanations._RENDERERS.keys()
    composed = {Finding, findings.Composed}
    assert composed | simple | explanations._RENDERERS.keys() == types_of_findings()


ENUMS: tuple[type[Enum], ...] = (
    *(Result, Outcome, Grounds, LoadedIndex, Remark, Unexercised, Execution, Statistic),
    *(Blaming, Clue, How, findings.Lack),
    *(findings.RowOrder, findings.MaskOrder, findings.CastOperand, findings.Term),
)


@pytest.mark.parametrize("enum", ENUMS)
def test_every_member_has_words(enum: type[Enum]) -> None:
    """No enumeration is rendered in part."""
    assert {*messages(enum)} == {*enum}
    pairs = {"Finding", "Cause", "Zero", "Dropout"}
    partly = {"Phase", "Reason", "Ran", "Note", "Suspects", "What", "sizes", *pairs}
    assert MESSAGES.keys() == {member_type.__name__ for member_type in ENUMS} | partly
    assert {*messages(Statistic, "Suspects")} == {*Statistic}


@pytest.mark.parametrize("grounds", Grounds)
def test_a_reason_is_one_sentence(grounds: Grounds) -> None:
    """With its name, kind or note in place, and braces in names left alone."""
    verdict = dataclasses.replace(VERDICT, name="{odd}")
    text = reason_text(grounds, verdict)
    assert text
    assert "{name}" not in text


def test_what_is_around_a_culprit() -> None:
    """What passes before it, or how many of its kind fail."""
    before = make_judged("a.a", Kind.INPUT, index=4)
    text = reason_text(Grounds.OUTPUT_WITHOUT_INPUTS, before=before)
    assert text == (
        "it has no traced inputs, and its output fails; the tensor before it (a.a input.4) passes"
    )
    text = reason_text(Grounds.MAIN_GRAD, alike=(VERDICT, before, before))
    assert text.endswith("of a.b does not; 1 of 3 of its kind fail")


def test_an_error_of_one_element() -> None:
    """Its size says nothing about the whole tensor."""
    verdict = dataclasses.replace(VERDICT, notes=(findings.Note(Remark.ELEMENT),))
    assert "; the error is that of a single element" in reason_text(Grounds.OUTPUT, verdict)
    assert "single element" not in reason_text(Grounds.OUTPUT)


@pytest.mark.parametrize(
    ("ran", "hint"),
    [
        ([("dp-cp", "sum"), ("tp", "avg")], "a reduction over dp and tp ran: it left this out, or"),
        ([("dp", "sum")], "a missing average over dp and tp"),
        ([("tp-dp", "max")], "a missing average over dp and tp"),
    ],
)
def test_a_reduction_that_ran_is_not_missing(ran: list[tuple[str, str]], hint: str) -> None:
    """If something was added up over all axes; also as one of two repairs."""
    call = dataclasses.replace(RAN, operation=Operation.ALL_REDUCE)
    calls = [dataclasses.replace(call, group=group, reduction=kind) for group, kind in ran]
    finding = findings.PartialSums(Cause.PARTIAL, ("dp", "tp"), mean=True)
    both = findings.Composed(Cause.PARTIAL, finding.axes, steps=(finding, Finding(Cause.SIGN)))
    for found in (finding, both):
        why = Explanation(found, collectives=Citation(Phase.GRADIENTS, tuple(calls)))
        assert explanations.hint_text(why, VERDICT).startswith(hint)


@pytest.mark.parametrize(("clue", "makes"), [(Clue.ORIGIN, True), (Clue.SCALES, False)])
def test_a_number_that_is_off_by_the_same_factor(clue: Clue, makes: bool) -> None:
    """It comes before an operation that has to do with a size of the layout."""
    finding = findings.ConstantFactor(Cause.TOO_LARGE, ("dp",), ratio=2.0, sizes=(("dp",),))
    why = Explanation(finding, (Place("a.py", 1, "run", Clue.NAMES), Place("a.py", 9, "sum", clue)))
    usual = "a missing division, or a doubled factor or reduction over dp"
    number = "a number made in sum is off by the same factor; otherwise "
    assert explanations.hint_text(why, VERDICT) == number * makes + usual
    own = dataclasses.replace(why, places=(Place("loss.py", 1, "loss", Clue.OWN), *why.places))
    assert explanations.hint_text(own, VERDICT) == usual


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (Cause.PRECISION, "one run computes it in FP8, or recomputes it so, the other does not"),
        (Cause.THAWED, "it requires a gradient: it is trained, but frozen in the reference"),
        (Cause.FROZEN, "it requires no gradient: it is frozen, which it is not in the reference"),
        (Cause.INITIAL_VALUES, "the note"),
        (None, "unknown"),
    ],
)
def test_a_cause_without_numbers(cause: Cause | None, text: str) -> None:
    """Initial values are explained by the note of their judge."""
    why = Explanation(Finding(cause) if cause else None)
    assert explanations.explanation_text(why, VERDICT) == text
    assert explanations.hint_text(why, VERDICT) == ""


def test_loads_that_were_not_summed() -> None:
    """They are shares: without a reduction, too, each rank's mean is the whole's."""
    why = Explanation(findings.PartialSums(Cause.PARTIAL, ("dp",), mean=True))
    loads = dataclasses.replace(VERDICT, kind=Kind.BUFFER, index=BufferIndex.LOADS)
    assert explanations.hint_text(why, loads) == "a missing reduction over dp"
    for other in (VERDICT, dataclasses.replace(loads, index=BufferIndex.AFTER)):
        assert explanations.hint_text(why, other) == "a missing average over dp"


@pytest.mark.parametrize(
    ("least", "text", "hint"),
    [
        (2, "counted 2 times in the gradient norm", "a mark of tensor parallelism or of sharing"),
        (0, "some elements are counted 2 times in the gradient norm, and others", "which elements"),
    ],
)
def test_elements_that_are_counted_instead_of_others(least: int, text: str, hint: str) -> None:
    """No mark or group does that."""
    norm = Statistic.GRAD_NORM
    finding = findings.Miscounted(
        Cause.COUNTED_TWICE, statistic=norm, least=least, most=2, names=("a",)
    )
    why = Explanation(finding)
    assert explanations.explanation_text(why, VERDICT).startswith(text)
    assert explanations.hint_text(why, VERDICT).startswith(hint)


def test_an_explanation_says_where_and_how_many() -> None:
    """After what was tested: the other gradients, then the ranks."""
    why = Explanation(
        findings.Rounded(Cause.PRECISION, dtype="bf16", scaled=False),
        ranks=FailingRanks((0, 2), 4, 4, ("tp", 0)),
        alike=(2, 3),
    )
    assert explanations.explanation_text(why, VERDICT) == (
        "precision lost: it is the reference rounded to bf16, as are 2 of the 3 main gradients "
        "that fail, only on ranks 0,2 (tp 0)"
    )
    own = findings.Rounded(Cause.PRECISION, dtype="bf16, in the reference fp32", own=True)
    text = explanations.explanation_text(Explanation(own), VERDICT)
    assert text == "precision lost: its dtype is bf16, in the reference fp32"


def test_shares_of_several_modules_and_ranks() -> None:
    """Each group of ranks has its own part of the sentence."""
    lost = ShareWeights("a", "microbatch", ((1, 0.0), (2, 0.0)), True)
    uneven = ShareWeights("b", "dp", ((0, 1.5),), False)
    shares = UnequalShares(
        Cause.WEIGHTS, ("dp",), by_ranks=(((0,), (lost, uneven)), ((1, 2), (uneven,)))
    )
    text = explanations.explanation_text(Explanation(shares), VERDICT)
    assert text == (
        "on rank 0 a's share of microbatch 1..2 is missing; b's shares count unequally (dp 0: "
        "1.500 instead of 1); on ranks 1-2 b's shares count unequally (dp 0: 1.500 instead of 1)"
    )


@pytest.mark.parametrize(
    ("counts", "hint"),
    [
        # Of 4 ranks with 9, 15.5, 4 and 11.5 of 40 tokens.
        (((0, 1.111), (1, 0.645), (2, 2.5), (3, 0.87)), "each rank takes the mean over its own"),
        # A second mean over two ranks, of which one has the reduced gradient.
        (((1, 0.5),), ""),
        (((0, 1.0), (1, -1.0)), ""),
    ],
)
def test_means_over_own_tokens(counts: tuple[tuple[int, float], ...], hint: str) -> None:
    """Only what such means are gives that hint."""
    weights = ShareWeights("", "dp", counts, False)
    shares = UnequalShares(Cause.WEIGHTS, ("dp",), by_ranks=(((0,), (weights,)),))
    text = explanations.hint_text(Explanation(shares), VERDICT)
    assert text.startswith(hint) if hint else not text
