# SPDX-License-Identifier: Apache-2.0
"""Writing a reference and comparing a candidate with it, tensor by tensor."""

import dataclasses
import math

import pytest
import torch

from megatron_ttrace.compare import device
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import fails
from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.compare.offline import measure_saved
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.sketch import squared_norm
from megatron_ttrace.compare.tolerance import Tolerances
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.placement.placements import FlatShard, Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import BufferIndex, Kind, ParamIndex
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.compare.traces import key_of as key
from tests.compare.traces import reference_of, step_level, tolerances_of, writing
from tests.placement.meshes import mesh_of

S, H = 8, 6
OUT = (0, Kind.OUTPUT, "decoder.layers.0.mlp", 0)
NEXT = (0, Kind.INPUT, "decoder.layers.1", 0)
GRAD = (0, Kind.GRAD_INPUT, "decoder.layers.0.mlp", 0)
FC1 = (0, Kind.OUTPUT, "decoder.layers.0.mlp.linear_fc1", 0)
IDS = (0, Kind.TOKENS, "tokens", 0)
NORM = step_level(Kind.GRAD_NORM, "grad_norm")
WEIGHT = step_level(Kind.MAIN_GRAD, "decoder.layers.0.mlp.linear_fc1.weight")


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def tensors():
    return {
        OUT: random(S, 1, H),
        GRAD: random(S, 1, H, seed=1),
        FC1: random(S, 1, 4 * H, seed=2),
        IDS: torch.arange(S).view(1, S),
        WEIGHT: random(4 * H, H, seed=3),
        NORM: torch.tensor(2.5),
    }


@pytest.fixture
def reference(tmp_path, tensors):
    """A trace of them, with a second name for the first."""
    with writing(tmp_path / "reference") as sink:
        sink.tensor((OUT, NEXT), tensors[OUT])
        for place in (GRAD, FC1, IDS, NORM):
            sink.tensor((place,), tensors[place])
        sink.placed(WEIGHT, tensors[WEIGHT].reshape(-1), (4 * H, H), ())
    return TraceReader(tmp_path / "reference")


def layout(rank=0, factor=1.0, blocks=2, **sizes):
    world = 1
    for size in sizes.values():
        world *= size
    mesh = mesh_of(rank, world, **sizes)
    return RankLayout(mesh, S, factor, stacked={FC1[2]: blocks})


def test_the_reference_is_written_once_per_tensor(reference, tensors):
    """Second names point at the first; step tensors get their logical shape back."""
    assert torch.equal(reference.tensor(reference.entry(key(NEXT))), tensors[OUT])
    assert reference.primary(key(NEXT)) == key(OUT)
    assert reference.entry(key(NEXT)).tensor == reference.entry(key(OUT)).tensor
    assert torch.equal(reference.tensor(reference.entry(key(WEIGHT))), tensors[WEIGHT])
    assert list(reference) == [key(p) for p in (OUT, NEXT, GRAD, FC1, IDS, NORM, WEIGHT)]
    writer_sink = WriteSink(TraceWriter(reference.directory.parent / "other", 0), 1)
    assert writer_sink.replace(OUT, tensors[OUT]) is None


STRANGER = (0, Kind.OUTPUT, "unheard.of", 0)
RANGE = (Step("tp", Shard(0)), Step("dp", FlatShard(5, 40)))


def gated(tensors, rank):
    """A rank's half of gate and up, side by side."""
    return torch.cat([half.chunk(2, -1)[rank] for half in tensors[FC1].chunk(2, -1)], -1)


