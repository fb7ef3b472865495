# SPDX-License-Identifier: Apache-2.0
"""What may be excused: summands with evidence that they are added up, and what needs no value."""

import dataclasses

import pytest
import torch

from megatron_ttrace.compare import by_design
from megatron_ttrace.compare.gathered import merge, of_ranks
from megatron_ttrace.compare.judge import judge
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.report.wording import notes_text
from megatron_ttrace.trace.collectives import UNRECORDED, Collective, Ledger, Operation, Phase
from megatron_ttrace.trace.outcomes import Reason
from megatron_ttrace.trace.records import ROOT, Kind, Outcome
from tests.compare.traces import reference_of, step_level, tolerances_of
from tests.placement.meshes import mesh_of

S, H = 8, 6
MOVED = 1e-4
"""A tolerance of 4e-4."""

SUM = (0, Kind.OUTPUT, "layer.mlp.second", 0)
USED = (0, Kind.GRAD_OUTPUT, "layer.mlp.second", 0)
AROUND = (0, Kind.OUTPUT, "layer.mlp", 0)
LEAVING = (0, Kind.GRAD_OUTPUT, "layer.mlp", 0)
GRADIENT = (0, Kind.GRAD_INPUT, "layer.mlp.first", 0)
ENTERING = (0, Kind.GRAD_INPUT, "layer.mlp", 0)
WEIGHT = step_level(Kind.MAIN_GRAD, "layer.mlp.first.weight")
FAR = step_level(Kind.MAIN_GRAD, "head.weight")
MLP = (SUM, AROUND, LEAVING, USED, GRADIENT, ENTERING, WEIGHT, FAR)

ROTARY = (0, Kind.OUTPUT, "rotary", 0)
READER = (0, Kind.INPUT, "layer", 1)
LAYER = (0, Kind.OUTPUT, "layer", 0)
HEAD = (0, Kind.OUTPUT, "head", 0)
NORM = (0, Kind.OUTPUT, "norm", 0)
STAGES = (ROTARY, READER, LAYER, NORM, HEAD)

FROZEN = (0, Kind.OUTPUT, "layer.frozen", 0)
ADAPTER = (0, Kind.INPUT, "layer.adapter", 0)
ADAPTED = (0, Kind.OUTPUT, "layer.adapter", 0)
BACK = (0, Kind.GRAD_INPUT, "layer.frozen", 0)
PART = (0, Kind.GRAD_INPUT, "layer.adapter", 0)
TRAINED = step_level(Kind.MAIN_GRAD, "layer.adapter.weight")
LORA = (FROZEN, ADAPTER, ADAPTED, TRAINED)
LEARNED = (0, Kind.GRAD_OUTPUT, "layer.factor", 0)
FACTOR = step_level(Kind.MAIN_GRAD, "layer.factor.weight")
ALIASES = {ROTARY: READER, BACK: PART}


def values(seed):
    return torch.randn(S, 1, H, generator=torch.Generator().manual_seed(seed))


class World:
    """A reference, and what each rank of a candidate has instead of its tensors."""

    def __init__(self, directory, places, ranks, **sizes):
        """By default every rank has every tensor as the reference has it."""
        self.tensors = {place: values(number) for number, place in enumerate(places)}
        for place, alias in ALIASES.items():
            if alias in places:
                self.tensors[alias] = self.tensors[place]
        self.ranks = [dict(self.tensors) for _ in range(ranks)]
        self.sizes = sizes
        self.moved = dict.fromkeys(places, MOVED)
        self.collectives = [reduction(Phase.FORWARD), reduction(Phase.BACKWARD)]
        self._directory = directory

    def drop(self, *places):
        for tensors in (self.tensors, *self.ranks):
            for place in places:
                tensors.pop(place)

    def outcomes(self, ledger=None, *, isolated=False):
        """The outcome of each place, and the places with a note."""
        aliases = {a: [b] for a, b in ALIASES.items() if {a, b} <= self.tensors.keys()}
        again = [place for [place] in aliases.values()]
        written = {place: data for place, data in self.tensors.items() if place not in again}
        reference = reference_of(self._directory, written, aliases)
        tolerances = tolerances_of(reference, moves=self.moved)
        measured = {}
        for rank, tensors in enumerate(self.ranks):
            mesh = mesh_of(rank, len(self.ranks), **self.sizes)
            sink = CompareSink(reference, 1, RankLayout(mesh, S, 1.0), tolerances=tolerances)
            for place, data in tensors.items():
                if place[0] < 0:
                    sink.placed(place, data, data.shape, ())
                else:
                    # Those of several chunks are a list.
                    for each in data if isinstance(data, list) else [data]:
                        sink.tensor((place,), each)
            measured[rank] = sink.measured
        held = merge(of_ranks(measured), tolerances, [])
        order = [(key, reference.entry(key).shape) for key in reference]
        verdicts = by_design.review(
            judge(order, held, tolerances, 1e-7),
            held,
            reference,
            tolerances,
            eps=1e-7,
            mesh=mesh_of(0, len(self.ranks), **self.sizes),
            ledger=ledger or Ledger(tuple(self.collectives)),
            isolated=isolated,
        )
        return {(v.microbatch, v.kind, v.name, v.index): v.verdict for v in verdicts}, {
            (v.microbatch, v.kind, v.name, v.index): v for v in verdicts if v.notes
        }


