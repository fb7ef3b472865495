# SPDX-License-Identifier: Apache-2.0
"""A restarted run against the uninterrupted one, both made by hand."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ttrace.saved import recorded
from megatron_ttrace.saved.recorded import Moves, differing, merged, same
from megatron_ttrace.saved.resume import compare
from megatron_ttrace.trace.recorded import Point
from megatron_ttrace.trace.records import LoadedIndex, Result
from megatron_ttrace.trace.resumed import Blame, How, Restart, What
from tests.saved import recordings
from tests.saved.recordings import NAME, NUMBERS, state, step


def answer(
    tmp_path: Path,
    *,
    stored: Mapping[What, torch.Tensor] | None = None,
    numbers_stored: Mapping[str, object] | None = None,
    **restart: object,
) -> Restart:
    """The answer for a restart that differs in something; ``stored``: of the parameter."""

    def read(kind: What, name: str) -> torch.Tensor | None:
        assert name == NAME
        return (stored or {}).get(kind)

    return compare(
        recordings.uninterrupted(tmp_path / "a"),
        recordings.restarted(tmp_path / "b", **restart),  # type: ignore[arg-type]
        "",
        stored=read,
        numbers=numbers_stored,
    )


def test_the_same(tmp_path: Path) -> None:
    """Nothing differs."""
    restart = answer(tmp_path)
    assert (restart.verdict, restart.differences, restart.compared) == (Result.EQUIVALENT, (), 3)


def test_what_is_not_a_number_in_both_is_not_counted() -> None:
    """A tensor that differs elsewhere."""
    before, after = torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([math.nan, 1.0, math.nan])
    assert differing(before, after).tolist() == [False, False, True]
    assert same(before, before)
    assert not same(before, after)


ZEROS = {LoadedIndex.EXP_AVG: torch.zeros(4)}
NO_WEIGHT = {LoadedIndex.WEIGHT: torch.zeros(4, dtype=torch.bfloat16)}
HALF = torch.full((4,), 0.5)
SAMPLES = "consumed_train_samples"
LOST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What is stored decides whether saving or loading lost a moment; zeros are of no tensor.
    **{
        f"a moment, {blame}": (
            {"loaded": state() | ZEROS, "stored": stored},
            {
                "what": What.EXP_AVG,
                "how": How.DIFFERENT,
                "blame": blame,
                "name": NAME,
                "rel_err": 1.0,
                "wrong": 4,
                "total": 4,
                "ranks": (0, 1),
                "where": place,
            },
        )
        for blame, stored, place in (
            (Blame.EITHER, {}, recordings.PLACES["main weight"].saves),
            (Blame.LOADING, {What.EXP_AVG: HALF}, recordings.PLACES["main weight"].loads),
            (Blame.SAVING, {What.EXP_AVG: HALF / 2}, recordings.PLACES["main weight"].saves),
        )
    },
    # The part that one rank has wrong is named.
    "one rank": (
        {"loaded": state() | {LoadedIndex.MAIN: torch.tensor([0.0, 1.0, 2.0, 4.0])}},
        {"ranks": (1,), "part": "[2:4]", "wrong": 1},
    ),
    # State that was not restored at all.
    "missing": (
        {"loaded": {index: data for index, data in state().items() if index not in ZEROS}},
        {"what": What.EXP_AVG, "how": How.MISSING},
    ),
    # Weights that are stored with more bits are what was saved if they round to it.
    "more bits": (
        {
            "loaded": state() | NO_WEIGHT,
            "stored": {What.WEIGHT: torch.arange(4.0) * (1 + 1e-4)},
        },
        {"what": What.WEIGHT, "blame": Blame.LOADING},
    ),
    # A number that is stored right was lost in loading.
    "a number": (
        {"numbers": NUMBERS | {SAMPLES: 0.0}, "numbers_stored": {SAMPLES: 8}},
        {
            "what": What.NUMBER,
            "name": SAMPLES,
            "before": 8.0,
            "after": 0.0,
            "blame": Blame.LOADING,
        },
    ),
    # In the same layout a loss is the same to the bit.
    "a loss": (
        {"steps": [step(3, losses={"lm loss": math.nextafter(4 / 3, 2)}), step(4)]},
        {"what": What.LOSS, "blame": Blame.TRAINING, "tolerance": 0.0},
    ),
    # Everything else was equal.
    "the state after the steps": (
        {"end": state() | {LoadedIndex.MAIN: torch.ones(4)}},
        {"what": What.MAIN, "blame": Blame.TRAINING},
    ),
}


@pytest.mark.parametrize(("restart", "expected"), LOST.values(), ids=LOST)
def test_one_difference(tmp_path: Path, restart: Any, expected: dict[str, object]) -> None:
    """It is the only one."""
    answered = answer(tmp_path, **restart)
    (difference,) = answered.differences
    assert {name: getattr(difference, name) for name in expected} == expected
    assert answered.verdict is Result.DIVERGED


@pytest.mark.parametrize(
    ("stored", "blames", "place"),
    [
        # Where both are wrong, it is what describes the weight.
        ({}, [Blame.EITHER] * 2, "megatron/norm.py"),
        # A weight that is right in the checkpoint is overwritten from the wrong state.
        (
            {What.WEIGHT: state()[LoadedIndex.WEIGHT], What.EXP_AVG: torch.zeros(4)},
            *([Blame.LOADING, Blame.SAVING], "megatron/optimizer.py"),
        ),
    ],
)
def test_a_moment_and_its_weight(
    tmp_path: Path, stored: dict[What, torch.Tensor], blames: list[Blame], place: str
) -> None:
    """They have one place."""
    weight, moment = answer(tmp_path, loaded=state() | NO_WEIGHT | ZEROS, stored=stored).differences
    assert (weight.what, moment.what) == (What.WEIGHT, What.EXP_AVG)
    assert [weight.blame, moment.blame] == blames
    assert weight.where == moment.where
    assert weight.where.startswith(place)


@pytest.mark.parametrize(
    ("kept", "place"),
    [(0.5, "megatron/load.py:3 (load)"), (0.25, "megatron/optimizer.py:7 (save)")],
)
def test_changed_code_that_ran(tmp_path: Path, kept: float, place: str) -> None:
    """Of what ran while it went wrong, the nearest is first."""
    saving = ("megatron/other.py:1 (f)", "megatron/optimizer.py:9 (g)")
    before = recordings.uninterrupted(
        tmp_path / "a", changed=(*saving, "megatron/optimizer.py:7 (save)")
    )
    after = recordings.restarted(
        tmp_path / "b", state() | ZEROS, changed=("megatron/load.py:3 (load)",)
    )
    stored = torch.full((4,), kept)
    restart = compare(before, after, "", stored=lambda kind, _: stored)
    (difference,) = restart.differences
    assert difference.changed[0] == place
    assert difference.changed[1:] == (() if kept == 0.5 else (*reversed(saving),))


def test_otherwise_stored(tmp_path: Path) -> None:
    """Wrong in the checkpoint, and loaded as it was: a notice, for this restart goes on."""
    restart = answer(tmp_path, stored={What.WEIGHT: torch.zeros(4)})
    assert (restart.verdict, restart.otherwise) == (Result.EQUIVALENT, 1)
    assert any("other values" in notice for notice in restart.notices)


def test_numbers_that_are_none() -> None:
    """A scale that is not a number in both runs is no difference."""
    nan, other = float("nan"), -float("nan")
    assert merged([{"a": nan}, {"a": other}]) == merged([{"a": other}]) != merged([{"a": 0.0}])


def test_a_schedule(tmp_path: Path) -> None:
    """What the scheduler sets when it is loaded is not another cause."""
    schedule, rate = "opt_param_scheduler.num_steps", "param_groups[wd_mult=1].lr"
    before = recordings.uninterrupted(tmp_path / "a", numbers=NUMBERS | {schedule: 8.0})
    after = recordings.restarted(tmp_path / "b", numbers=NUMBERS | {schedule: 0.0, rate: 0.5})
    assert [difference.name for difference in compare(before, after, "").differences] == [schedule]


def test_what_sets_weight_decay(tmp_path: Path) -> None:
    """The scheduler, not the optimizer, in which it is stored as well."""
    decay = "param_groups[wd_mult=1].weight_decay"
    before = recordings.uninterrupted(tmp_path / "a", numbers=NUMBERS | {decay: 0.1})
    after = recordings.restarted(tmp_path / "b", numbers=NUMBERS | {decay: 0.2})
    (difference,) = compare(before, after, "", numbers={decay: 0.1}).differences
    assert difference.where == recordings.PLACES["opt_param_scheduler"].loads


ELSEWHERE = [step(3, samples=(("1",),), losses={"lm loss": 5.0}), step(4, grad_norm=2.0)]
"""Other samples, and what they lead to."""
LOSSES = [step(3, losses={"lm loss": 5.0}), step(4)]
RATE = {"param_groups[wd_mult=1].lr": 0.5}
RATES = [step(4, numbers=step(4).numbers | RATE, grad_norm=2.0)]


@pytest.mark.parametrize(
    ("drawn", "restarted", "named"),
    [
        (" later", {}, []),
        (" later", {"steps": LOSSES}, [What.RANDOM, What.LOSS]),
        ("", {"steps": LOSSES}, [What.LOSS]),
        (" later", {"steps": RATES}, [What.NUMBER, What.GRAD_NORM]),
        (" later", {"steps": [step(3), step(4, samples=(("1",),))]}, [What.SAMPLES]),
        (" later", {"steps": ELSEWHERE}, [What.SAMPLES]),
        (" later", {"loaded": state() | ZEROS}, [What.EXP_AVG]),
    ],
)
def test_random_states(tmp_path: Path, drawn: str, restarted: Any, named: list[What]) -> None:
    """They are the cause only if the steps draw from them, and only results differ otherwise."""
    before = recordings.uninterrupted(tmp_path / "a", drawn=drawn)
    after = recordings.restarted(tmp_path / "b", random="b", drawn=drawn, **restarted)
    restart = compare(before, after, "")
    assert list(dict.fromkeys(difference.what for difference in restart.differences)) == named
    effect = "perhaps without effect" if named else "without effect on the compared steps"
    notice = f"not restored, {effect if drawn else 'and not used'}"
    assert any(n.startswith(notice) for n in restart.notices) is (What.RANDOM not in named)


def test_changed_code_that_read_other_samples(tmp_path: Path) -> None:
    """It ran while the batch of this step, or an earlier one, was read."""
    place = "megatron/samplers.py:7 (Sampler.__iter__)"
    steps = [recordings.step(3), recordings.step(4, samples=(("1",),), changed=(place,))]
    after = recordings.restarted(tmp_path / "b", steps=steps)
    (difference,) = compare(recordings.uninterrupted(tmp_path / "a"), after, "").differences
    assert (difference.what, difference.changed) == (What.SAMPLES, (place,))
    assert difference.where == recordings.PLACES[What.SAMPLES].loads


@pytest.mark.parametrize(("read", "blame"), [("a", Blame.LOADING), ("b", Blame.SAVING)])
def test_random_states_that_were_read(tmp_path: Path, read: str, blame: Blame) -> None:
    """What was read of them decides, though they are no tensors of a parameter."""
    before = recordings.uninterrupted(tmp_path / "a")
    after = recordings.restarted(tmp_path / "b", random="b", steps=LOSSES)
    ranks = tuple(
        dataclasses.replace(rank, random=rank.random | {Point.READ: {"torch": read}})
        for rank in after.ranks
    )
    restart = compare(before, dataclasses.replace(after, ranks=ranks), "")
    assert restart.differences[0].blame is blame


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_without_a_value(tmp_path: Path, loss: float) -> None:
    """Its error is infinite, so the record can be read again."""
    restart = answer(tmp_path, steps=[step(3, losses={"lm loss": loss}), step(4)])
    assert [difference.rel_err for difference in restart.differences] == [math.inf]
    assert Restart.from_json(restart.to_json()).verdict is Result.DIVERGED


def test_another_layout(tmp_path: Path) -> None:
    """Within what rounding moves, and not beyond."""
    near, far = ([step(3, losses={"lm loss": 4 / 3 * (1 + by)}), step(4)] for by in (1e-6, 1e-2))
    restarted = recordings.restarted(tmp_path / "b")
    perturbed = recordings.restarted(tmp_path / "p", steps=near)
    before = recordings.uninterrupted(tmp_path / "a")
    moves = Moves(perturbed, restarted)
    for steps, verdict in ((near, Result.EQUIVALENT), (far, Result.DIVERGED)):
        after = recordings.restarted(tmp_path / verdict.value, steps=steps)
        restart = compare(before, after, "--tensor-model-parallel-size 1", moves=moves)
        assert restart.verdict is verdict


def test_traces_are_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is verified as it is opened, so it is not opened for each of its tensors."""
    runs = [recordings.restarted(tmp_path / name) for name in "pr"]
    opened: list[Path] = []

    class Reader(recorded.TraceReader):
        def __init__(self, directory: Path) -> None:
            opened.append(directory)
            super().__init__(directory)

    monkeypatch.setattr(recorded, "TraceReader", Reader)
    moves = Moves(*runs)
    for kind in (What.WEIGHT, What.MAIN, What.EXP_AVG):
        moves.tensor((kind, NAME), torch.ones(4))
    assert len(opened) == len(runs)