@pytest.mark.parametrize(
    ("place", "of", "local", "placement", "equal"),
    [
        (OUT, layout(), lambda t: t[OUT], "Replicate", True),
        # Sequence parallel: each rank against its own half; the wrong half is noticed.
        (OUT, layout(0, tp=2), lambda t: t[OUT].chunk(2)[0], "tp:Shard(0)", True),
        (OUT, layout(1, tp=2), lambda t: t[OUT].chunk(2)[1], "tp:Shard(0)", True),
        (OUT, layout(1, tp=2), lambda t: t[OUT].chunk(2)[0], "tp:Shard(0)", False),
        # ``linear_fc1``'s output is gate and up side by side, unless the model is not gated.
        (FC1, layout(0, tp=2), lambda t: gated(t, 0), "tp:BlockShard(2, 2)", True),
        (FC1, layout(1, tp=2), lambda t: gated(t, 1), "tp:BlockShard(2, 2)", True),
        (FC1, layout(1, blocks=1, tp=2), lambda t: gated(t, 1), "tp:Shard(2)", False),
        # Other numbers of microbatches scale the loss; main gradients are averaged again.
        (GRAD, layout(factor=4.0), lambda t: 4 * t[GRAD], "Replicate", True),
        (OUT, layout(factor=4.0), lambda t: t[OUT], "Replicate", True),
    ],
)
def test_an_activation_is_compared_with_its_part(
    reference, tensors, place, of, local, placement, equal
):
    sink, data = CompareSink(reference, 1, of), local(tensors)
    sink.tensor((place,), data)
    [found] = sink.measured
    assert (found.key, found.placement, found.sums.n) == (key(place), placement, data.numel())
    assert found.logical_shape == tensors[place].shape
    assert found.sums.diff == 0.0 if equal else found.sums.diff > 0.1 * found.sums.reference


def test_a_tensor_whose_place_is_known(reference, tensors):
    """Tokens, a main gradient without a factor, and a flat range of a tensor-parallel half."""
    half = tensors[WEIGHT].chunk(2)[1].reshape(-1)
    sink = CompareSink(reference, 1, layout(1, factor=4.0, tp=2))
    sink.placed(IDS, tensors[IDS], tensors[IDS].shape, ())
    sink.placed(WEIGHT, tensors[WEIGHT], (4 * H, H), ())
    sink.placed(WEIGHT, half[5:40], (4 * H, H), RANGE)
    assert [(m.sums.n, m.sums.diff) for m in sink.measured] == [(S, 0), (24 * H, 0), (35, 0)]
    assert sink.measured[2].placement == "tp:Shard(0) dp:FlatShard(5, 40)"


def test_extra_and_misshapen_tensors_are_findings(reference, tensors):
    """What the reference lacks, also in another iteration, and what fits no layout."""
    sink = CompareSink(reference, 1, layout())
    sink.tensor((STRANGER,), tensors[OUT])
    sink.tensor((OUT,), tensors[OUT][:5])
    sink.placed(WEIGHT, tensors[WEIGHT][:H], (H, H), ())
    later = CompareSink(reference, 2, layout())
    later.tensor((OUT,), tensors[OUT])
    measured = (*sink.measured, *later.measured)
    assert [(m.problem, m.sums, m.logical_shape, m.note.text) for m in measured] == [
        ("extra", None, (8, 1, 6), "not in the reference"),
        ("shape", None, (5, 1, 6), "(5, 1, 6) is not an even part of (8, 1, 6)"),
        ("shape", None, (6, 6), "the whole tensor is (6, 6), in the reference (24, 6)"),
        ("extra", None, (8, 1, 6), "not in the reference"),
    ]


@pytest.mark.parametrize("same_code", [True, False])
def test_a_tensor_that_was_rounded_is_a_finding(reference, tensors, same_code):
    """Its rounding may be within a tolerance that is estimated for a model in bf16."""
    sink = CompareSink(reference, 1, layout(), same_code=same_code)
    for place in (OUT, NORM):
        sink.tensor((place,), tensors[place].bfloat16())
    sink.tensor((GRAD,), tensors[GRAD].double())
    rounded, norm, finer = sink.measured
    assert (norm.problem, finer.problem) == (None, None)
    if not same_code:
        assert rounded.problem is None
        return
    assert (rounded.problem, rounded.logical_shape) == ("shape", (S, 1, H))
    assert rounded.note == Note(Remark.DTYPE, text="bfloat16, in the reference float32")