def reduction(phase, operation=Operation.REDUCE_SCATTER, module="layer.mlp.sum", **more):
    """A collective over tp of one activation."""
    made = Collective(
        iteration=1,
        operation=operation,
        reduction="sum",
        group="tp",
        size=2,
        dtype="float32",
        bytes=4 * S * H,
        module=module,
        direction=phase,
        where="mappings.py:1 (f)",
        count=1,
        ranks=(0, 1),
    )
    return dataclasses.replace(made, **more)


@pytest.fixture
def mlp(tmp_path):
    world = World(tmp_path, MLP, 2, tp=2)
    world.tensors[AROUND] *= 2
    for tensors, weight, noise in zip(world.ranks, (1.6, -0.6), (1, -1), strict=True):
        tensors[AROUND] = world.tensors[AROUND]
        for number, place in enumerate((SUM, GRADIENT)):
            tensors[place] = weight * tensors[place] + noise * values(100 + number)
    return world


def test_summands_with_evidence_pass(mlp):
    """Their sum is what is judged, and a note says so."""
    outcomes, noted = mlp.outcomes()
    assert set(outcomes.values()) == {Outcome.PASS}
    assert set(noted) == {SUM, GRADIENT}
    assert noted[SUM].placement == "Replicate tp:Partial(sum)"
    assert noted[SUM].ranks == (0, 1)
    assert 0 <= noted[SUM].rel_err < 1e-6 < noted[SUM].tolerance


def test_summands_without_a_ledger_pass(mlp):
    """Where collectives were not recorded, the consumers are the evidence."""
    assert set(mlp.outcomes(UNRECORDED)[0].values()) == {Outcome.PASS}
    unseen = Ledger(unseen=("tp",))
    assert set(mlp.outcomes(unseen)[0].values()) == {Outcome.PASS}


def off(place, rank, size=0.01):

    def change(world):
        tensors = world.ranks[rank]
        tensors[place] = tensors[place] + size * values(7)[: len(tensors[place])]

    return change


def blind(place):
    """Rounding alone moves it as much as a bug would."""

    def change(world):
        world.moved[place] = 0.05

    return change


def faint(*places):
    """Nearly nothing of the loss depends on it."""

    def change(world):
        for place in places:
            for tensors in (world.tensors, *world.ranks):
                tensors[place] = tensors[place] * 1e-6

    return change


def without(*places):
    return lambda world: world.drop(*places)


def apart(world):
    """A copy that passes and one of zeros: something did not run."""
    for tensors, weight in zip(world.ranks, (1.0, 0.0), strict=True):
        tensors[SUM] = weight * world.tensors[SUM]


def extra(place, seed=8):
    """The second rank has it, too."""
    return lambda world: world.ranks[1].update({place: values(seed)})


def lost(rank, *places):
    return lambda world: [world.ranks[rank].pop(place) for place in places]


def whole(place):
    return lambda world: [t.update({place: world.tensors[place]}) for t in world.ranks]


def collectives(*found):
    return lambda world: world.collectives.__setitem__(slice(None), found)


ELSEWHERE = reduction(Phase.FORWARD, module="layer.attention")
SMALL = reduction(Phase.FORWARD, bytes=4 * S * H - 4)
LARGEST = reduction(Phase.FORWARD, reduction="max")
OTHERS = reduction(Phase.FORWARD, group="dp-cp")
GATHERED = reduction(Phase.FORWARD, Operation.ALL_GATHER)


