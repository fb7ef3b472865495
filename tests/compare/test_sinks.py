# SPDX-License-Identifier: Apache-2.0
"""Writing a reference and comparing a candidate with it, tensor by tensor."""

import dataclasses
import math

import pytest
import torch

from megatron_ttrace.compare import comparator
from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.compare.measured import fails
from megatron_ttrace.compare.offline import measure_saved
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.sketch import squared_norm
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.placement.placements import FlatShard, Shard
from megatron_ttrace.placement.plan import Step
from megatron_ttrace.trace.records import Kind
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.compare.traces import key_of as key
from tests.compare.traces import step_level, tolerances_of, writing
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


def layout(rank=0, factor=1.0, gated=True, **sizes):
    world = 1
    for size in sizes.values():
        world *= size
    return RankLayout(mesh_of(rank, world, **sizes), S, gated, factor)


def test_the_reference_is_written_once_per_tensor(reference, tensors):
    """Second names point at the first; step tensors get their logical shape back."""
    assert torch.equal(reference.tensor(reference.entry(key(NEXT))), tensors[OUT])
    assert reference.primary(key(NEXT)) == key(OUT)
    assert reference.entry(key(NEXT)).tensor == reference.entry(key(OUT)).tensor
    assert torch.equal(reference.tensor(reference.entry(key(WEIGHT))), tensors[WEIGHT])
    assert list(reference) == [key(p) for p in (OUT, NEXT, GRAD, FC1, IDS, NORM, WEIGHT)]
    writer_sink = WriteSink(TraceWriter(reference.directory.parent / "other", 0), 1)
    assert writer_sink.replace(OUT, tensors[OUT]) is None


