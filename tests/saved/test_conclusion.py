# SPDX-License-Identifier: Apache-2.0
"""The answer of a check needs evidence."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.gathered import of_ranks
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.compare.tolerance import Tolerances, epsilon
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.placement.boxes import Box, product, whole
from megatron_ttrace.saved import conclusion as conclusions
from megatron_ttrace.saved.conclusion import _is_evidence, conclude, not_enough, unjudged
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.outcomes import NotExercised, Reason, Unexercised
from megatron_ttrace.trace.records import Kind, Outcome, Result, Summary, TraceKey, Verdict
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.diagnose.judged_by_hand import judged
from tests.placement.meshes import mesh_of


def verdict(kind: Kind, outcome: Outcome, index: int = 0) -> Judged:
    """A verdict of which only kind and outcome matter."""
    return judged(kind, "a", outcome, microbatch=0, index=index, margin=0.0)


@pytest.mark.parametrize(
    ("kind", "outcome", "index", "expected"),
    [
        (Kind.OUTPUT, Outcome.PASS, 0, True),
        (Kind.PARAM, Outcome.PASS, 1, True),
        (Kind.OUTPUT, Outcome.UNCHECKED, 0, False),
        (Kind.TOKENS, Outcome.PASS, 0, False),
        (Kind.PARAM, Outcome.PASS, 0, False),
    ],
)
def test_only_computed_tensors_that_pass_are_evidence(kind, outcome, index, expected) -> None:
    """A run whose computed tensors are all unchecked is not equivalent by default."""
    assert _is_evidence(verdict(kind, outcome, index)) is expected


@pytest.mark.parametrize(
    ("kind", "index", "name", "rows", "reason"),
    [
        (Kind.PARAM_DELTA, 0, "a.weight", 2, Reason.OWN_SHARD),
        (Kind.PARAM, 1, "a.weight", 2, Reason.OWN_SHARD),
        (Kind.PARAM, 0, "a.weight", 2, None),
        (Kind.PARAM_DELTA, 0, "a.weight", 4, None),
        (Kind.PARAM_DELTA, 0, "embedding.word_embeddings.weight", 2, None),
        (Kind.MAIN_GRAD, 0, "a.weight", 2, None),
        (Kind.EXP_AVG, 0, "a.weight", 2, None),
    ],
)
def test_updates_of_parts_of_a_matrix(kind, index, name, rows, reason) -> None:
    """Muon's blockwise update is unchecked where a rank holds a part; the rest is judged."""
    key = TraceKey(1, -1, kind, name, index)
    box = Box((0, 0), (rows, 3), (0, 0))
    holders = [Measured(key, "", (box,), (4, 3), Sums())]
    job = RunConfig(own_shards=(Kind.PARAM_DELTA, Kind.PARAM, Kind.EXP_AVG_SQ))
    assert unjudged(mesh_of(0, 2, tp=2), job, (), key, holders) is reason
    assert unjudged(mesh_of(0, 2, tp=2), job, ("a.weight",), key, holders) is None


def conclusion(
    home: Path,
    moves: Mapping[TraceKey, float],
    measured: list[Measured],
    *,
    logs: bool = False,
    config: RunConfig = RunConfig(),  # noqa: B008
    allow_unchecked: float = 0.10,
    dtype: str = "float32",
) -> tuple[Summary, list[Verdict]]:
    """Of what one rank measured, and a reference of tensors that replays moved so far."""
    writer = TraceWriter(home / "reference", 0)
    sink = WriteSink(writer, 1)
    for key in moves:
        shape = () if key.kind is Kind.METRIC else (4,)
        sink.placed((key.microbatch, key.kind, key.name, 0), torch.ones(shape), shape, ())
    writer.close()
    meta = {"role": "reference", "epsilon": epsilon(dtype), "logs": logs}
    seal(home / "reference", meta)
    moved = {key: Moved(4, 2.0, (move,)) for key, move in moves.items()}
    return conclude(
        TraceReader(home / "reference"),
        Tolerances(moved, dict.fromkeys(moves, "float32")),
        of_ranks({0: measured}),
        candidate=home / "candidate",
        mesh=mesh_of(0, 2, tp=2),
        config=config,
        timings={},
        allow_unchecked=allow_unchecked,
    )