@pytest.mark.parametrize("same_code", [True, False])
@pytest.mark.parametrize(("asked", "fails"), [("float32", True), ("bfloat16", False), ("", False)])
def test_a_main_gradient_that_was_rounded(reference, tensors, asked, fails, same_code):
    """A finding if the settings ask for a finer dtype, and the reference runs the same code."""
    sink = CompareSink(reference, 1, layout(), same_code=same_code, gradients=asked)
    sink.placed(WEIGHT, tensors[WEIGHT].bfloat16(), (4 * H, H), ())
    [found] = sink.measured
    assert (found.problem == "shape") is (fails and same_code)


def test_a_repeated_name_is_not_measured_again(reference, tensors, monkeypatch):
    """The reference knows both names as one tensor, so the first finding counts for both."""
    calls = []
    plain = device.measure
    monkeypatch.setattr(device, "measure", lambda *args: calls.append(args) or plain(*args))
    sink = CompareSink(reference, 1, layout())
    sink.tensor((OUT,), tensors[OUT] + 1)
    sink.repeat(OUT, NEXT, tensors[OUT] + 1)
    assert len(calls) == 1
    assert sink.measured[1] == dataclasses.replace(sink.measured[0], key=key(NEXT))


@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("is_wrong", [False, True])
@pytest.mark.parametrize("again", [0.0, 1.0])
def test_what_is_recomputed_is_compared_too(reference, tensors, is_wrong, again, isolate):
    """It stands for what was right before; an error of the forward pass is the earlier one.

    Isolated modules, too, are recomputed from what the candidate has.
    """
    limits = tolerances_of(reference)
    sink = CompareSink(reference, 1, layout(), tolerances=limits, isolate=isolate)
    sink.tensor((OUT,), tensors[OUT] + 2 * is_wrong)
    sink.again(OUT, tensors[OUT] + again, Remark.RECOMPUTED)
    sink.again(STRANGER, tensors[OUT], Remark.RECOMPUTED)
    [found] = sink.measured
    notes = [Note(Remark.RECOMPUTED)] if again and not is_wrong else []
    assert [note for note in [found.note] if note] == notes
    assert fails(found.sums, tolerances_of(reference), found.key) == bool(is_wrong or again)


def test_a_repeated_name_of_another_tensor(reference, tensors):
    """What is one tensor here and two there is compared twice; so is what is not there."""
    sink = CompareSink(reference, 1, layout())
    sink.tensor((OUT,), tensors[OUT])
    sink.repeat(OUT, GRAD, tensors[OUT])
    assert [found.sums.diff > 0 for found in sink.measured] == [False, True]
    sink = CompareSink(reference, 1, layout())
    sink.tensor((STRANGER, OUT), tensors[OUT])
    sink.repeat(STRANGER, (0, Kind.INPUT, "unheard.of", 1), tensors[OUT])
    assert [found.problem for found in sink.measured] == ["extra", None, "extra"]


def shared_key(rank):
    """Two ranks with heads of their own and one key, whose gradient is partial."""
    return dataclasses.replace(layout(rank, tp=2), partials={GRAD[1:]: "tp"})


@pytest.mark.parametrize("early", [False, True])
def test_an_output_that_may_be_a_summand(reference, tensors, early):
    """It fails on its own, and is sketched."""
    known = tolerances_of(reference)
    at_once = None if early else known
    writer = TraceWriter(reference.directory.parent / "candidate", 0)
    sink = CompareSink(
        reference, 1, layout(0, tp=2), tolerances=at_once, writer=writer, early=early
    )
    sink.tensor((OUT,), 0.5 * tensors[OUT])
    sink.judge_by(known)
    [found] = sink.measured
    assert found.sketch


