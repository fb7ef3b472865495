# SPDX-License-Identifier: Apache-2.0
"""The Explainer on traces in files: who, how many alike, how much work."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Never

import pytest
import torch

from megatron_ttrace.compare.measure import measure
from megatron_ttrace.compare.measured import Measured
from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.diagnose import search, start
from megatron_ttrace.diagnose.evidence import Evidence, FailedPart
from megatron_ttrace.diagnose.explain import Explainer, differing_setting
from megatron_ttrace.diagnose.gather import Traces
from megatron_ttrace.diagnose.groups import group_of
from megatron_ttrace.placement.plan import plan
from megatron_ttrace.report.explanations import explanation_text, failing_text, hint_text
from megatron_ttrace.report.wording import UNKNOWN
from megatron_ttrace.trace.captured import Share
from megatron_ttrace.trace.collectives import Ledger
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.findings import (
    Cause,
    Finding,
    Loss,
    Miscounted,
    Note,
    OtherSetting,
    Remark,
    Rounded,
    WrongCopies,
)
from megatron_ttrace.trace.outcomes import Grounds
from megatron_ttrace.trace.records import (
    STEP_LEVEL,
    BufferIndex,
    Direction,
    DropoutIndex,
    Kind,
    LoadedIndex,
    Outcome,
    TraceKey,
)
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal
from tests.diagnose.evidence_by_hand import evidence_of, failed, hint, meshes, text, values
from tests.trace.traces import written

NAMES = [f"decoder.layers.{layer}.mlp.linear_fc1.weight" for layer in range(14)]


def keys() -> list[TraceKey]:
    return [TraceKey(1, STEP_LEVEL, Kind.MAIN_GRAD, name, 0) for name in NAMES]


@pytest.fixture
def made(tmp_path: Path) -> tuple[Explainer, Path]:
    """Main gradients of which two data-parallel ranks hold twice as much."""
    return explainer_of(tmp_path, lambda value: value * 2)


def explainer_of(
    tmp_path: Path,
    wrong: Callable[[torch.Tensor], torch.Tensor],
    kind: Kind = Kind.MAIN_GRAD,
    counted: Mapping[TraceKey, Finding] = MappingProxyType({}),
    before: int | None = None,
) -> tuple[Explainer, Path]:
    """Main gradients that both of two data-parallel ranks hold wrong.

    ``before``: under this index the reference has what they hold.
    """
    reference, candidate = tmp_path / "reference", tmp_path / "candidate"
    data = {
        dataclasses.replace(key, kind=kind): values(16, 8, seed=number)
        for number, key in enumerate(keys())
    }
    earlier = {} if before is None else {dataclasses.replace(k, index=before): k for k in data}
    written(reference, data | {key: wrong(data[later]) for key, later in earlier.items()})
    seal(reference, {"microbatches": 4})
    ranks = meshes(2)
    boxes = plan((16, 8), (), ranks[0])
    measured = {}
    for mesh in ranks:
        shards = TraceWriter(candidate, mesh.rank)
        for key, value in data.items():
            entry = Entry(
                key=key, shape=(16, 8), dtype="float32", logical_shape=(16, 8), boxes=boxes
            )
            shards.add(entry, wrong(value))
        shards.close()
        measured[mesh.rank] = [
            Measured(key, "", boxes, (16, 8), measure(wrong(value), value, boxes))
            for key, value in data.items()
        ]
    seal(
        candidate,
        {"meshes": [dataclasses.asdict(mesh) for mesh in ranks], "config": {"seq_length": 16}},
    )
    moved = {key: Moved(128, float(value.norm()), (1e-6,)) for key, value in data.items()}
    tolerances = Tolerances(moved, dict.fromkeys(data, "float32"))
    traces = Traces.read(TraceReader(reference), candidate, tolerances, measured)
    return Explainer(traces, Ledger(), counted), candidate


def test_one_sentence(made: tuple[Explainer, Path]) -> None:
    """What, which axis, how many others, which ranks; a hint and where to look apart from it."""
    verdict = failed(keys()[0])
    why = made[0].explain(verdict)
    sentence = explanation_text(why, verdict)
    assert sentence.startswith("2.000 times too large = the size of dp, as are all")
    assert f"as are all {len(NAMES)} main gradients that fail" in sentence
    assert "on all 2 ranks" in sentence
    assert hint_text(why, verdict) == "a missing division, or a doubled factor or reduction over dp"
    assert (why.places, why.collectives) == ((), None)
    assert why.finding is not None
    assert (why.finding.cause, why.finding.axes) == (Cause.TOO_LARGE, ("dp",))


def test_every_failing_part_is_tested(made: tuple[Explainer, Path]) -> None:
    """A repair of two ranks' parts is not the cause where a third rank fails too."""
    verdict = dataclasses.replace(failed(keys()[0]), ranks=(0, 1, 2))
    assert made[0].explain(verdict).finding is None