def measured_of(key: TraceKey, error: float = 0.0) -> Measured:
    """A tensor with a relative error."""
    sums = Sums(4, 4.0 * error**2, 4.0, 4.0, 4.0)
    return Measured(key, "Replicate", product([whole(4)]), (4,), sums)


def answer(
    home: Path, allowed: float, *, blind: int, seen: int, error: float = 0.0, **more: Any
) -> Summary:
    """Of computed tensors, the first of which are blind; the last one has an error."""
    keys = [TraceKey(1, 0, Kind.OUTPUT, f"decoder.layers.{n}") for n in range(blind + seen)]
    moves = {key: 0.5 if number < blind else 1e-6 for number, key in enumerate(keys)}
    measured = [*map(measured_of, keys[:-1]), measured_of(keys[-1], error)]
    summary, _ = conclusion(home, moves, measured, allow_unchecked=allowed, **more)
    return summary


def test_what_isolation_may_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blind tensors in 16 bits; not where some are right only elsewhere, or later."""
    lower = {"blind": 3, "seen": 9, "dtype": "bfloat16"}
    assert answer(tmp_path / "blind", 0.10, **lower).too_blind
    assert not answer(tmp_path / "allowed", 0.25, **lower).too_blind
    assert not answer(tmp_path / "float32", 0.10, blind=3, seen=9).too_blind
    isolated = RunConfig(isolate=True)
    assert not answer(tmp_path / "isolated", 0.10, **lower, config=isolated).too_blind
    monkeypatch.setattr(conclusions.by_design, "EXCUSES", (Reason.BLIND,))
    assert not answer(tmp_path / "excused", 0.10, **lower).too_blind


def test_too_many_unchecked_are_no_answer(tmp_path: Path) -> None:
    """Three of twelve are blind: the notice says how many, why, and which share accepts it."""
    summary = answer(tmp_path / "refused", 0.10, blind=3, seen=9)
    assert summary.verdict is Result.COULD_NOT_CHECK
    assert summary.verdict.exit_code == 2
    assert summary.notices == (
        "could not check enough: 3 of 12 tensors (25.0 %) are unchecked, more than 10 %; "
        "most: blind (3); --ttrace-allow-unchecked 0.25 accepts it",
    )
    accepted = answer(tmp_path / "accepted", 0.25, blind=3, seen=9)
    assert accepted.verdict is Result.EQUIVALENT
    assert accepted.notices == ()
    assert accepted.not_exercised == (NotExercised(Unexercised.UNCHECKED, 3, 12),)


def test_a_divergence_stays_one(tmp_path: Path) -> None:
    """A divergence stays one, however little was checked."""
    summary = answer(tmp_path, 0.10, blind=9, seen=3, error=0.5)
    assert summary.verdict is Result.DIVERGED
    assert summary.notices == ()


def test_without_any_evidence_no_share_is_enough(tmp_path: Path) -> None:
    """If everything is blind, no allowed share makes it a pass."""
    summary = answer(tmp_path, 1.0, blind=3, seen=0)
    assert summary.verdict is Result.COULD_NOT_CHECK
    assert "all of them are unchecked" in summary.notices[0]


def test_what_passes_though_it_differs(tmp_path: Path) -> None:
    """A notice says so: all gradients of activations are half as large, as of a scaled loss."""
    gradient, main = TraceKey(1, 0, Kind.GRAD_OUTPUT, "a"), TraceKey(1, -1, Kind.MAIN_GRAD, "a.w")
    half = dataclasses.replace(measured_of(gradient), sums=Sums(4, 1.0, 4.0, 1.0, 2.0))
    summary, _ = conclusion(tmp_path, {gradient: 1e-6, main: 1e-6}, [half, measured_of(main)])
    assert summary.verdict is Result.EQUIVALENT
    [notice] = summary.notices
    assert notice.startswith(f"tensors that differ and pass: 1, the first of them {gradient}: 0.5 ")
    tied = dataclasses.replace(measured_of(gradient), note=Note(Remark.UNDECIDED, 1, 4))
    summary, _ = conclusion(tmp_path / "tied", {gradient: 1e-6}, [tied])
    assert "the sign of the step" in summary.notices[0]


@pytest.mark.parametrize(
    ("reference", "candidate", "result"),
    [
        (True, True, Result.DIVERGED),
        (True, False, Result.EQUIVALENT),
        (False, True, Result.EQUIVALENT),
    ],
)
def test_numbers_that_one_run_logs(tmp_path: Path, reference, candidate, result) -> None:
    """They are missing if both can log; a notice if one has no ``training_log``."""
    key, other = TraceKey(1, -1, Kind.METRIC, "z_loss"), TraceKey(1, 0, Kind.OUTPUT, "a")
    summary, verdicts = conclusion(
        tmp_path,
        {other: 1e-6, key: 1e-6},
        [measured_of(other)],
        logs=reference,
        config=RunConfig(logs=candidate),
    )
    assert summary.verdict is result
    assert len(summary.notices) == (result is Result.EQUIVALENT)
    wrong = [(v.name, v.verdict) for v in verdicts if v.verdict.is_failure]
    assert wrong == [("z_loss", Outcome.MISSING)] * (result is Result.DIVERGED)


@pytest.mark.parametrize("follows", [True, False])
@pytest.mark.parametrize(("reference", "candidate"), [(True, False), (False, True), (True, True)])
def test_dropout_that_one_run_lacks(
    tmp_path: Path, follows: bool, reference: bool, candidate: bool
) -> None:
    """It is lost if the candidate's calls can be followed; a reference on a GPU has none."""
    key, other = TraceKey(1, 0, Kind.DROPOUT, "a"), TraceKey(1, 0, Kind.OUTPUT, "a")
    summary, verdicts = conclusion(
        tmp_path,
        {other: 1e-6} | ({key: 1e-6} if reference else {}),
        [measured_of(other), *[measured_of(key)] * candidate],
        config=RunConfig(follows_dropout=follows),
    )
    lost = follows and not candidate
    assert summary.verdict is (Result.DIVERGED if lost else Result.EQUIVALENT)
    judged = [v.verdict for v in verdicts if v.kind is Kind.DROPOUT]
    passes = follows and reference and candidate
    assert judged == [Outcome.MISSING] * lost + [Outcome.PASS] * passes