@pytest.mark.parametrize(("weights", "right"), [((1.7, -0.7), True), ((1.0, 1.0), False)])
def test_partial_sums_of_a_gradient(reference, tensors, weights, right, tmp_path):
    """Judged by their sum, in the job and from files."""
    measured = {}
    for rank, weight in enumerate(weights):
        writer = TraceWriter(tmp_path / "candidate", rank)
        sink = CompareSink(reference, 1, shared_key(rank), writer=writer, keep_all=True)
        sink.tensor((GRAD,), weight * tensors[GRAD])
        writer.close()
        measured[rank] = sink.measured
    seal(
        tmp_path / "candidate",
        {"meshes": [dataclasses.asdict(shared_key(rank).mesh) for rank in range(2)]},
    )
    saved = measure_saved(reference, TraceReader(tmp_path / "candidate"))
    for found in (measured, saved):
        one = found[0][0]
        assert one.placement == "Replicate tp:Partial(sum)"
        both = [found[rank][0].sketch for rank in range(2)]
        off = math.sqrt(squared_norm(both) / one.sums.reference)
        assert off == pytest.approx(0.0 if right else 1.0, abs=0.2 if not right else 1e-6)


def zigzag(rank, data):
    """A context-parallel rank's quarters."""
    quarters = data.chunk(4)
    return torch.cat([quarters[rank], quarters[3 - rank]])


@pytest.mark.parametrize(
    ("place", "of", "data", "expected"),
    [
        # In the candidate's own shape and dtype.
        (NEXT, layout(0, cp=2), torch.zeros(4, 1, H).bfloat16(), lambda t: zigzag(0, t[OUT])),
        (NEXT, layout(1, cp=2), torch.zeros(4, 1, H).bfloat16(), lambda t: zigzag(1, t[OUT])),
        (GRAD, shared_key(1), torch.zeros(S, 1, H), lambda t: t[GRAD] / 2),
        (NORM, layout(1, tp=2), torch.zeros(()), lambda t: torch.tensor(2.5)),
        # Integers, unknown names, and shapes that do not fit.
        (IDS, layout(), torch.zeros(1, S).long(), None),
        ((0, Kind.INPUT, "unheard.of", 0), layout(), torch.zeros(S, 1, H), None),
        (NEXT, layout(), torch.zeros(5, 1, H), None),
    ],
)
def test_isolation_hands_out_the_references_part(reference, tensors, place, of, data, expected):
    instead = CompareSink(reference, 1, of, isolate=True).replace(place, data)
    if expected is None:
        assert instead is None
    else:
        assert torch.equal(instead, expected(tensors).to(data.dtype))
    assert CompareSink(reference, 1, of).replace(place, data) is None
    assert CompareSink(reference, 2, of, isolate=True).replace(place, data) is None


def run_candidate(directory, reference, tensors, keep_all, ranks=2, early=False):
    """Two tensor-parallel ranks; rank 1's output is wrong. Returns the findings.

    ``early``: the tolerances are known afterwards.
    """
    found = {}
    for rank in range(ranks):
        writer = TraceWriter(directory, rank)
        sink = CompareSink(
            reference,
            1,
            layout(rank, factor=2.0, tp=2),
            tolerances=None if early else tolerances_of(reference),
            writer=writer,
            keep_all=keep_all,
            early=early,
        )
        output = tensors[OUT].chunk(2)[rank].clone()
        output[0] += rank
        sink.tensor((OUT, NEXT), output)
        sink.tensor((GRAD,), 2 * tensors[GRAD].chunk(2)[rank])
        half = tensors[WEIGHT].chunk(2)[rank]
        steps = (Step("tp", Shard(0)), Step("dp", FlatShard(3, 50)))
        sink.placed(WEIGHT, half.reshape(-1)[3:50], (4 * H, H), steps)
        sink.placed(IDS, tensors[IDS], tensors[IDS].shape, ())
        if keep_all:
            sink.tensor(((0, Kind.OUTPUT, "unheard.of", 0),), tensors[OUT])
            sink.placed(step_level(Kind.PARAM, "other"), torch.ones(2), (2,), ())
            sink.tensor((FC1,), tensors[FC1][:5])
        output.zero_()  # training overwrites its buffers
        sink.judge_by(tolerances_of(reference))
        found[rank] = sink.measured
        writer.close()
    seal(directory, {"role": "candidate"})
    return found


