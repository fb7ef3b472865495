# SPDX-License-Identifier: Apache-2.0
"""What only one of both runs has: microbatches, modules, layers of another kind."""

import dataclasses

import pytest

from megatron_ttrace.trace.records import Kind, Outcome
from tests.diagnose.judged_by_hand import localise, verdict
from tests.diagnose.test_culprits import FC1, MISSING, run


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [(Outcome.EXTRA, "more microbatches"), (MISSING, "fewer microbatches")],
)
def test_another_number_of_microbatches_is_one_culprit(outcome: Outcome, reason: str) -> None:
    """Whatever else is in them; the first tensor says where they begin."""
    verdicts = run(microbatches=2)
    changed = [
        dataclasses.replace(v, verdict=outcome, margin=None) if v.microbatch == 1 else v
        for v in verdicts
    ]
    [culprit] = localise(changed)
    assert (culprit.name, culprit.kind, culprit.microbatch) == ("model", Kind.TOKENS, 1)
    assert reason in culprit.reason


def test_a_microbatch_instead_of_another() -> None:
    """It is there twice: what reads data is wrong, and not what counts microbatches."""
    first = [
        dataclasses.replace(v, verdict=MISSING, margin=None) if v.microbatch == 1 else v
        for v in run(microbatches=2)
    ]
    again = verdict("model", Kind.INPUT, Outcome.EXTRA, margin=None)
    [culprit] = localise([*first, again])
    assert (culprit.name, culprit.kind, culprit.microbatch) == ("model", Kind.TOKENS, 1)
    assert "microbatches twice" in culprit.reason


def test_a_module_that_is_never_called() -> None:
    """Its parameters are there; without them, nothing says that it was built."""
    absent = run(
        lambda kind, name: name.startswith(FC1) and kind in (Kind.INPUT, Kind.OUTPUT),
        outcome=MISSING,
    )
    [culprit] = localise(absent)
    assert (culprit.name, culprit.kind) == (FC1, Kind.INPUT)
    assert culprit.reason.startswith("it has parameters, but was not called")
    [culprit] = localise([v for v in absent if v.kind is not Kind.PARAM])
    assert "was not called" not in culprit.reason


def test_where_gradients_end() -> None:
    """The innermost module whose output has a gradient, not what made its input or contains it."""
    no, yes = MISSING, Outcome.PASS
    gradients = {
        "embedding": (no, no),
        "mtp": (yes, no),
        "mtp.norm": (yes, no),
        "mtp.fc": 2 * (yes,),
    }
    verdicts = [
        verdict(name, kind, outcome, margin=None)
        for name, outcomes in gradients.items()
        for kind, outcome in zip((Kind.GRAD_OUTPUT, Kind.GRAD_INPUT), outcomes, strict=True)
    ]
    [culprit] = localise(verdicts)
    assert (culprit.name, culprit.kind) == ("mtp.norm", Kind.GRAD_INPUT)
    [culprit] = localise(verdicts[:2])
    assert culprit.name == "embedding"


def test_a_layer_of_another_kind() -> None:
    """What it lacks and what it has instead are one culprit, in that layer only."""
    absent = [
        *(
            ("decoder.layers.2.norm.weight", MISSING),
            ("decoder.layers.2.mlp.router.weight", MISSING),
        ),
        *(("decoder.layers.2.mlp.fc1.weight", Outcome.EXTRA), ("head.weight", Outcome.EXTRA)),
        *(("decoder.layers.5.mlp.fc1.weight", MISSING), ("decoder.layers.5.mlp.fc1.bias", MISSING)),
    ]
    found = localise(
        [verdict(name, Kind.PARAM, outcome, margin=None) for name, outcome in absent]
        + [verdict("decoder.layers.5.norm.weight", Kind.PARAM)]
    )
    assert [culprit.name for culprit in found] == [
        "decoder.layers.2",
        "head",
        "decoder.layers.5.mlp.fc1",
    ]
    assert "other parameters than the reference's" in found[0].reason