def test_a_rank_of_which_nothing_wrong_was_kept(
    made: tuple[Explainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not a right copy, though the elements of it that are looked at are right."""
    held = {0: values(16, 8, seed=1), 1: values(16, 8)}
    monkeypatch.setattr(made[0], "evidence", lambda _: evidence_of(values(16, 8), meshes(2), held))
    one = failed(keys()[0])
    both = dataclasses.replace(failed(keys()[1]), ranks=(0, 1))
    assert made[0].explain(one).observed == WrongCopies(Cause.COPY, wrong=(0,), right=(1,))
    assert made[0].explain(both).observed is None


def test_another_dtype(made: tuple[Explainer, Path]) -> None:
    """It is the cause, without a search."""
    note = Note(Remark.DTYPE, text="bfloat16, in the reference float32")
    verdict = dataclasses.replace(failed(keys()[0]), verdict=Outcome.SHAPE, notes=(note,))
    assert made[0].explain(verdict).finding == Rounded(Cause.PRECISION, dtype=note.text, own=True)


def test_every_layer_is_explained(made: tuple[Explainer, Path]) -> None:
    """However many there are."""
    findings = {made[0].explain(failed(key)).finding for key in keys()}
    assert {finding.cause for finding in findings if finding} == {Cause.TOO_LARGE}
    assert None not in findings


def test_a_budget_of_work(made: tuple[Explainer, Path]) -> None:
    """What is beyond it stays unknown; it is counted, not timed."""
    counted = []
    for _ in range(2):
        made[0]._work.left = 300_000
        made[0]._repairs.clear()
        made[0]._explanations.clear()
        counted.append([made[0].explain(failed(key)).finding is None for key in keys()])
    assert counted[0] == counted[1]
    assert any(counted[0])
    assert not all(counted[0])


def test_a_repair_that_raises(
    made: tuple[Explainer, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is raised in tests; else it is logged, and the others are tested."""

    def broken(evidence: Evidence) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(search, "CLOSING", (broken, *search.CLOSING))
    monkeypatch.setenv("TTRACE_STRICT", "1")
    with pytest.raises(ZeroDivisionError):
        made[0].explain(failed(keys()[0]))
    monkeypatch.delenv("TTRACE_STRICT")
    assert made[0].explain(failed(keys()[0])).finding is not None
    assert "broken could not be tested: ZeroDivisionError: oh" in caplog.text


def test_a_loss_of_which_a_share_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is found until the losses' shares of these gradients are known."""
    monkeypatch.delenv("TTRACE_STRICT", raising=False)
    own = values(16, 8, seed=99)
    explainer, _ = explainer_of(tmp_path, lambda value: value + own)
    verdicts = [failed(key) for key in keys()[:2]]
    for _ in range(2):
        assert [explainer.explain(verdict).finding for verdict in verdicts] == [None, None]
    assert explainer.unexplained == keys()[:2]

    def none(keys: Sequence[TraceKey]) -> Never:
        raise TTraceError("no replay")

    explainer.separate(none)
    assert "the losses' shares of gradients could not be tested: TTraceError" in caplog.text
    explainer.separate(lambda asked: {asked[0]: [Share(Loss.Z, False, own)]})
    why, other = (explainer.explain(verdict) for verdict in verdicts)
    assert why.finding is not None
    assert explanation_text(why, verdicts[0]) == (
        "the z loss's share of the gradient is 2.000 times too large = the size of dp or the "
        "number of microbatches, on all 2 ranks"
    )
    assert other.finding is None


def test_damage_is_unknown(made: tuple[Explainer, Path]) -> None:
    """Damaged shards take the explanation away and nothing else."""
    for shard in made[1].glob("*.safetensors"):
        shard.write_bytes(b"damaged")
    verdict = failed(keys()[0])
    why = made[0].explain(verdict)
    assert why.finding is None
    assert explanation_text(why, verdict) == UNKNOWN


def test_nothing_kept_is_unknown(made: tuple[Explainer, Path], tmp_path: Path) -> None:
    """A candidate of which nothing was kept has no explanations."""
    traces = made[0]._traces
    traces = Traces.read(traces.reference, tmp_path / "none", traces.tolerances, {})
    explainer = Explainer(traces, Ledger(), {})
    assert explainer.explain(failed(keys()[0])).finding is None
    assert explainer.explain(failed(keys()[0], Outcome.MISSING)).finding is None


def test_a_gradient_that_nothing_asks_for(made: tuple[Explainer, Path]) -> None:
    """A hint: its input was cut off from the graph."""
    verdict = failed(dataclasses.replace(keys()[0], kind=Kind.GRAD_INPUT), Outcome.MISSING)
    why = made[0].explain(verdict)
    assert (why.finding, why.observed) == (None, Finding(Cause.CUT_OFF))


@pytest.mark.parametrize("is_updated", [False, True])
def test_a_parameter_that_only_the_candidate_freezes(tmp_path: Path, is_updated: bool) -> None:
    """It has neither gradient nor update; without an optimizer it would have an update of zero."""
    explainer, _ = explainer_of(tmp_path, lambda right: right, Kind.PARAM_DELTA)
    verdict = failed(dataclasses.replace(keys()[0], kind=Kind.MAIN_GRAD), Outcome.MISSING)
    if not is_updated:
        explainer._traces = dataclasses.replace(explainer._traces, measured={})
    other = Explainer(explainer._traces, Ledger(), {}, {verdict.name})
    assert other.explain(verdict).finding is None  # it is trained, by no rank's optimizer
    assert explainer.explain(verdict).finding == (None if is_updated else Finding(Cause.FROZEN))


@pytest.mark.parametrize("kind", [Kind.PARAM, Kind.PARAM_DELTA])
@pytest.mark.parametrize("failure", [(Kind.MAIN_GRAD, 0), (Kind.LOADED, LoadedIndex.ROUNDED)])
def test_a_parameter_that_only_the_reference_freezes(
    tmp_path: Path, kind: Kind, failure: tuple[Kind, int]
) -> None:
    """Frozen, it has no update there; of one that is not in the reference this is not known."""
    explainer, _ = explainer_of(tmp_path, lambda right: right, kind)
    key = dataclasses.replace(keys()[0], kind=failure[0], index=failure[1])
    verdict = failed(key, Outcome.EXTRA)
    thawed = Finding(Cause.THAWED) if kind is Kind.PARAM else None
    assert explainer.explain(verdict).finding == thawed


def test_a_recomputation_of_other_values(made: tuple[Explainer, Path]) -> None:
    """That it was right in the forward pass is the cause, whatever else would fit."""
    verdict = dataclasses.replace(failed(keys()[0]), notes=(Note(Remark.RECOMPUTED),))
    assert made[0].explain(verdict).finding == Finding(Cause.RECOMPUTED)


def test_a_mask_that_only_the_candidate_recomputes(
    made: tuple[Explainer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is zero in the reference has no factor; its culprit still has a group."""
    key = TraceKey(1, 0, Kind.DROPOUT, "mlp", DropoutIndex.RECOMPUTED)
    zero = evidence_of(torch.zeros(1), meshes(2), lambda _, right: right + 1, key=key)
    monkeypatch.setattr(made[0], "evidence", lambda _: zero)
    finding = made[0].explain(failed(key)).finding
    assert group_of({}, Direction.FORWARD, failed(key), Grounds.OUTPUT, finding) == 1


@pytest.mark.parametrize(
    ("most", "cause"), [(0, Cause.NEVER_COUNTED), (1, Cause.ZERO)], ids=["none", "some"]
)
def test_an_update_of_no_optimizer(tmp_path: Path, most: int, cause: Cause) -> None:
    """That nothing changes is a symptom, if no element of it is in any optimizer's step."""
    key = dataclasses.replace(keys()[0], kind=Kind.PARAM_DELTA)
    at = dataclasses.replace(key, kind=Kind.COUNTED, index=Statistic.STEPPED.number)
    left_out = Miscounted(
        Cause.NEVER_COUNTED, statistic=Statistic.STEPPED, least=0, most=most, names=(NAMES[0], "b")
    )
    explainer, _ = explainer_of(
        tmp_path, torch.zeros_like, kind=Kind.PARAM_DELTA, counted={at: left_out}
    )
    verdict = failed(key)
    why = explainer.explain(verdict)
    assert why.finding is not None
    assert why.finding.cause is cause
    sentence = explanation_text(why, verdict)
    assert sentence.startswith("never updated")
    assert ("never updated by any optimizer, as are elements of 1 more" in sentence) == (most == 0)
    assert explainer.explain(failed(at)).finding == left_out


def test_a_bias_that_is_not_updated(tmp_path: Path) -> None:
    """It holds the value that it had before the step, as a parameter may."""
    explainer, _ = explainer_of(
        tmp_path, lambda value: value + 1, kind=Kind.BUFFER, before=BufferIndex.BEFORE
    )
    verdict = failed(dataclasses.replace(keys()[0], kind=Kind.BUFFER))
    why = explainer.explain(verdict)
    assert explanation_text(why, verdict).startswith("holds the value from before the step")


def test_missing_layers() -> None:
    """Stages that hold fewer layers than there are, and the arithmetic that loses them."""
    expected = [f"decoder.layers.{layer}.mlp.weight" for layer in range(7)]
    ranks = meshes(2, pp=2)
    held = {0: expected[:3], 1: expected[3:6]}
    finding = start.misplaced_layers(expected[6], expected, start.stages_of(held, ranks))
    assert "layer 6 of 7 on no pipeline stage: the stages hold 3 + 3 = 6 layers" in text(finding)
    assert "7 // 2 layers each" in hint(finding)
    all_held = {0: expected[:3], 1: expected[3:]}
    stages = start.stages_of(all_held, ranks)
    assert start.misplaced_layers(expected[6], expected, stages) is None


@pytest.mark.parametrize(
    ("second", "words"),
    [
        ((0, 1), "layers held by pipeline stages: 0..1 by several, 2..3 by none"),
        ((4, 5), "2..3 by none, 4..5 without being in the reference; the stages hold 2 + 2 = 4 of"),
        ((1, 2, 3), "layers held by pipeline stages: 1 by several; the stages hold 2 + 3 = 5 of 4"),
    ],
)
def test_misnumbered_layers(second: tuple[int, ...], words: str) -> None:
    """A stage whose layers have the numbers of others."""
    names = [f"decoder.layers.{layer}.mlp.weight" for layer in range(6)]
    held = {0: names[:2], 1: [names[layer] for layer in second]}
    stages = start.stages_of(held, meshes(2, pp=2))
    finding = start.misplaced_layers(names[second[0]], names[:4], stages)
    assert words in text(finding)
    assert finding.cause is Cause.LAYER_NUMBERS


@pytest.mark.parametrize(
    ("layout", "holders", "failing", "words"),
    [
        ({"world": 4, "tp": 2}, range(4), [1, 3], "only on ranks 1,3 (tp 1)"),
        ({"world": 4, "tp": 2}, range(4), [0, 1, 2, 3], "on all 4 ranks"),
        ({"world": 4, "tp": 2}, range(4), [2], "only on rank 2"),
        ({"world": 4, "tp": 2}, [2], [2], "on rank 2, the only one that holds it"),
        ({"world": 4, "pp": 2}, [0, 1], [0, 1], "on all 2 ranks that hold it"),
        ({"world": 1}, [0], [0], ""),
    ],
)
def test_failing_ranks(
    layout: dict[str, int], holders: list[int], failing: list[int], words: str
) -> None:
    """Ranks by what they have in common."""
    reference = values(4, 4)
    ranks = meshes(**layout)
    evidence = evidence_of(reference, ranks, lambda r, x: x * 2 if r in failing else x)
    evidence.held = {rank: evidence.held[rank] for rank in holders}
    assert failing_text(evidence.failing_ranks()) == words


def test_large_parts_are_cropped(made: tuple[Explainer, Path]) -> None:
    """A part over the limit is judged by its first elements, and still explained."""
    whole = torch.arange(64.0).reshape(16, 4)
    part = FailedPart.of(whole, meshes(1)[0], plan((16, 4), (), meshes(1)[0]), 1.0, limit=12)
    assert part.laid_out() is None
    assert torch.equal(part.pieces[0], whole[:3])


LAYERS = [f"decoder.layers.{number}.attention" for number in range(4)]
EVERY = "decoder.layers.*.attention"
EXPECTED = {name: {"layer_number": (number,)} for number, name in enumerate(LAYERS, 1)} | {
    EVERY: {"heads": (8.0,)},
}
WRONG = OtherSetting(
    cause=Cause.SETTING, module=LAYERS[3], attribute="layer_number", value=2, expected=4
)


@pytest.mark.parametrize(
    ("numbers", "setting"),
    [
        ([1, 2, 3, 4], None),
        ([1, 2, 3, 2], WRONG),
        # In no layer it is as on one device: the layout may be the reason.
        ([0, 0, 0, 2], None),
    ],
)
@pytest.mark.parametrize("culprit", [LAYERS[3], "decoder.layers.3"])
def test_a_number_of_one_layer(
    numbers: list[float], setting: OtherSetting | None, culprit: str
) -> None:
    """It is right in another layer; heads are divided among ranks everywhere."""
    ours = {name: {"layer_number": (number,)} for name, number in zip(LAYERS, numbers, strict=True)}
    ours[EVERY] = {"heads": (4.0,)}
    assert differing_setting(culprit, ours, EXPECTED) == setting
    assert differing_setting(LAYERS[0], ours, EXPECTED) is None


def test_a_stage_of_one_layer() -> None:
    """It has one value for all of its layers, beside the one of the other stage."""
    ours = {LAYERS[0]: {"layer_number": (1,)}, EVERY: {"layer_number": (2,)}}
    assert differing_setting(LAYERS[3], ours, EXPECTED) == WRONG
    assert differing_setting(LAYERS[3], {}, EXPECTED) is None
