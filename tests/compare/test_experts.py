# SPDX-License-Identifier: Apache-2.0
"""Experts' tensors compared token by token: two ranks of experts against one device."""

import numpy as np
import pytest
import torch

from megatron_ttrace.compare.gathered import of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.offline import measure_saved
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sharding import ShardSink
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.mcore.roles import any_layer
from megatron_ttrace.placement.token_index import TokenIndex
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.saved.whole import Shards
from megatron_ttrace.trace.captured import Routed
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.findings import Note, Remark
from megatron_ttrace.trace.records import Kind, Outcome, RoutingIndex, TraceKey
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.compare.traces import tolerances_of, writing
from tests.placement.meshes import mesh_of

LAYER = "decoder.layers.0.mlp.experts"
ROUTER = "decoder.layers.0.mlp.router"
TOKENS, HIDDEN, EXPERTS, K = 8, 6, 2, 1
MICROBATCHES = (0, 1)
IN = (Kind.INPUT, f"{LAYER}.linear_fc1", 0)
OUT = (Kind.OUTPUT, LAYER, 0)
OF_ONE = (Kind.INPUT, f"{LAYER}.local_experts.1.linear_fc1", 0)


def chosen(microbatch):
    """Which expert each token goes to: uneven, and another one for each microbatch."""
    return torch.arange(TOKENS).remainder(3 + microbatch).clamp(max=1)


def rows_of(microbatch, expert):
    return (chosen(microbatch) == expert).nonzero()[:, 0].numpy()


def index(*parts):
    return TokenIndex(
        np.concatenate([np.full(len(p), m) for m, p, _ in parts]),
        np.concatenate([np.asarray(p, dtype=np.int64) for _, p, _ in parts]),
        np.concatenate([np.full(len(p), e) for _, p, e in parts]),
    )


def value(microbatch, position, expert):
    generator = torch.Generator().manual_seed(1000 * microbatch + 10 * int(position) + expert)
    return torch.randn(HIDDEN, generator=generator)


def tensor(rows):
    triples = zip(rows.microbatch, rows.position, rows.expert, strict=True)
    found = [value(int(m), p, int(e)) for m, p, e in triples]
    return torch.stack(found) if found else torch.empty(0, HIDDEN)


def scores(microbatch):
    return torch.nn.functional.one_hot(chosen(microbatch), EXPERTS).float() + 0.1


@pytest.fixture
def reference(tmp_path):
    with writing(tmp_path / "reference") as sink:
        for m in MICROBATCHES:
            assert sink.positions(0, (4, 2)).tolist() == list(range(TOKENS))
            kept = sink.routed(m, ROUTER, Routed(scores(m), chosen(m)[:, None]))
            assert torch.equal(kept, chosen(m)[:, None])
            rows = every_row(m)
            sink.dispatched(m, LAYER, rows)
            sink.dispatched(m, LAYER, rows)  # recomputed
            sink.tensor(((m, *IN),), tensor(rows))
            sink.tensor(((m, *OF_ONE),), tensor(rows.of_expert(1)))
            sink.tensor(((m, *OUT),), tensor(rows))
    return TraceReader(tmp_path / "reference")


def every_row(microbatch):
    return index(*[(microbatch, rows_of(microbatch, e), e) for e in range(EXPERTS)])


def arrived(rank):
    """What one of two expert-parallel ranks is sent: both microbatches, the other's first."""
    return index(*[(m, rows_of(m, rank), rank) for m in reversed(MICROBATCHES)])


def check(reference, tamper=lambda rank, rows, data: (rows, data), *, writer=None, **sizes):
    """Verdicts of two ranks; ``tamper`` may change what a rank sees."""
    measured = {}
    for rank in range(2):
        layout = RankLayout(mesh_of(rank, 2, **sizes), 4, 1.0)
        sink = CompareSink(
            reference, 1, layout, writer=writer(rank) if writer else None, keep_all=bool(writer)
        )
        own = rank if sizes.get("ep") == 2 else 0
        rows, data = tamper(rank, arrived(own), tensor(arrived(own)))
        sink.routed(own, ROUTER, Routed(scores(own), chosen(own)[:, None]))
        sink.dispatched(own, LAYER, rows)
        sink.tensor(((own, *IN),), data)
        if rank == 1 or sizes.get("ep") != 2:
            sink.tensor(((own, *OF_ONE),), data[rows.expert == 1])
        sink.tensor(((own, *OUT),), data)
        measured[rank] = sink.measured
    return by_place(judged(reference, measured)), measured


def judged(reference, measured):
    expected = [(key, reference.entry(key).shape) for key in reference]
    return judge(expected, of_ranks(measured), tolerances_of(reference), 1e-7)