@example(blind=399, seen=301, allowed=0.0)  # 0.57 * 700 is less than 399
@given(
    blind=st.integers(0, 400),
    seen=st.integers(0, 400),
    allowed=st.floats(0, 1),
)
def test_the_share_that_is_named_is_enough(blind: int, seen: int, allowed: float) -> None:
    """With the share that the notice suggests there is no such notice."""
    verdicts = [verdict(Kind.OUTPUT, Outcome.UNCHECKED)] * blind
    verdicts += [verdict(Kind.OUTPUT, Outcome.PASS)] * seen
    too_few = not_enough(verdicts, allowed)
    assert bool(too_few) == (blind > 0 and blind / (blind + seen) > allowed)
    if too_few:
        named = float(too_few.split("--ttrace-allow-unchecked ")[1].split()[0])
        assert named <= 1
        assert not not_enough(verdicts, named)


@pytest.mark.parametrize(
    ("reason", "accumulates", "advises"),
    [(Reason.BLIND, True, True), (Reason.BLIND, False, False), (Reason.IGNORED, True, False)],
)
def test_isolation_is_advised_where_rounding_spreads(
    reason: Reason, accumulates: bool, advises: bool
) -> None:
    verdicts = [dataclasses.replace(verdict(Kind.OUTPUT, Outcome.UNCHECKED), reason=reason)]
    assert ("--ttrace-isolate" in not_enough(verdicts, 0.1, accumulates)) == advises