@pytest.mark.parametrize("early", [False, True])
def test_failed_tensors_are_kept(tmp_path, reference, tensors, early):
    """Only those, on the ranks where they failed, under all their names."""
    run_candidate(tmp_path / "candidate", reference, tensors, keep_all=False, early=early)
    kept = TraceReader(tmp_path / "candidate")
    assert [entry.key for entry in kept.ranks[0]] == []
    assert [entry.key for entry in kept.ranks[1]] == [key(OUT), key(NEXT)]
    assert kept.ranks[1][1].tensor == kept.ranks[1][0].tensor
    assert kept.entry(key(OUT)).placement == "tp:Shard(0)"
    assert kept.data(key(OUT)).any()


def test_a_saved_candidate_measures_the_same_offline(tmp_path, reference, tensors):
    """``ttrace compare`` finds what the running job found, problems included."""
    online = run_candidate(tmp_path / "candidate", reference, tensors, keep_all=True)
    offline = measure_saved(reference, TraceReader(tmp_path / "candidate"))
    assert offline.keys() == online.keys()
    for rank, expected in online.items():
        found = {one.key: one for one in offline[rank]}
        assert list(found) == [one.key for one in expected]
        for one in expected:
            assert found[one.key] == one


def test_fails_is_about_the_rank_alone(reference):
    """No sums: nothing to say. NaN: fails, whatever the tolerance."""
    known = tolerances_of(reference)
    assert not fails(None, known, key(OUT))
    assert fails(Sums(n=4, nonfinite=1), known, key(OUT))
    assert fails(Sums(n=4, diff=4.0, reference=4.0), known, key(OUT))
    assert not fails(Sums(n=4, diff=4e-8, reference=4.0), known, key(OUT))


def test_empty_ranges_survive_saving(tmp_path, reference, tensors):
    """A rank whose ZeRO range of a weight is empty holds nothing of it, and says so."""
    writer = TraceWriter(tmp_path / "candidate", 0)
    known = tolerances_of(reference)
    sink = CompareSink(reference, 1, layout(), tolerances=known, writer=writer, keep_all=True)
    empty = (Step("dp", FlatShard(7, 7)),)
    sink.placed(WEIGHT, tensors[WEIGHT].reshape(-1)[7:7], (4 * H, H), empty)
    writer.close()
    seal(tmp_path / "candidate", {})
    [found] = measure_saved(reference, TraceReader(tmp_path / "candidate"))[0]
    assert (found.problem, found.sums.n) == (None, 0)


UPDATE, MEAN, SQUARE = (
    step_level(kind, WEIGHT[2]) for kind in (Kind.PARAM_DELTA, Kind.EXP_AVG, Kind.EXP_AVG_SQ)
)


def turned(element, by=-1.0):
    """A rank's part of an update with one element's step changed."""
    return lambda update: update.clone().index_fill_(0, torch.tensor(element), by * 1e-3)


AFTER = step_level(Kind.PARAM, WEIGHT[2], ParamIndex.AFTER)


