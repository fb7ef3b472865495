# SPDX-License-Identifier: Apache-2.0
"""How often a reference is replayed."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from megatron_ttrace.compare.measure import Sums
from megatron_ttrace.jobs.processes.progress import OF_REFERENCE
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.run import low_precision, reference_run
from megatron_ttrace.run.agreement import Cause, EndError
from megatron_ttrace.run.perturb import UNPERTURBED
from megatron_ttrace.run.reference_run import ReferenceSession
from megatron_ttrace.run.rehearsal import Block, Rehearsal
from megatron_ttrace.trace.budget import Budget
from megatron_ttrace.trace.records import Kind, TraceKey
from megatron_ttrace.trace.store import TRACED, TraceReader
from tests.trace.traces import written

KEY = TraceKey(1, 0, Kind.OUTPUT, "decoder.layers.0.mlp")
N = 4096


class Replays(ReferenceSession):
    """A reference whose only tensor moves by these distances, one a replay."""

    def __init__(self, directory: Path, seeds: int | None, distances: list[float]) -> None:
        # Not the base class's: it needs Megatron's arguments.
        self.settings = Settings(directory=directory, seeds=seeds)
        self.args: Any = SimpleNamespace(seq_length=4, bf16=True)
        self.model: Any = SimpleNamespace(names=[], optimizer=None, mesh=SINGLE)
        self.rehearsal: Any = SimpleNamespace(trace=lambda *_: None)
        self._directory = directory
        self._distances = distances
        self.seeds: list[int] = []

    def _replay(self, reader: Any, iteration: int, layout: Any, seed: int) -> Any:
        self.seeds.append(seed)
        moved = self._distances[seed - 1] if seed else 0.0
        sums = Sums(n=N, diff=moved**2, reference=1.0)
        return SimpleNamespace(rows={}, measured=[SimpleNamespace(key=KEY, sums=sums)])

    def made(self) -> tuple[float, ...]:
        """The distances that were found."""
        return self._replayed(Block([1], 1, cast(Any, None), lambda: None), lambda: None)[KEY].moved


@pytest.mark.parametrize(
    ("iterations", "ranks", "memory_mb", "is_announced"),
    [((1, 2), 1, 512, True), ((1, 3), 1, 512, False), ((1,), 2, 512, False), ((1,), 1, 0, False)],
)
def test_a_trace_is_announced_before_its_replays(
    tmp_path: Path, iterations: tuple[int, ...], ranks: int, memory_mb: int, is_announced: bool
) -> None:
    """If nothing follows it, and a candidate has the memory for copies of all tensors."""
    written(tmp_path, {KEY: torch.zeros(N)})
    session = Replays(tmp_path, None, [])
    session.settings = Settings(iterations=iterations, memory_mb=memory_mb)
    session.ranks = cast(Any, SimpleNamespace(size=ranks))
    session._loss_scales, session._seconds = {"1": 8.0}, 2.0
    session._announce()
    assert (tmp_path / TRACED).exists() == is_announced
    if is_announced:
        early = TraceReader.early(tmp_path, Budget()).reference
        assert (early.loss_scales, early.seconds) == ({"1": 8.0}, 2.0)


@pytest.mark.parametrize(
    ("seeds", "distances", "replays"),
    [
        (None, [0.010, 0.011, 0.010, 0.010, 0.010], 2),
        (None, [0.010, 0.030, 0.010, 0.010, 0.010], 4),
        (None, [0.010, 0.030, 0.029, 0.010, 0.010], 3),
        (1, [0.010], 1),
        (3, [0.010, 0.011, 0.010], 3),
        (5, [0.010, 0.030, 0.010, 0.010, 0.020], 5),
    ],
)
def test_replays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seeds: int | None,
    distances: list[float],
    replays: int,
) -> None:
    """A given number is kept; otherwise as many as the tolerances need, at most four."""
    monkeypatch.setattr(reference_run, "perturbed", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(reference_run, "_REPORTED_SECONDS", -1.0)
    for name in ("uses_fp8", "is_isolated"):
        monkeypatch.setattr(low_precision, name, lambda _: False)
    written(tmp_path, {KEY: torch.zeros(N, dtype=torch.bfloat16)})
    session = Replays(tmp_path, seeds, distances)
    assert session.made() == pytest.approx(tuple(distances[:replays]))
    assert session.seeds == [UNPERTURBED, *range(1, replays + 1)]
    said = capsys.readouterr().out.splitlines()
    assert len(said) == replays - 1
    assert all(line.startswith(f"ttrace: {OF_REFERENCE}replay ") for line in said)


@pytest.mark.parametrize(
    ("role", "size", "ends"),
    [("reference", 2, True), ("reference", 1, False), ("candidate", 2, False)],
)
def test_a_rank_whose_tracing_failed(tmp_path, role, size, ends):
    """Other ranks of a reference would wait for its rows; those of a candidate train on."""
    rehearsal: Any = object.__new__(Rehearsal)
    rehearsal._settings = Settings(directory=tmp_path, role=role)
    cause = Cause(1, "host", "tracing", "no room")
    rehearsal._ranks = SimpleNamespace(size=size, end=lambda error, what: EndError(cause))
    rehearsal._errors = []

    def run() -> None:
        rehearsal._tracing_failed(ValueError("no room"))

    with pytest.raises(EndError) if ends else contextlib.nullcontext():
        rehearsal.step(run)
    assert bool(rehearsal._errors) != ends


def test_blocks_of_later_iterations() -> None:
    """Each has the batches of its iterations, as the loader gives them."""
    wrapper = SimpleNamespace(iterable=iter(range(100)))
    session = cast("Any", SimpleNamespace(settings=Settings(iterations=(2, 4, 5))))
    found = []
    for block in ReferenceSession._blocks(session, [wrapper], 2, lambda: None):  # type: ignore[list-item]
        for _ in range(2):  # traced, and replayed
            block.served.serve(lambda item: -item, in_rehearsal=True)
            found.append([next(wrapper.iterable) for _ in range(2 * len(block.iterations))])
    assert found == [[-2, -3]] * 2 + [[-6, -7, -8, -9]] * 2
