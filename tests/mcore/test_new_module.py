# SPDX-License-Identifier: Apache-2.0
"""A new class of modules is a change in mcore/ alone.

``FusedGatedLinear`` is made up: no room of the package has heard of it. It projects to gate and up
at once, and scales each channel. Nothing on its scales says that they are divided. Two ranks run as
threads. What the tables of mcore/ are told of it here is what a change would write into them.
"""

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.capture.modules import ModuleTap
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.gathered import of_ranks
from megatron_ttrace.compare.moved import Moved
from megatron_ttrace.compare.planning import RankLayout
from megatron_ttrace.compare.sinks import CompareSink
from megatron_ttrace.compare.tolerance import Tolerances, epsilon
from megatron_ttrace.compare.writing import WriteSink
from megatron_ttrace.jobs import provenance
from megatron_ttrace.mcore import parameters, stacked
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.mcore.sources import sources_of
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.saved.conclusion import conclude
from megatron_ttrace.trace.collectives import Ledger, ModuleCode
from megatron_ttrace.trace.meta import CandidateMeta
from megatron_ttrace.trace.records import STEP_LEVEL, Direction, Kind, Result, Summary, Verdict
from megatron_ttrace.trace.store import TraceReader, TraceWriter, seal
from tests.placement.meshes import mesh_of

S, B, H, F, TP = 8, 2, 6, 8, 2
LAYERS = 2
GATE_UP = "layers.0.fused.gate_up"

type AddUp = Callable[[torch.Tensor], torch.Tensor]
"""Over the ranks, if there are several."""


class Wire:
    """An all-reduce between threads."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(TP, timeout=300)
        self._sent: dict[int, torch.Tensor] = {}

    def all_reduce(self, rank: int, share: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks."""
        self._sent[rank] = share.detach()
        self._barrier.wait()
        total = sum(self._sent[peer] for peer in range(TP))
        self._barrier.wait()
        assert isinstance(total, torch.Tensor)
        return total


class FusedGatedLinear(torch.nn.Module):
    """``[S, B, H] -> [S, B, 2 F / TP]``, this rank's share of the gate before that of up."""

    fault = 1.0
    """A factor of what it puts out."""

    def __init__(self, rank: int | None, add_up: AddUp) -> None:
        super().__init__()
        weight, scales = (0.3 * torch.randn(2 * F, H), 1 + 0.2 * torch.rand(2 * F))
        self.add_up = add_up
        self.weight = torch.nn.Parameter(share(weight, rank, stacked=True))
        self.weight.tensor_model_parallel, self.weight.partition_dim = rank is not None, 0
        self.channel_scales = torch.nn.Parameter(share(scales, rank, stacked=True))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view_as(x)
        x.register_hook(self.add_up)
        return x @ self.weight.T * self.channel_scales * self.fault


class Down(torch.nn.Module):
    """``[S, B, F / TP] -> [S, B, H]``."""

    def __init__(self, rank: int | None, add_up: AddUp) -> None:
        super().__init__()
        self.add_up = add_up
        whole = 0.3 * torch.randn(H, F)
        self.weight = torch.nn.Parameter(share(whole.T, rank).T.contiguous())
        self.weight.tensor_model_parallel, self.weight.partition_dim = rank is not None, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight.T
        return self.add_up(x) + (x - x.detach())  # its gradient is passed on


class Fused(torch.nn.Module):
    """A gated MLP."""

    config = SimpleNamespace(gated_linear_unit=True)

    def __init__(self, rank: int | None, add_up: AddUp) -> None:
        super().__init__()
        self.gate_up, self.down = FusedGatedLinear(rank, add_up), Down(rank, add_up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * up)


