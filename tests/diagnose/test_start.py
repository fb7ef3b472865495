# SPDX-License-Identifier: Apache-2.0
"""A start that failed: its own verdicts, and no failures that only follow from it."""

import pytest

from megatron_ttrace.diagnose import start
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.outcomes import Grounds, Reason
from megatron_ttrace.trace.records import STEP_LEVEL, Direction, Kind, LoadedIndex, Outcome
from tests.diagnose.evidence_by_hand import meshes
from tests.diagnose.judged_by_hand import localise
from tests.diagnose.test_culprits import after, run, verdict

WEIGHT = "decoder.layers.0.mlp.linear_fc1.weight"


@pytest.mark.parametrize("outcome", [Outcome.SHAPE, Outcome.DIVERGED, Outcome.UNCOVERED])
def test_consequences_of_another_start(outcome: Outcome) -> None:
    """One failure is left, and it is the culprit; the others are unchecked for this reason."""
    consequences = run(after("embedding.word_embeddings"))
    verdicts = [verdict(WEIGHT, Kind.PARAM, outcome, microbatch=STEP_LEVEL), *consequences]
    left = start.without_consequences(verdicts)
    assert [judged.name for judged in left if judged.verdict.is_failure] == [WEIGHT]
    unchecked = [judged for judged in left if judged.reason is Reason.OTHER_START]
    assert len(unchecked) == sum(judged.verdict.is_failure for judged in consequences) > 10
    assert "began from other parameters" in notes_text(unchecked[0].notes)
    (culprit,) = localise(left)
    assert WEIGHT.startswith(culprit.name)


@pytest.mark.parametrize(
    "other",
    [
        verdict(WEIGHT, Kind.PARAM, Outcome.MISSING, microbatch=STEP_LEVEL),
        verdict(WEIGHT, Kind.PARAM, Outcome.DIVERGED, microbatch=STEP_LEVEL, index=1),
        verdict(WEIGHT, Kind.MAIN_GRAD, Outcome.DIVERGED),
    ],
)
def test_other_failures_have_their_own_consequences(other) -> None:
    """A missing layer, an update: nothing is set apart."""
    verdicts = [*run(after("embedding.word_embeddings")), other]
    assert start.without_consequences(verdicts) == verdicts


def test_a_layer_that_two_stages_claim() -> None:
    """Its parameters fail, however equal they are; layers outside are left alone."""
    names = [f"decoder.layers.{layer}.mlp.weight" for layer in range(2)]
    held = {0: names, 1: names[1:]}
    verdicts = [
        verdict(name, Kind.PARAM, microbatch=STEP_LEVEL)
        for name in [*names, "embedding.word_embeddings.weight"]
    ]
    verdicts.append(verdict("decoder.layers.1.mlp", Kind.OUTPUT, Outcome.DIVERGED))
    claimed = start.claims(verdicts, start.stages_of(held, meshes(2, pp=2)))
    assert [judged.name for judged in claimed if judged.verdict is Outcome.EXTRA] == [names[1]]
    assert notes_text(claimed[1].notes) == "pipeline stages 0 and 1 hold layer 1"
    left = start.without_consequences(claimed)
    assert [judged.name for judged in left if judged.verdict.is_failure] == [names[1]]
    assert start.claims(verdicts, start.stages_of(held, ())) == verdicts


def test_all_parameters_of_a_failed_start_are_one_group() -> None:
    """They fail alike, whatever their names are."""
    names = ["embedding.word_embeddings.weight", WEIGHT, "output_layer.weight"]
    verdicts = [verdict(n, Kind.PARAM, Outcome.SHAPE, microbatch=STEP_LEVEL) for n in names]
    assert [culprit.group for culprit in localise(verdicts)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("taken", "division"),
    [
        ((4, 6), (("tp",), 0, False)),
        ((8, 12), (("tp",), 1, True)),
        ((2, 6), None),
        ((4, 3), None),
        ((8,), None),
    ],
)
def test_a_part_that_is_taken_for_the_whole(taken, division) -> None:
    """Its shape is right if it is divided over an axis of this size; one dim is."""
    other = start.other_division((8, 6), [taken, taken], meshes(4, tp=2), ("tp",))
    assert (other and (other.axes, other.dim, other.inverse)) == division


