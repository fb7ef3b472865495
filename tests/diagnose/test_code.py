# SPDX-License-Identifier: Apache-2.0
"""Functions by where they ran; what passed."""

from megatron_ttrace.diagnose.code import BUILDING, Code, Outcomes
from megatron_ttrace.trace.collectives import Phase
from megatron_ttrace.trace.records import Kind, Outcome
from tests.diagnose.judged_by_hand import judged
from tests.diagnose.ran_by_hand import FUNCTIONS, record, where

NAMES = list(FUNCTIONS)
LINEAR = "decoder.layers.*.linear"


def test_code() -> None:
    """Chains stay in a module and a part of the step; contexts are those of steps."""
    code = Code(record())

    def number(name: str) -> int:
        found = code.number(where(name, 99))
        assert found is not None
        return found

    def names(numbers: list[int]) -> list[str]:
        return [NAMES[one] for one in numbers]

    forward = LINEAR, Phase.FORWARD
    assert names(code.chain(number("reduce"), forward)) == ["reduce", "Linear.forward"]
    assert names(code.callers(number("reduce"), forward)) == ["Linear.forward"]
    built, offset = number("Linear.__init__"), number("offset")
    reset = number("Linear.reset_parameters")
    assert code.below(built, BUILDING) == {built: 0, offset: 1, reset: 1}
    assert code.below(built, BUILDING, {offset, reset}) == {built: 0}
    assert len(code.contexts[number("reduce")]) == 3
    assert not code.contexts[number("offset")]
    assert code.number("elsewhere.py:1 (f)") is None
    assert code.number("no place") is None


def test_outcomes() -> None:
    """A name passes if all its tensors of a kind do, in all layers."""
    outcomes = Outcomes(
        [
            judged(Kind.OUTPUT, "layers.0.a"),
            judged(Kind.OUTPUT, "layers.1.a", Outcome.DIVERGED),
            judged(Kind.OUTPUT, "layers.0.b"),
            judged(Kind.OUTPUT, "c", Outcome.UNCHECKED),
        ]
    )
    right = [outcomes.is_right((f"{name}", Phase.FORWARD)) for name in ("layers.*.a", "layers.*.b")]
    assert right == [False, True]
    assert not outcomes.is_right(("c", Phase.FORWARD))
    assert not outcomes.is_right(("layers.*.b", Phase.BACKWARD))
    assert (outcomes.share(Kind.OUTPUT), outcomes.share(Kind.MAIN_GRAD)) == (0.5, 0.0)


def test_marks_that_only_what_fails_has() -> None:
    """All failing parameters have them, and no other."""
    marked = {"a": ("x", "y"), "b": ("x", "z"), "c": ("z",)}
    outcomes = Outcomes([judged(Kind.MAIN_GRAD, name, Outcome.DIVERGED) for name in "ab"])
    assert outcomes.separating(Kind.MAIN_GRAD, marked) == {"x"}
    assert outcomes.separating(Kind.PARAM_DELTA, marked) == set()
    assert outcomes.separating(Kind.MAIN_GRAD, {**marked, "c": ("x",)}) == set()


def test_what_is_logged() -> None:
    """By a word in its name; a parameter counts once for each statistic that it is wrong in."""
    diverged = Outcome.DIVERGED
    verdicts = [judged(Kind.METRIC, "z_loss", diverged), judged(Kind.METRIC, "aux_loss")]
    verdicts += [judged(Kind.METRIC, "lossless"), judged(Kind.COUNTED, "a", diverged)]
    outcomes = Outcomes([*verdicts, judged(Kind.COUNTED, "a", diverged, index=4)])
    assert outcomes.losses() == {"z_loss": False, "aux_loss": True}
    assert (outcomes.counts("a"), outcomes.counts("b")) == (2, 0)
    assert outcomes.names(Kind.COUNTED) == {"a"}