def by_place(verdicts):
    return {(v.microbatch, v.kind, v.name, v.index): v for v in verdicts}


def test_every_token_is_compared(reference):
    """Tokens of both microbatches, on both experts' ranks, in another order."""
    verdicts, measured = check(reference, ep=2)
    assert {verdict.verdict for verdict in verdicts.values()} == {Outcome.PASS}
    compared = sum(
        one.sums.n for found in measured.values() for one in found if one.key.kind is Kind.OUTPUT
    )
    assert compared == len(MICROBATCHES) * TOKENS * K * HIDDEN


def gathered(index_of_rank):
    """What two ranks dispatch, sorted, each row once."""
    rows = [index_of_rank(rank) for rank in range(2)]
    columns = [(r.microbatch, r.expert, r.position) for r in (*rows, rows[0])]
    microbatch, expert, position = np.unique(np.concatenate(columns, axis=1), axis=1)
    return TokenIndex(microbatch, position, expert)


def write_shards(home, index_of_rank):
    """Two expert-parallel ranks write their shards of what one device has."""
    by = {
        (Kind.ROUTING, any_layer(ROUTER), RoutingIndex.SCORES): (1, 1),
        **{(kind, any_layer(name), number): (1, 1) for kind, name, number in (IN, OUT, OF_ONE)},
    }
    for rank in range(2):
        writer = TraceWriter(home, rank)
        layout = RankLayout(mesh_of(rank, 2, ep=2), 4, 1.0)
        sink = ShardSink(writer, 1, layout, by, lambda _: gathered(index_of_rank))
        assert sink.positions(rank, (4, 2)).tolist() == list(range(TOKENS))
        rows = index_of_rank(rank)
        sink.routed(rank, ROUTER, Routed(scores(rank), chosen(rank)[:, None]))
        sink.dispatched(rank, LAYER, rows)
        sink.dispatched(rank, LAYER, rows)  # recomputed
        sink.tensor(((rank, *IN), (rank, *OUT)), tensor(rows))
        if rank == 1:
            sink.tensor(((rank, *OF_ONE),), tensor(rows))
        writer.close()
    return Shards(TraceReader(home, sealed=False))


def test_ranks_write_what_one_device_has(tmp_path, reference):
    """Each row at the place that it has there, whatever rank it is sent to, in whatever order."""
    shards = write_shards(tmp_path / "shards", arrived)
    assert set(shards) == set(reference)
    for key in reference:
        whole = shards.tensor(key)
        assert torch.equal(whole, reference.tensor(reference.entry(key))), key
        assert not shards.conflicting(key, whole)


def test_an_expert_without_tokens(tmp_path):
    """The ranks have its tensor in every microbatch, without rows where none is sent there."""
    shards = write_shards(
        tmp_path / "shards",
        lambda rank: index((1, rows_of(1, 1), 1)) if rank else index((0, rows_of(0, 0), 0)),
    )
    assert shards.tensor(TraceKey(1, 0, *OF_ONE)).shape == (0, HIDDEN)


def test_a_token_twice(tmp_path):
    """The reference would have two values of a row."""
    with pytest.raises(TTraceError, match="gets a token twice"):
        write_shards(tmp_path / "shards", lambda rank: index((rank, [0, 0], rank)))


def wrong(rank, rows, data):
    """The last token of a rank."""
    return rows, data * (1 + 0.5 * (torch.arange(len(data)) == rank * len(data) - 1))[:, None]


def misled(rank, rows, data):
    """Tokens at the wrong expert are strangers there, and missed elsewhere."""
    position = rows.position if rank else (rows.position + 1) % TOKENS
    return TokenIndex(rows.microbatch, position, rows.expert), data


def lost(rank, rows, data):
    """No rank holds it."""
    keep = slice(None) if rank else slice(None, -1)
    arrays = (rows.microbatch, rows.position, rows.expert)
    return TokenIndex(*(array[keep] for array in arrays)), data[keep]


ROWS = (Kind.ROUTING, LAYER, 0)


@pytest.mark.parametrize(
    ("tamper", "expected"),
    [
        (wrong, {(0, *OUT): Outcome.DIVERGED, (1, *OUT): Outcome.PASS}),
        (misled, {(0, *ROWS): Outcome.UNCOVERED}),
        (lost, {(0, *ROWS): Outcome.UNCOVERED, (0, *OUT): Outcome.UNCOVERED}),
    ],
)
def test_what_went_wrong_on_a_rank(reference, tamper, expected):
    verdicts, _ = check(reference, tamper, ep=2)
    assert {place: verdicts[place].verdict for place in expected} == expected
    if tamper is wrong:
        assert verdicts[0, *OUT].ranks == (1,)


