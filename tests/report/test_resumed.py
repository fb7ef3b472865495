# SPDX-License-Identifier: Apache-2.0
"""What ``ttrace resume`` prints."""

import dataclasses
import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_ttrace.report.resumed import by_cause, render
from megatron_ttrace.trace.records import Result
from megatron_ttrace.trace.resumed import Blame, Difference, How, Logged, Restart, Resumed, What


def moment(name: str, kind: What = What.EXP_AVG) -> Difference:
    """State that was saved wrongly."""
    more = {"rel_err": 0.7, "wrong": 3, "total": 4, "ranks": (1,), "where": "a.py:1 (f)"}
    return Difference(what=kind, name=name, how=How.DIFFERENT, blame=Blame.SAVING, **more)


def printed(*restarts: Restart) -> str:
    """All lines, on a narrow terminal."""
    verdict = Result.DIVERGED if any(r.differences for r in restarts) else restarts[0].verdict
    resumed = Resumed(
        verdict=verdict, command=("ttrace",), iteration=2, checkpoint="c", restarts=restarts
    )
    text = io.StringIO()
    render(resumed, Console(file=text, width=80), Path("ttrace-resume"))
    return text.getvalue()


def test_one_cause() -> None:
    """Parameters whose state is wrong in the same way are one culprit, the worst one shown."""
    names = [f"decoder.layers.{n}.mlp.linear_fc1.weight" for n in range(5)]
    differences = [*map(moment, names), moment(names[0], What.MAIN)]
    assert [*map(len, by_cause(differences))] == [5, 1]
    nan = float("nan")
    steps = (Logged(3, (4.0, 4.5), (1.0, 1.0)), Logged(4, (nan, -nan), (nan, -nan)))
    text = printed(
        Restart(layout="", verdict=Result.DIVERGED, differences=tuple(differences), steps=steps)
    )
    assert text.startswith("ttrace: diverged: saving a checkpoint changes the state")
    assert "and 2 more" in text
    assert "look at a.py:1 (f)" in text
    assert "loss 4.5 instead of 4" in text
    assert "iteration 4" not in text
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize("place", ["a.py:5 (f)", "b.py:5 (g)"])
def test_changed_code(place: str) -> None:
    """It is looked at first, and once."""
    difference = dataclasses.replace(moment("w"), changed=(place,))
    text = printed(Restart(layout="", verdict=Result.DIVERGED, differences=(difference,)))
    assert f"look at {place}: it was changed, and ran while saving" in text
    assert ("or at a.py:1 (f)" in text) == (place == "b.py:5 (g)")


def test_a_lost_parameter_group() -> None:
    """All that it had is one cause."""
    more = {"what": What.NUMBER, "how": How.MISSING, "blame": Blame.LOADING}
    lost = [
        Difference(name=f"param_groups[wd_mult=1]#2.{field}", before=before, **more)
        for field, before in (("lr", 0.1), ("betas[0]", 0.9), ("eps", 1e-8))
    ]
    assert [*map(len, by_cause(lost))] == [3]
    text = printed(Restart(layout="", verdict=Result.DIVERGED, differences=tuple(lost)))
    assert "betas[0]" in text
    assert "missing\n" in text


def test_no_control_characters() -> None:
    """Names come from the user's model, reasons from Megatron."""
    failed = Restart(layout="--x \x1b[31m", verdict=Result.COULD_NOT_CHECK, reason="no\x1b[2J")
    wrong = Restart(layout="", verdict=Result.DIVERGED, differences=(moment("a\x1b[1m"),))
    assert "\x1b" not in printed(failed, wrong)


def test_equivalent() -> None:
    """The answer, and how much it stands on."""
    text = printed(Restart(layout="", verdict=Result.EQUIVALENT, compared=7, stored=5, otherwise=2))
    assert "3 of them also as they are stored" in text
    assert text.startswith("ttrace: equivalent")
    assert "7 tensors" in text


@pytest.mark.parametrize(
    ("iterations", "words"), [("3", "iteration 3 trains"), ("34", "iterations 3, 4 train")]
)
def test_other_samples(iterations: str, words: str) -> None:
    """All iterations that train on them are one cause."""
    differences = [
        Difference(what=What.SAMPLES, name=n, how=How.DIFFERENT, blame=Blame.TRAINING, where="a.py")
        for n in iterations
    ]
    text = printed(Restart(layout="", verdict=Result.DIVERGED, differences=tuple(differences)))
    assert f"{words} on other samples" in text
    assert text.count("look at a.py") == 1