class Layer(torch.nn.Module):
    """A residual around it."""

    def __init__(self, number: int, rank: int | None, add_up: AddUp) -> None:
        super().__init__()
        self.layer_number, self.fused = number, Fused(rank, add_up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fused(x)


class Model(torch.nn.Module):
    """Some layers and a loss."""

    def __init__(self, rank: int | None = None, add_up: AddUp = torch.Tensor.detach) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = [Layer(number + 1, rank, add_up) for number in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def share(whole: torch.Tensor, rank: int | None, *, stacked: bool = False) -> torch.Tensor:
    """A rank's rows; of each half where two are stacked."""
    if rank is None:
        return whole.clone()
    parts = whole.chunk(2) if stacked else (whole,)
    return torch.cat([part.chunk(TP)[rank] for part in parts])


def trace(model: Model, sink: WriteSink | CompareSink, mesh: Mesh) -> None:
    """One step: what a training run captures of it."""

    def failed(error: BaseException) -> None:
        raise AssertionError("tracing failed") from error

    names = canonical_names(model)
    blocks = stacked.stacked_parameters(names)
    placed = {
        name: parameters.place_parameter(name, parameter, mesh, blocks.get(name, 1))
        for name, parameter in names.parameters.items()
    }

    def step_level(kind: Kind, of: Callable[[torch.nn.Parameter], torch.Tensor]) -> None:
        for name, parameter in names.parameters.items():
            where = (STEP_LEVEL, kind, name, 0)
            place = placed[name]
            sink.placed(where, of(parameter).detach(), place.logical_shape, place.placement)

    step_level(Kind.PARAM, lambda parameter: parameter)
    x = torch.randn(S, B, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with ModuleTap([names], sink, [0], failed):
        model(x).backward()
    step_level(Kind.MAIN_GRAD, lambda parameter: parameter.grad)


def check(folder: Path, fault: float = 1.0) -> tuple[Summary, list[Verdict]]:
    """Reference and candidate, in whose first layer is the fault, and what is concluded."""
    writer = TraceWriter(folder / "reference", 0)
    trace(Model(), WriteSink(writer, 1), mesh_of(0, 1))
    writer.close()
    seal(folder / "reference", {"role": "reference", "epsilon": epsilon("float32")})
    reference = TraceReader(folder / "reference")
    tolerances = Tolerances(
        {
            key: Moved(tensor.numel(), float(tensor.norm()), (1e-6,))
            for key in reference
            for tensor in [reference.tensor(reference.entry(key))]
        },
        dict.fromkeys(reference, "float32"),
    )
    wire = Wire()

    def run(rank: int) -> CompareSink:
        writer = TraceWriter(folder / "candidate", rank)
        mesh = mesh_of(rank, TP, tp=TP)
        layout = RankLayout(
            mesh, S, 1.0, stacked=stacked.stacked_outputs([canonical_names(models[rank])])
        )
        sink = CompareSink(reference, 1, layout, tolerances=tolerances, writer=writer)
        trace(models[rank], sink, mesh)
        writer.close()
        return sink

    models = [Model(rank, functools.partial(wire.all_reduce, rank)) for rank in range(TP)]
    for model in models:
        model.layers[0].fused.gate_up.fault = fault
    with ThreadPoolExecutor(TP) as pool:
        sinks = list(pool.map(run, range(TP)))
    meshes = [mesh_of(rank, TP, tp=TP) for rank in range(TP)]
    seal(folder / "candidate", CandidateMeta(meshes=tuple(meshes)).to_json())
    no_code = dict.fromkeys(("optimizer", "finalize", "step"))
    code = sources_of([canonical_names(models[0])], lambda name: ModuleCode(), **no_code)
    return conclude(
        reference,
        tolerances,
        of_ranks({rank: sink.measured for rank, sink in enumerate(sinks)}),
        candidate=folder / "candidate",
        mesh=meshes[0],
        config=RunConfig(),
        timings={},
        ledger=Ledger(sources=code),
    )


@pytest.fixture(autouse=True)
def no_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for them imports Megatron, which takes many seconds."""
    monkeypatch.setattr(provenance, "installed", dict)


@pytest.fixture
def supported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is declared of the new module: two rows of tables, all in mcore/."""
    monkeypatch.setattr(stacked, "GATED", "gate_up")
    monkeypatch.setitem(parameters.UNMARKED, "channel_scales", 0)


@pytest.mark.usefixtures("supported")
def test_a_supported_module_is_captured_and_placed(tmp_path: Path) -> None:
    """Every tensor of it is judged and passes, in halves that are divided one by one."""
    summary, verdicts = check(tmp_path)
    assert summary.verdict is Result.EQUIVALENT, summary.culprits
    assert summary.counts == {"pass": len(verdicts)}
    placements = {
        (verdict.kind, verdict.name): (str(verdict.placement), verdict.shape)
        for verdict in verdicts
        if verdict.name.startswith(GATE_UP)
    }
    halves = {0: "tp:BlockShard(0, 2)", 2: "tp:BlockShard(2, 2)"}
    assert placements == {
        (Kind.PARAM, f"{GATE_UP}.weight"): (halves[0], (2 * F, H)),
        (Kind.PARAM, f"{GATE_UP}.channel_scales"): (halves[0], (2 * F,)),
        (Kind.INPUT, GATE_UP): ("Replicate", (S, B, H)),
        (Kind.OUTPUT, GATE_UP): (halves[2], (S, B, 2 * F)),
        (Kind.GRAD_OUTPUT, GATE_UP): (halves[2], (S, B, 2 * F)),
        (Kind.GRAD_INPUT, GATE_UP): ("Replicate", (S, B, H)),
        (Kind.MAIN_GRAD, f"{GATE_UP}.weight"): (halves[0], (2 * F, H)),
        (Kind.MAIN_GRAD, f"{GATE_UP}.channel_scales"): (halves[0], (2 * F,)),
    }


@pytest.mark.usefixtures("supported")
def test_a_fault_in_it_is_localised(tmp_path: Path) -> None:
    """One culprit: this module, forward, on both ranks, with the place of its code."""
    summary, _ = check(tmp_path, fault=2.0)
    assert summary.verdict is Result.DIVERGED
    [culprit] = summary.culprits
    assert (culprit.name, culprit.kind, culprit.ranks) == (GATE_UP, Kind.OUTPUT, (0, 1))
    assert culprit.direction is Direction.FORWARD
    line = FusedGatedLinear.forward.__code__.co_firstlineno
    assert culprit.where.endswith(f"test_new_module.py:{line} (FusedGatedLinear.forward)")


def test_without_the_rows_it_is_not_supported(tmp_path: Path) -> None:
    """Nothing else in the package knows how it is divided: then a correct run does not pass."""
    summary, _ = check(tmp_path)
    assert summary.verdict is Result.DIVERGED
    assert {culprit.name.partition(".gate_up")[0] for culprit in summary.culprits} == {
        f"layers.{number}.fused" for number in range(LAYERS)
    }