@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda _: None, Outcome.PASS),
        (blind(LEARNED), Outcome.UNCHECKED),
        (blind(FACTOR), Outcome.UNCHECKED),
        (off(FACTOR, 0, 1.0), Outcome.PASS),
        (off(LEARNED, 0, 1.0), Outcome.REPLICA_CONFLICT),
    ],
)
def test_the_gradient_of_a_learned_factor(tmp_path, change, outcome):
    """It is of a rank's own tokens; whether it is reduced shows in the factor's main gradient."""
    world = World(tmp_path, (LEARNED, FACTOR), 2, tp=2)
    for tensors, weight in zip(world.ranks, (0.95, 0.05), strict=True):
        tensors[LEARNED] = weight * tensors[LEARNED]
    change(world)
    assert world.outcomes(UNRECORDED)[0][LEARNED] is outcome


def test_a_fault_elsewhere_changes_nothing(mlp):
    off(FAR, 0)(mlp)
    outcomes, _ = mlp.outcomes()
    assert [place for place, outcome in outcomes.items() if outcome.is_failure] == [FAR]


def test_a_missing_reduction_diverges(mlp):
    """What should be the sum is a summand as well, up to the whole model."""
    for tensors in mlp.ranks:
        tensors[AROUND] = tensors[SUM] + tensors[AROUND] - mlp.tensors[SUM]
    outcomes, _ = mlp.outcomes()
    assert outcomes[SUM].is_failure
    assert outcomes[AROUND].is_failure


@pytest.mark.parametrize(
    ("module", "first", "summand"),
    [
        ("layer.mlp", 0.0, Outcome.PASS),
        ("layer.mlp", 1.0, Outcome.REPLICA_CONFLICT),
        ("layer.mlp.sum", 0.0, Outcome.REPLICA_CONFLICT),
    ],
)
@pytest.mark.parametrize("fault", [AROUND, LEAVING, ENTERING, WEIGHT])
def test_a_summand_that_is_handed_on(mlp, module, first, summand, fault):
    """The container's own code adds up: what fails then, or in the backward pass, is elsewhere."""
    earlier = (0, Kind.OUTPUT, "layer.mlp.first", 0)
    for tensors in (mlp.tensors, *mlp.ranks):
        tensors[earlier] = values(50)
    mlp.moved[earlier] = MOVED
    mlp.collectives[0] = reduction(Phase.FORWARD, module=module)
    off(earlier, 0, first)(mlp)
    for place in {fault, ENTERING, WEIGHT}:
        off(place, 0)(mlp)
    outcomes, _ = mlp.outcomes()
    assert outcomes[fault].is_failure
    assert outcomes[SUM] is summand


def test_isolated_modules_show_no_consumers(mlp):
    """The container was computed from the reference's values."""
    assert mlp.outcomes(isolated=True)[0][SUM].is_failure


@pytest.fixture
def stages(tmp_path):
    """Two pipeline stages; the second one has rotary embeddings and no layer."""
    world = World(tmp_path, STAGES, 2, pp=2)
    for place in (NORM, HEAD):
        world.ranks[0].pop(place)
    for place in (READER, LAYER):
        world.ranks[1].pop(place)
    world.ranks[1][ROTARY] = torch.cat([values(0), values(0)])
    return world


@pytest.mark.parametrize("length", [S, 2 * S])
def test_an_unused_output(stages, length):
    """The stage that uses it decides, and a note names the other one."""
    stages.ranks[1][ROTARY] = torch.ones(length, 1, H)
    outcomes, noted = stages.outcomes()
    assert set(outcomes.values()) == {Outcome.PASS}
    assert noted[ROTARY].ranks == (0,)
    assert "rank 1" in notes_text(noted[ROTARY].notes)


@pytest.mark.parametrize("reader", [0, 7])
def test_an_unused_output_of_a_virtual_stage(stages, reader):
    """Another stage of the rank has it right, and reads that one."""
    stages.ranks[1][ROTARY] = [values(0), torch.ones(2 * S, 1, H)]
    stages.ranks[1][READER] = values(reader)
    outcomes, noted = stages.outcomes()
    assert outcomes[ROTARY].is_failure == bool(reader)
    assert reader or noted[ROTARY].ranks == (0, 1)