def test_ranks_that_take_different_shapes_are_not_explained() -> None:
    """One mark is lost on all ranks."""
    assert start.other_division((8,), [(4,), (8,)], meshes(2, tp=2), ("tp",)) is None


L = LoadedIndex
LR = "param_groups[wd_mult=1.0].lr"


@pytest.mark.parametrize(
    ("failed", "passed", "grounds"),
    [
        ({L.ONE_DEVICE, L.ROUNDED}, set(), [(L.ONE_DEVICE, Grounds.LOADED)]),
        ({L.WEIGHT, L.ROUNDED}, set(), [(L.WEIGHT, Grounds.LOADED_STORED)]),
        ({L.WEIGHT}, {L.ONE_DEVICE}, [(L.WEIGHT, Grounds.LOADED_ALIKE)]),
        ({L.ONE_DEVICE}, {L.WEIGHT}, [(L.ONE_DEVICE, Grounds.LOADED_ONE_DEVICE)]),
        ({L.ROUNDED}, {L.ONE_DEVICE}, [(L.ROUNDED, Grounds.LOADED_MAIN)]),
        ({L.ROUNDED}, {L.ONE_DEVICE, L.MAIN}, [(L.ROUNDED, Grounds.SAVED_MAIN)]),
        ({L.ROUNDED, L.MAIN}, {L.ONE_DEVICE}, [(L.MAIN, Grounds.LOADED_STORED)]),
        ({L.EXP_AVG_SQ}, {L.EXP_AVG}, [(L.EXP_AVG_SQ, Grounds.LOADED_STORED)]),
    ],
)
def test_why_a_parameter_was_loaded_wrongly(
    failed: set[LoadedIndex],
    passed: set[LoadedIndex],
    grounds: list[tuple[LoadedIndex, Grounds]],
) -> None:
    """By which of its states are wrong; main weights are not blamed for wrong weights."""
    verdicts = [
        verdict("weight", Kind.LOADED, Outcome.DIVERGED if wrong else Outcome.PASS, index=index)
        for wrong, indices in ((True, sorted(failed)), (False, sorted(passed)))
        for index in indices
    ]
    assert [(judged.index, why) for judged, why in start.loaded(verdicts)] == grounds


@pytest.mark.parametrize("steps", [True, False])
def test_learning_rates_follow_from_the_schedule(steps: bool) -> None:
    """If the schedule's position was loaded, they are a fault of their own."""
    outcome = Outcome.DIVERGED if steps else Outcome.PASS
    verdicts = [
        verdict("opt_param_scheduler.num_steps", Kind.LOADED, outcome, index=L.NUMBER),
        verdict(LR, Kind.LOADED, Outcome.DIVERGED, index=L.NUMBER),
    ]
    ((judged, grounds),) = start.loaded(verdicts)
    assert judged.name == (verdicts[0].name if steps else LR)
    assert grounds is Grounds.LOADED_NUMBER


def test_what_was_loaded_is_apart_from_the_step() -> None:
    """A wrong load is a culprit beside the step's own; main weights if the weights are right."""
    embedding, output = "embedding.weight", "output_layer.weight"
    wrong = Outcome.DIVERGED
    verdicts = [
        verdict(embedding, Kind.LOADED, wrong, index=LoadedIndex.ONE_DEVICE),
        verdict(embedding, Kind.LOADED, wrong, index=LoadedIndex.ROUNDED, margin=9.0),
        verdict(output, Kind.LOADED, index=LoadedIndex.ONE_DEVICE),
        verdict(output, Kind.LOADED, wrong, index=LoadedIndex.ROUNDED),
        verdict("decoder", Kind.OUTPUT, wrong),
    ]
    culprits = localise(verdicts)
    assert [(culprit.name, culprit.direction, culprit.index) for culprit in culprits] == [
        ("embedding", Direction.START, LoadedIndex.ONE_DEVICE),
        ("output_layer", Direction.START, LoadedIndex.ROUNDED),
        ("decoder", Direction.FORWARD, 0),
    ]
    assert len({culprit.reason for culprit in culprits}) == 3