@pytest.mark.parametrize("dropout", [False, True])
def test_losses_that_differ_by_design(tmp_path: Path, dropout: bool) -> None:
    """Beside a state that differs they are shown, but not if dropout alone changes them."""
    before = recordings.uninterrupted(tmp_path / "a", dropout=dropout)
    after = recordings.restarted(tmp_path / "b", steps=[step(3, losses={"lm loss": 5.0}), step(4)])
    restart = compare(before, after, "--tensor-model-parallel-size 1")
    assert bool(restart.steps) is not dropout


def test_nothing_of_the_optimizer(tmp_path: Path) -> None:
    """With ``--no-load-optim`` weights are compared, and the rest is a notice."""
    loaded = {LoadedIndex.WEIGHT: state()[LoadedIndex.WEIGHT]}
    steps = [step(3, losses={"lm loss": 5.0}), step(4)]
    restart = answer(tmp_path, loaded=loaded, omitted=("no_load_optim",), steps=steps)
    assert (restart.verdict, restart.compared) == (Result.EQUIVALENT, 1)
    assert any("--no-load-optim" in notice for notice in restart.notices)


def test_values_of_ranks_after_the_steps(tmp_path: Path) -> None:
    """What is each rank's own is compared rank by rank; replicas must agree if they did before."""
    alike, unlike = torch.ones(2, 4), torch.arange(8.0).view(2, 4)
    ends = {name: {LoadedIndex.OTHER: values} for name, values in (("=", alike), ("x", unlike))}
    for old, new, expected in (
        ("x", "x", []),
        ("x", "=", [(How.DIFFERENT, (0, 1))]),
        ("=", "x", [(How.CONFLICT, (1,))]),
    ):
        home = tmp_path / f"{old}{new}"
        before = recordings.uninterrupted(home / "a", replicas=ends[old])
        after = recordings.restarted(home / "b", replicas=ends[new])
        differences = compare(before, after, "").differences
        assert [(difference.how, difference.ranks) for difference in differences] == expected
        assert all(difference.blame is Blame.TRAINING for difference in differences)