def test_equal_tensors_of_one_device(reference, tensors):
    sink = CompareSink(reference, 1, layout())
    sink.tensor((OUT, NEXT), tensors[OUT])
    sink.placed(IDS, tensors[IDS], tensors[IDS].shape, ())
    assert [one.key for one in sink.measured] == [key(OUT), key(NEXT), key(IDS)]
    assert all(one.sums.diff == 0.0 and one.sums.n > 0 for one in sink.measured)
    assert sink.measured[0].placement == "Replicate"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_slice_is_compared_with_its_slice(reference, tensors, rank):
    """Sequence parallel: each rank against its own half; the wrong half is noticed."""
    sink = CompareSink(reference, 1, layout(rank, tp=2))
    halves = tensors[OUT].chunk(2)
    sink.tensor((OUT,), halves[rank])
    sink.tensor((NEXT,), halves[1 - rank])
    right, wrong = sink.measured
    assert (right.placement, right.sums.diff) == ("tp:Shard(0)", 0.0)
    assert (right.sums.n, right.logical_shape) == (S * H // 2, (S, 1, H))
    assert wrong.sums.diff > 0.1 * wrong.sums.reference


@pytest.mark.parametrize("rank", [0, 1])
def test_gated_outputs_are_stacked(reference, tensors, rank):
    """``linear_fc1``'s output is gate and up side by side, unless the model is not gated."""
    gate, up = tensors[FC1].chunk(2, -1)
    local = torch.cat([gate.chunk(2, -1)[rank], up.chunk(2, -1)[rank]], -1)
    for gated in (True, False):
        sink = CompareSink(reference, 1, layout(rank, gated=gated, tp=2))
        sink.tensor((FC1,), local)
        [found] = sink.measured
        assert (found.sums.diff == 0.0) == gated
        assert found.placement == ("tp:BlockShard(2, 2)" if gated else "tp:Shard(2)")


def test_gradients_of_activations_have_a_factor(reference, tensors):
    """Other numbers of microbatches scale the loss; parameters' gradients are averaged again."""
    sink = CompareSink(reference, 1, layout(factor=4.0))
    sink.tensor((GRAD,), 4 * tensors[GRAD])
    sink.tensor((OUT,), tensors[OUT])
    sink.placed(WEIGHT, tensors[WEIGHT], (4 * H, H), ())
    assert [one.sums.diff for one in sink.measured] == [0.0, 0.0, 0.0]


def test_a_zero_range_of_a_sharded_weight(reference, tensors):
    half = tensors[WEIGHT].chunk(2)[1].reshape(-1)
    sink = CompareSink(reference, 1, layout(1, tp=2))
    steps = (Step("tp", Shard(0)), Step("dp", FlatShard(5, 40)))
    sink.placed(WEIGHT, half[5:40], (4 * H, H), steps)
    [found] = sink.measured
    assert (found.sums.n, found.sums.diff) == (35, 0.0)
    assert found.placement == "tp:Shard(0) dp:FlatShard(5, 40)"


def test_extra_and_misshapen_tensors_are_findings(reference, tensors):
    """What the reference lacks, and what fits no layout, with a sentence each."""
    sink = CompareSink(reference, 1, layout())
    sink.tensor(((0, Kind.OUTPUT, "unheard.of", 0),), tensors[OUT])
    sink.tensor((OUT,), tensors[OUT][:5])
    sink.placed(WEIGHT, tensors[WEIGHT][:H], (H, H), ())
    assert [(one.problem, one.sums) for one in sink.measured] == [
        ("extra", None),
        ("shape", None),
        ("shape", None),
    ]
    assert sink.measured[1].note.text == "(5, 1, 6) is not an even part of (8, 1, 6)"
    assert sink.measured[2].note.text == "the whole tensor is (6, 6), in the reference (24, 6)"


def test_another_iteration_is_another_tensor(reference, tensors):
    sink = CompareSink(reference, 2, layout())
    sink.tensor((OUT,), tensors[OUT])
    assert sink.measured[0].problem == "extra"


def test_a_repeated_name_is_not_measured_again(reference, tensors, monkeypatch):
    """The reference knows both names as one tensor, so the first finding counts for both."""
    calls = []
    plain = comparator.measure
    monkeypatch.setattr(comparator, "measure", lambda *args: calls.append(args) or plain(*args))
    sink = CompareSink(reference, 1, layout())
    sink.tensor((OUT,), tensors[OUT] + 1)
    sink.repeat(OUT, NEXT, tensors[OUT] + 1)
    assert len(calls) == 1
    assert sink.measured[1] == dataclasses.replace(sink.measured[0], key=key(NEXT))


def test_a_repeated_name_that_the_reference_has_apart_is_measured(reference, tensors):
    """What is one tensor here and two there is compared twice."""
    sink = CompareSink(reference, 1, layout())
    sink.tensor((OUT,), tensors[OUT])
    sink.repeat(OUT, GRAD, tensors[OUT])
    assert [one.sums.diff > 0 for one in sink.measured] == [False, True]


def test_a_repeated_name_of_something_extra(reference, tensors):
    """Nothing is known of the first: the second stands for itself."""
    sink = CompareSink(reference, 1, layout())
    first = (0, Kind.OUTPUT, "unheard.of", 0)
    sink.tensor((first, OUT), tensors[OUT])
    sink.repeat(first, (0, Kind.INPUT, "unheard.of", 1), tensors[OUT])
    assert [one.problem for one in sink.measured] == ["extra", None, "extra"]


@pytest.mark.parametrize("rank", [0, 1])
def test_isolation_hands_out_the_references_slice(reference, tensors, rank):
    """In the candidate's own shape and dtype; zig-zag under context parallelism."""
    sink = CompareSink(reference, 1, layout(rank, cp=2), isolate=True)
    instead = sink.replace(NEXT, torch.zeros(S // 2, 1, H, dtype=torch.bfloat16))
    quarters = tensors[OUT].chunk(4)
    expected = torch.cat([quarters[rank], quarters[3 - rank]]).bfloat16()
    assert torch.equal(instead, expected)


def shared_key(rank):
    """Two ranks with heads of their own and one key, whose gradient is partial."""
    return dataclasses.replace(layout(rank, tp=2), partials={GRAD[1:]: "tp"})


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


def test_isolation_hands_out_a_share(reference, tensors):
    sink = CompareSink(reference, 1, shared_key(1), isolate=True)
    instead = sink.replace(GRAD, torch.zeros(S, 1, H))
    assert torch.allclose(instead, tensors[GRAD] / 2)


def test_isolation_hands_out_the_references_norm(reference):
    """A scalar of the step; in no other case is there anything to clip by."""
    zero = torch.zeros(())
    assert CompareSink(reference, 1, layout(1, tp=2), isolate=True).replace(NORM, zero) == 2.5
    assert CompareSink(reference, 1, layout()).replace(NORM, zero) is None
    assert CompareSink(reference, 2, layout(), isolate=True).replace(NORM, zero) is None


def test_isolation_leaves_alone_what_it_cannot_replace(reference, tensors):
    """Integers, unknown names, shapes that do not fit, and everything when it is off."""
    sink = CompareSink(reference, 1, layout(), isolate=True)
    assert sink.replace(IDS, tensors[IDS]) is None
    assert sink.replace((0, Kind.INPUT, "unheard.of", 0), tensors[OUT]) is None
    assert sink.replace(NEXT, tensors[OUT][:5]) is None
    assert CompareSink(reference, 1, layout()).replace(NEXT, tensors[OUT]) is None


def run_candidate(directory, reference, tensors, keep_all, ranks=2):
    """Two tensor-parallel ranks; rank 1's output is wrong. Returns the findings."""
    found = {}
    for rank in range(ranks):
        writer = TraceWriter(directory, rank)
        sink = CompareSink(
            reference,
            1,
            layout(rank, factor=2.0, tp=2),
            tolerances=tolerances_of(reference),
            writer=writer,
            keep_all=keep_all,
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
        writer.close()
        found[rank] = sink.measured
    seal(directory, {"role": "candidate"})
    return found


def test_failed_tensors_are_kept(tmp_path, reference, tensors):
    """Only those, on the ranks where they failed, under all their names."""
    run_candidate(tmp_path / "candidate", reference, tensors, keep_all=False)
    kept = TraceReader(tmp_path / "candidate")
    assert [entry.key for entry in kept.ranks[0]] == []
    assert [entry.key for entry in kept.ranks[1]] == [key(OUT), key(NEXT)]
    assert kept.resolve(1, 1).tensor == kept.resolve(1, 0).tensor
    assert kept.entry(key(OUT)).placement == "tp:Shard(0)"


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