@pytest.mark.parametrize("place", [UPDATE, AFTER])
@pytest.mark.parametrize(
    ("change", "others", "passes"),
    [
        (turned(7), (MEAN, SQUARE), True),
        (turned(7, -9.0), (MEAN, SQUARE), False),  # farther than a step
        (turned(8), (MEAN, SQUARE), False),  # its mean of gradients is far from zero
        (turned(9, 1.0), (MEAN, SQUARE), False),  # it has no gradient
        (turned(10), (MEAN, SQUARE), False),  # its step is as small as its mean
        (turned(7), (MEAN,), False),  # not Adam
        (torch.neg, (MEAN, SQUARE), False),
        (lambda update: update * 0.9, (MEAN, SQUARE), False),
    ],
)
def test_adams_first_step_where_its_sign_is_rounding(tmp_path, place, change, others, passes):
    """Rounding turned around an element whose mean of gradients is within its tolerance."""
    mean = random(80).sign() + 0.1 * random(80, seed=1)
    mean[7], mean[9], mean[10] = 1e-3, 0.0, 1e-3
    tensors = {UPDATE: 1e-3 * mean.sign(), MEAN: mean, SQUARE: mean.square()}
    tensors[UPDATE][10] = 1e-6
    tensors[AFTER] = tensors[UPDATE].clone()
    places = (UPDATE, AFTER, *others)
    reference = reference_of(tmp_path / "reference", {place: tensors[place] for place in places})
    limits = tolerances_of(reference, moves={UPDATE: 1e-4, AFTER: 1e-4})
    writer = TraceWriter(tmp_path / "candidate", 0)
    sink = CompareSink(reference, 1, layout(1, tp=2), tolerances=limits, writer=writer)
    zero = (Step("dp", FlatShard(5, 75)),)
    sink.placed(place, change(tensors[UPDATE])[5:75], (80,), zero)
    writer.close()
    [measured] = sink.measured
    assert fails(measured.sums, limits, key(place)) is not passes
    note = Note(Remark.UNDECIDED, 1, 80)
    assert measured.note == (note if passes else None)
    seal(tmp_path / "candidate", {})
    saved = TraceReader(tmp_path / "candidate")
    assert bool(saved.ranks[0]) is not passes


def test_signs_that_rounding_cannot_all_have_turned(tmp_path):
    """One element may be off by more than its size; all of them together are off by too much."""
    mean = random(400).sign()
    tensors = {UPDATE: 1e-3 * mean, MEAN: mean, SQUARE: mean.square()}
    reference = reference_of(tmp_path / "reference", tensors)
    moves = {place: Moved(400, float(data.norm()), (1e-4,)) for place, data in tensors.items()}
    moves[MEAN] = dataclasses.replace(moves[MEAN], moved=(0.02,), peak=0.02)
    known = {key(place): move for place, move in moves.items()}
    limits = Tolerances(known, dict.fromkeys(known, "float32"))
    for number, passes in ((1, True), (400, False)):
        sink = CompareSink(reference, 1, layout(), tolerances=limits)
        update = tensors[UPDATE].clone()
        update[:number] *= -1
        sink.placed(UPDATE, update, update.shape, ())
        assert fails(sink.measured[0].sums, limits, key(UPDATE)) is not passes


@pytest.mark.parametrize(
    ("load", "dtype", "moved", "right"),
    [
        (1.0078125, torch.bfloat16, 0.001, True),
        (1.0078125, torch.bfloat16, 0.003, False),  # farther than two steps
        (0.9921875, torch.bfloat16, 0.001, True),
        (1.0234375, torch.bfloat16, 0.001, False),
        (1.0000010, torch.float32, 0.001, False),
        (1.0, torch.float32, 0.001, False),
    ],
)
def test_the_bias_of_an_expert_with_the_mean_load(tmp_path, load, dtype, moved, right):
    """Where counts are rounded, it may move either way: they do not show the side of the mean."""
    bias = torch.tensor([0.01, -0.02, 0.03])
    places = [step_level(Kind.BUFFER, "layer.router.expert_bias", index) for index in BufferIndex]
    loads = torch.tensor([load, 0.5, 1.5], dtype=dtype)
    tensors = dict(zip(places, (bias, loads, bias - 0.001), strict=True))
    reference = reference_of(tmp_path / "reference", tensors)
    for expert, is_right in ((0, right), (1, False)):
        sink = CompareSink(reference, 1, layout())
        other = bias.clone()
        other[expert] += moved
        sink.placed(places[0], other, other.shape, ())
        [measured] = sink.measured
        assert measured.is_equal == is_right
        assert (measured.note == Note(Remark.AT_THE_MEAN, 1, 3)) == is_right