@pytest.mark.parametrize("index", [LoadedIndex.WEIGHT, LoadedIndex.BUFFER])
def test_copies_that_differed_before(tmp_path: Path, index: LoadedIndex) -> None:
    """A checkpoint has one copy of a weight: the fault is older than it."""
    one = torch.ones(4)
    steps = [step(number) for number in range(1, 5)]
    own = {index: torch.stack([one, 2 * one])}
    points: Any = {Point.SAVED: {}, Point.END: state()}
    before = recordings.run(tmp_path / "a", points, steps, replicas=own, replicated=Point.SAVED)
    points = {Point.LOADED: {}, Point.END: state()}
    after = recordings.run(
        tmp_path / "b",
        points,
        steps[2:],
        replicas={index: torch.stack([one, one])},
        replicated=Point.LOADED,
    )
    [difference], notices = (answer := compare(before, after, "")).differences, answer.notices
    assert difference.ranks == (1,)
    is_copy = any(notice.startswith("copies that differed") for notice in notices)
    assert is_copy is (index is LoadedIndex.WEIGHT)


@pytest.mark.parametrize(
    "name",
    ["embedding.word_embeddings.weight", "output_layer.bias", "output_layer.weight/momentum"],
)
def test_copies_of_a_vocabulary_that_is_padded_otherwise(tmp_path: Path, name: str) -> None:
    """A wrong copy on one rank is noticed although the shapes differ; padding is not compared."""
    saved = {LoadedIndex.WEIGHT: torch.tensor([1.0, 2.0, 3.0, 4.0])}
    points = {Point.SAVED: saved, Point.END: saved}
    steps = [step(number) for number in range(1, 5)]
    before = recordings.run(tmp_path / "before", points, steps, name=name)
    right = [1.0, 2.0, 3.0, 4.0, 0.0, 0.0]
    for copy, wrong in ((right, ()), ([1.0, 2.0, 9.0, 4.0, 0.0, 0.0], (1,))):
        after = recordings.run(
            tmp_path / f"after{len(wrong)}",
            {Point.LOADED: {}, Point.END: saved},
            [step(3), step(4)],
            replicas={LoadedIndex.WEIGHT: torch.tensor([right, copy])},
            replicated=Point.LOADED,
            name=name,
        )
        answer = compare(before, after, "--make-vocab-size-divisible-by 6")
        assert [d.ranks for d in answer.differences] == [wrong] * bool(wrong)
        assert [d.how for d in answer.differences] == [How.CONFLICT] * bool(wrong)