def test_a_tensor_of_other_rows_is_a_shape(reference):
    """Rows and tensor must be of one length."""
    sink = CompareSink(reference, 1, RankLayout(mesh_of(0, 2, ep=2), 4, 1.0))
    sink.dispatched(0, LAYER, arrived(0))
    sink.tensor(((0, *IN),), tensor(arrived(0))[1:])
    found = by_place(judged(reference, {0: sink.measured}))[0, *IN]
    assert found.verdict is Outcome.SHAPE
    assert "rows, where" in notes_text(found.notes)


@pytest.mark.parametrize("weights", [(1.7, -0.7), (1.0, 1.0), (0.5, 0.0), (0.5, 0.6)])
def test_partial_sums_are_judged_by_their_sum(reference, weights):
    """Two ranks of expert tensor parallelism: a right one, a doubled, a lost, a scaled one."""
    measured = {}
    for rank, weight in enumerate(weights):
        sink = CompareSink(reference, 1, RankLayout(mesh_of(rank, 2, tp=2, etp=2), 4, 1.0))
        for m in MICROBATCHES:
            sink.dispatched(m, LAYER, every_row(m))
            sink.tensor(((m, *OUT),), weight * tensor(every_row(m)))
        measured[rank] = sink.measured
    found = by_place(judged(reference, measured))[0, *OUT]
    error = abs(sum(weights) - 1)
    assert found.verdict is (Outcome.DIVERGED if error > 1e-9 else Outcome.PASS)
    assert found.rel_err == pytest.approx(error, rel=0.3, abs=1e-6)
    assert found.ranks == (0, 1)
    assert "etp:Partial(sum)" in found.placement


def test_another_choice(reference):
    """A tie passes with a note, the reference's choice is taken; a wrong one diverges."""
    sink = CompareSink(reference, 1, RankLayout(mesh_of(0, 1), 4, 1.0))
    tied, own = scores(0), chosen(0).clone()
    tied[0], own[0] = 1.1, 1 - own[0]
    taken = sink.routed(0, ROUTER, Routed(tied, own[:, None]))
    assert torch.equal(taken, chosen(0)[:, None])
    sink.routed(1, ROUTER, Routed(scores(1), 1 - chosen(1)[:, None]))
    found = by_place(judged(reference, {0: sink.measured}))
    assert found[0, Kind.ROUTING, ROUTER, RoutingIndex.CHOICE].verdict is Outcome.PASS
    assert found[0, Kind.ROUTING, ROUTER, RoutingIndex.CHOICE].notes == (Note(Remark.ROUTED, 1, 8),)
    assert found[0, Kind.ROUTING, ROUTER, RoutingIndex.SCORES].verdict is Outcome.DIVERGED
    assert found[1, Kind.ROUTING, ROUTER, RoutingIndex.CHOICE].verdict is Outcome.DIVERGED


@pytest.mark.parametrize(("run", "verdict"), [(0, Outcome.DIVERGED), (None, Outcome.PASS)])
def test_a_choice_in_a_recomputation(reference, run, verdict):
    """The reference's is taken there, too, but what the router would choose has to be right."""
    tolerances = tolerances_of(reference)
    sink = CompareSink(reference, 1, RankLayout(mesh_of(0, 1), 4, 1.0), tolerances=tolerances)
    right = chosen(0)[:, None]
    sink.routed(0, ROUTER, Routed(scores(0), right))
    taken = sink.routed(0, ROUTER, Routed(scores(0), 1 - right, run=run))
    assert torch.equal(taken, right)
    found = by_place(judged(reference, {0: sink.measured}))
    choice = found[0, Kind.ROUTING, ROUTER, RoutingIndex.CHOICE]
    assert choice.verdict is verdict
    assert (Note(Remark.RECOMPUTED) in choice.notes) == (run == 0)


def test_a_choice_of_a_second_run(tmp_path):
    """It is replaced by the first one's, as the tokens are, but judged by its own scores."""
    again = Routed(scores(1), chosen(1)[:, None], run=1)
    with writing(tmp_path / "reference") as sink:
        sink.routed(0, ROUTER, Routed(scores(0), chosen(0)[:, None]))
        assert torch.equal(sink.routed(0, ROUTER, again), chosen(0)[:, None])
    reference = TraceReader(tmp_path / "reference")
    for wrong in (again, Routed(scores(1), 1 - chosen(1)[:, None], run=1)):
        sink = CompareSink(reference, 1, RankLayout(mesh_of(0, 1), 4, 1.0))
        sink.routed(0, ROUTER, Routed(scores(0), chosen(0)[:, None]))
        assert torch.equal(sink.routed(0, ROUTER, wrong), chosen(0)[:, None])
        found = by_place(judged(reference, {0: sink.measured}))
        verdict = found[0, Kind.ROUTING, f"{ROUTER}#1", RoutingIndex.CHOICE].verdict
        assert verdict is (Outcome.PASS if wrong is again else Outcome.DIVERGED)


