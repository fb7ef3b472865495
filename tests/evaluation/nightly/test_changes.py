# SPDX-License-Identifier: Apache-2.0
"""What changed between two nights."""

from megatron_ttrace.evaluation.nightly import changes
from megatron_ttrace.evaluation.nightly.records import Gap, NightPart, State
from tests.evaluation.nightly.synthetic import VERSIONS, case, night

MISSED = case(state=State.MISSED, note="found equivalent")


def test_worse() -> None:
    """Cases that are not good now, with their former result."""
    then = night(case(name="a"), case(name="b", state=State.MISSED), case(name="c"))
    now = night(
        case(name="a", state=State.MISSED), case(name="b"), case(name="d", state=State.ALARM)
    )
    found = changes.compare(then, now)
    assert [(one.name, was) for one, was in found.worse] == [("a", State.GOOD), ("d", None)]


def test_the_same_name_in_two_parts() -> None:
    """A bug and a recipe may be called alike."""
    then = night(case(name="x"), case(NightPart.RECIPES, "x", State.MISSED))
    assert changes.compare(then, then).worse == ()


def test_versions() -> None:
    """Changed, new and gone ones."""
    then = night(versions={**VERSIONS, "wandb": "0.31"})
    now = night(versions={"megatron-core": "0.20.0", "torch": "2.15.0", "numpy": "2"})
    assert changes.compare(then, now).versions == {
        "megatron-core": ("0.19.2", "0.20.0"),
        "numpy": ("not installed", "2"),
        "wandb": ("0.31", "not installed"),
    }


def test_a_bad_night_says_what_changed() -> None:
    """What is wrong, then versions that changed."""
    now = night(MISSED, day=9, versions={**VERSIONS, "megatron-core": "0.20.0"})
    said = "\n".join(changes.lines(now, night(day=7)))
    assert "missed: bugs 01: found equivalent" in said
    assert "since the last good night, 2026-01-07T02:00:00+00:00:" in said
    assert "megatron-core: 0.19.2 -> 0.20.0" in said


def test_nothing_but_the_result_changed() -> None:
    """That is worth saying: then it is chance, or the machine."""
    said = changes.lines(night(MISSED), night())
    assert "  no version and no option changed" in said


def test_no_good_night_yet() -> None:
    """The first bad night has nothing to compare with."""
    assert "there is no good night yet to compare with" in changes.lines(night(MISSED), None)


def test_a_good_night_says_nothing() -> None:
    """No lines."""
    assert changes.lines(night(), night()) == []


def test_a_gap_is_told() -> None:
    """With its reason."""
    tonight = night(gaps=(Gap(NightPart.MATRIX, "stopped after 60 s"),))
    assert "matrix is incomplete: stopped after 60 s" in changes.lines(tonight, night())
    assert changes.headline(tonight) == "matrix incomplete"


def test_headline() -> None:
    """Counts of what is wrong, or of all cases."""
    assert changes.headline(night()) == "all good: 2 cases"
    alarm = case(NightPart.MATRIX, state=State.ALARM)
    broken = case(state=State.BROKEN)
    assert changes.headline(night(MISSED, alarm, alarm, broken)) == (
        "1 missed, 2 false alarms, 1 could not run"
    )