@pytest.fixture
def gathered(tmp_path):
    """Sequence parallelism: an adapter gathers the input that its layer gathers as well."""
    world = World(tmp_path, (*LORA, BACK, PART), 2, tp=2)
    for rank, tensors in enumerate(world.ranks):
        mine = slice(rank * S // 2, (rank + 1) * S // 2)
        for place in (FROZEN, ADAPTED, BACK):
            tensors[place] = tensors[place][mine]
        tensors[PART] = values(7 + rank)
    return world


def test_the_gradient_of_a_copy(gathered):
    """It lacks what the other uses of the tensor add; the whole gradient is compared."""
    outcomes, noted = gathered.outcomes()
    assert outcomes.pop(PART) is Outcome.UNCHECKED
    assert noted[PART].reason is Reason.COPY
    assert noted[PART].notes[0].text == "layer.frozen"
    assert set(outcomes.values()) == {Outcome.PASS}


@pytest.fixture
def frozen(tmp_path):
    """Two pipeline stages; the first one has an embedding that is not trained."""
    world = World(tmp_path, LORA, 2, pp=2)
    world.ranks[0].clear()
    return world


@pytest.mark.parametrize("place", [BACK, (0, Kind.GRAD_OUTPUT, *FROZEN[2:]), PART])
def test_a_gradient_that_nothing_trained_needs(frozen, place):
    """The reference has the tensor, and nothing trained before it."""
    forward = Kind.INPUT if place[1] is Kind.GRAD_INPUT else Kind.OUTPUT
    made = {(0, forward, *place[2:]): values(0), **frozen.tensors}
    frozen.tensors = made
    frozen.ranks[1] = {**made, place: values(8)}
    outcomes, noted = frozen.outcomes()
    assert outcomes.pop(place) is Outcome.UNCHECKED
    assert noted[place].reason is Reason.UNTRAINED
    assert set(outcomes.values()) == {Outcome.PASS}


SHIFTED = (0, Kind.INPUT, "layer.adapter", 2)


@pytest.mark.parametrize("fault", [None, 1, "lost"])
def test_an_argument_at_another_position(tmp_path, fault):
    """It had no effect if the module's output passes; not if that is wrong or absent."""
    world = World(tmp_path, (ADAPTER, ADAPTED, HEAD), 1)
    world.ranks[0][SHIFTED] = world.ranks[0].pop(ADAPTER)
    if fault == "lost":
        del world.ranks[0][ADAPTED]
    elif fault:
        world.ranks[0][ADAPTED] = values(8)
    outcomes, noted = world.outcomes()
    if fault:
        assert (outcomes[ADAPTER], outcomes[SHIFTED]) == (Outcome.MISSING, Outcome.EXTRA)
    else:
        assert {noted[place].reason for place in (ADAPTER, SHIFTED)} == {Reason.IGNORED}
        assert {outcomes.pop(place) for place in (ADAPTER, SHIFTED)} == {Outcome.UNCHECKED}
        assert set(outcomes.values()) == {Outcome.PASS}


@pytest.mark.parametrize("place", [(0, Kind.INPUT, ROOT, 2), (0, Kind.GRAD_INPUT, "layer", 2)])
def test_an_input_of_the_model_and_a_gradient_are_no_such_arguments(tmp_path, place):
    """Whatever the outputs are."""
    world = World(tmp_path, (LAYER, (0, Kind.OUTPUT, ROOT, 0)), 1)
    world.ranks[0][place] = values(8)
    assert world.outcomes()[0][place] is Outcome.EXTRA


PIECES = [(0, Kind.OUTPUT, name, 0) for name in ("head", "head#1")]
PIECES_BACK = [(0, Kind.GRAD_OUTPUT, *place[2:]) for place in PIECES]
LOSSES = (0, Kind.OUTPUT, ROOT, 0)


@pytest.fixture
def pieces(tmp_path):
    """A head that runs for two pieces on one device, and for one on each of two ranks."""
    places = (LAYER, *PIECES, *PIECES_BACK, LOSSES, FAR)
    world = World(tmp_path, places, 2, cp=2)
    for tensors in world.ranks:
        for place in (PIECES[0], PIECES_BACK[0]):
            tensors[place] = values(8)
        for place in (PIECES[1], PIECES_BACK[1]):
            del tensors[place]
    return world


def test_a_module_that_runs_for_pieces(pieces):
    """Their number depends on how many tokens a rank has."""
    outcomes, noted = pieces.outcomes()
    for place in (*PIECES, *PIECES_BACK):
        assert outcomes.pop(place) is Outcome.UNCHECKED
        assert noted[place].reason is Reason.PIECES
    assert set(outcomes.values()) == {Outcome.PASS}


ADAPTED_BACK = (0, Kind.GRAD_OUTPUT, *ADAPTED[2:])
STRANGER = (0, Kind.GRAD_OUTPUT, "elsewhere", 0)
FROZEN_WEIGHT = step_level(Kind.MAIN_GRAD, "layer.frozen.weight")
FAILURES = {
    # Whether the sum is right or wrong, one gap in the evidence suffices.
    ("mlp", SUM): [
        *(off(SUM, 0), off(SUM, 1, 0.002), off(AROUND, 0), off(USED, 0), off(WEIGHT, 1)),
        *(without(AROUND), without(USED), without(LEAVING), without(WEIGHT)),
        *(blind(AROUND), blind(SUM), blind(USED), faint(USED), apart),
        *(collectives(), collectives(ELSEWHERE, SMALL, LARGEST, OTHERS, GATHERED)),
        collectives(reduction(Phase.BACKWARD)),
    ],
    ("mlp", GRADIENT): [
        *(off(GRADIENT, 1), off(ENTERING, 1), off(WEIGHT, 1), without(ENTERING), without(WEIGHT)),
        *(blind(ENTERING), faint(GRADIENT), collectives(reduction(Phase.FORWARD))),
    ],
    # A reader on the stage, a fault of the others, or nothing else that passes there.
    ("stages", ROTARY): [
        *(extra(READER, 0), off(ROTARY, 0), off(READER, 0), off(HEAD, 1), off(NORM, 1)),
        *(blind(ROTARY), lost(1, NORM, HEAD), lost(0, ROTARY)),
    ],
    # The whole gradient or the values are wrong, or there is only one tensor.
    ("gathered", PART): [
        *(off(BACK, 0), off(BACK, 1), off(ADAPTER, 0), blind(BACK), blind(ADAPTER), without(BACK)),
        whole(BACK),
    ],
    # Anything else is wrong, or nothing shows what becomes of the runs; a gradient is blind.
    ("pieces", PIECES[0]): [
        *(off(LAYER, 1), off(FAR, 0), off(LOSSES, 1), without(LOSSES), blind(FAR)),
    ],
    # Something trained runs before it, the reference lacks the tensor, or a parameter has it.
    **{("frozen", place): [extra(place)] for place in (ADAPTED_BACK, STRANGER, FROZEN_WEIGHT)},
}


@pytest.mark.parametrize(
    ("world", "place", "change"),
    [(*where, change) for where, changes in FAILURES.items() for change in changes],
)
def test_what_is_not_excused(request, world, place, change):
    """Whatever is missing in the evidence, the tensor fails."""
    world = request.getfixturevalue(world)
    change(world)
    assert world.outcomes()[0][place].is_failure


@pytest.mark.parametrize(
    ("means", "outcome"),
    [
        ((0.5, 1.5), Outcome.UNCHECKED),
        ((1.5, 1.5), Outcome.DIVERGED),
        ((0.0, 1.0), Outcome.REPLICA_CONFLICT),
        ((0.5, float("nan")), Outcome.NONFINITE),
    ],
)
def test_the_mean_over_a_ranks_own_tokens(tmp_path, means, outcome):
    """As of a layer's regularizer under sequence parallelism; one that is wrong is a failure."""
    world = World(tmp_path, [HEAD, LAYER], 2, tp=2)
    backward = (0, Kind.GRAD_OUTPUT, *LAYER[2:])
    world.moved[backward] = MOVED
    world.tensors |= {LAYER: torch.tensor(1.0), backward: torch.tensor(1.0)}
    for tensors, mean in zip(world.ranks, means, strict=True):
        tensors |= {LAYER: torch.tensor(mean), backward: torch.tensor(2.0)}
    outcomes, _ = world.outcomes()
    assert outcomes[LAYER] is outcome
    assert outcomes[backward].is_failure == outcome.is_failure
    assert outcomes[HEAD] is Outcome.PASS
    assert world.outcomes(isolated=True)[0][LAYER].is_failure