def test_saved_pieces_are_compared_offline(reference, tmp_path):
    """As in the running job; a tensor of two microbatches is stored once."""
    writers = {rank: TraceWriter(tmp_path / "candidate", rank) for rank in range(2)}
    _, measured = check(reference, ep=2, writer=writers.__getitem__)
    for writer in writers.values():
        writer.close()
    seal(tmp_path / "candidate", {"role": "candidate"})
    saved = TraceReader(tmp_path / "candidate")
    again = measure_saved(reference, saved)
    kept = {
        side: {
            (rank, one.key, one.boxes): (one.sums.n, one.sums.diff, one.sums.checksum)
            for rank, found in findings.items()
            for one in found
        }
        for side, findings in (("live", measured), ("saved", again))
    }
    assert kept["live"] == kept["saved"]
    files = {(e.file, e.tensor) for e in saved.ranks[0] if e.key.kind is Kind.OUTPUT and e.file}
    assert len(files) == 1


def test_isolation_puts_the_reference_in(reference):
    """Each row its own; a partial tensor's equal share."""
    rows = arrived(0)
    layout = RankLayout(mesh_of(0, 2, ep=2), 4, 1.0)
    sink = CompareSink(reference, 1, layout, isolate=True)
    sink.dispatched(0, LAYER, rows)
    wrong = tensor(rows) + 1
    assert torch.equal(sink.replace((0, *IN), wrong), tensor(rows))
    assert sink.replace((0, *IN), tensor(rows)) is None
    both = every_row(0)
    sink = CompareSink(reference, 1, RankLayout(mesh_of(0, 2, tp=2, etp=2), 4, 1.0), isolate=True)
    sink.dispatched(0, LAYER, both)
    assert torch.allclose(sink.replace((0, *OUT), wrong[:0].new_ones(8, HIDDEN)), tensor(both) / 2)


def test_padding_is_not_stored(tmp_path):
    """The reference's experts' tensors hold tokens only, however a product filled them up."""
    rows, padded = every_row(0), torch.zeros(32, HIDDEN)
    first = len(rows_of(0, 0))
    padded[:first] = tensor(rows)[:first]
    padded[16 : 16 + TOKENS - first] = tensor(rows)[first:]
    with writing(tmp_path / "reference") as sink:
        sink.dispatched(0, LAYER, rows)
        sink.tensor(((0, *IN),), padded)
        sink.tensor(((0, *OF_ONE),), padded[16:])
    stored = TraceReader(tmp_path / "reference")
    whole = stored.tensor(stored.entry(TraceKey(1, 0, *IN)))
    assert torch.equal(whole, tensor(rows))
    assert torch.equal(
        stored.tensor(stored.entry(TraceKey(1, 0, *OF_ONE))), tensor(rows.of_expert(1))
    )
    live = CompareSink(stored, 1, RankLayout(mesh_of(0, 1), 4, 1.0))
    live.dispatched(0, LAYER, rows)
    live.tensor(((0, *IN),), padded)
    assert live.measured[-1].sums.n == TOKENS * HIDDEN
    assert live.measured[-1].sums.diff == 0.0


def test_padding_by_tokens_is_not_stored(tmp_path):
    """Rows of a dispatcher's own padding are left out, however many tokens an expert has."""
    rows = every_row(0)
    more = index((0, rows_of(0, 0), 0), (-1, [3, 5], 0), (0, rows_of(0, 1), 1))
    with writing(tmp_path / "reference") as sink:
        sink.dispatched(0, LAYER, more)
        sink.tensor(((0, *IN), (0, *OUT)), tensor(more))
    stored = TraceReader(tmp_path / "reference")
    for place in (IN, OUT):
        assert torch.equal(stored.tensor(stored.entry(TraceKey(1, 0, *place))), tensor(rows))


def test_a_second_call_of_the_experts(tmp_path):
    """Repeated layers of multi-token prediction send the same tokens again."""
    second = (Kind.OUTPUT, f"{LAYER}#1", 0)
    with writing(tmp_path / "reference") as sink:
        sink.dispatched(0, LAYER, every_row(0))
        sink.tensor(((0, *second),), tensor(every_row(0)))
    live = CompareSink(
        TraceReader(tmp_path / "reference"), 1, RankLayout(mesh_of(0, 2, ep=2), 4, 1.0)
    )
    here = index((0, rows_of(0, 0), 0))
    live.dispatched(0, LAYER, here)
    live.tensor(((0, *second),), tensor(here))
    assert live.measured[-1].sums.n == len(rows_of(0, 0)) * HIDDEN
    assert live.measured[-1].sums.diff == 0.0
