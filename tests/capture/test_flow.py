# SPDX-License-Identifier: Apache-2.0
"""A number is followed back to the elements of parameters that it was computed from."""

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ttrace.capture.flow import Flow, Memory, Parts, Terms
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.counted import Term

A, B = ParameterPlace("a", (4, 2), ()), ParameterPlace("b", (6,), ())
ALL = {"a": 1, "b": 1}


class Job:
    """Two gradients in one buffer with padding between them."""

    def __init__(self) -> None:
        self.buffer = torch.arange(16.0)
        self.a, self.b = self.buffer[:8].view(4, 2), self.buffer[9:15]
        self.parts = Parts(SINGLE)
        memory = Memory(self.parts)
        memory.add(self.a, A, (0, 8), 8)
        memory.add(self.b, B, (0, 6), 6)
        self.flow = Flow(memory, Counter())

    def names(self, terms: Terms) -> dict[str, int]:
        """How often parameters are in a result; of collectives, their number."""
        found: Counter[str] = Counter()
        for (is_sum, number), times in terms.items():
            found["sum" if is_sum else self.parts.parts[number].name] += times
        return dict(found)

    def followed(self, compute: Callable[["Job"], object]) -> dict[str, int]:
        """What the result of a computation consists of."""
        with self.flow:
            value = compute(self)
        return self.names(self.flow.result(value))


def read_norm(job: Job) -> float:
    """A norm as Megatron's kernels compute it, read from a tensor."""
    norm = torch.stack([job.a.norm(), job.b.norm()]).norm()
    return (norm * norm).item() ** 0.5


def zeros(job: Job) -> torch.Tensor:
    """A count, added up in place."""
    total = torch.zeros(1)
    for one in (job.a, job.b):
        total += one.numel() - torch.count_nonzero(one)
    return total


@pytest.mark.parametrize(
    ("compute", "names"),
    [
        (read_norm, ALL),
        (zeros, ALL),
        (lambda job: job.a.pow(2).sum() + job.a.abs().max(), {"a": 2}),
        (lambda job: job.buffer.norm(), ALL),
        (lambda job: job.b.double().square().sum(), {"b": 1}),
        (lambda job: torch.ones(3).sum(), {}),
        (lambda job: job.a.norm() + torch.zeros_like(job.a.norm()), {"a": 1}),
        (lambda job: job.b.norm() + job.a.new_zeros(()), {"b": 1}),
        (lambda job: job.a.sum().zero_(), {}),
        (lambda job: torch.zeros(()).copy_(job.b.sum()), {"b": 1}),
    ],
)
def test_followed(compute: Callable[[Job], object], names: dict[str, int]) -> None:
    """Each parameter, as often as it was added."""
    job = Job()
    assert job.followed(compute) == names
    assert not job.flow.unknown


def test_parts() -> None:
    """Of what is known."""
    job = Job()
    assert job.flow.parts([job.a, torch.ones(3), job.b]) == (Term(0), Term(1))
    assert not job.flow.unknown


def test_a_piece() -> None:
    """A view of some elements, across a row."""
    job = Job()
    terms = job.flow.of(job.buffer[3:8])
    (number,) = [number for _, number in terms]
    assert sum(box.numel for box in job.parts.parts[number].boxes) == 5


def test_a_collective() -> None:
    """What goes into it, and that its result is what is read."""
    job = Job()
    with job.flow:
        total = job.a.norm() + job.b.norm()
        job.flow.reduced(total, ((0, 3, 1),))
        job.flow.reduced(total, ((0, 3, 1),))
        value = total.item()
    first, second = job.flow.made
    assert (first.order, second.order) == (0, 1)
    assert len(first.parts) == 2
    assert second.sums == ((0, 1),)
    assert job.flow.result(value) == {(True, 1): 1}


def test_an_unknown_tensor() -> None:
    """A tensor of no parameter is said to be unknown where it is in a result."""
    job = Job()
    foreign = torch.ones(2, 3)
    with job.flow:
        known = job.a.norm()
        value = known + foreign.norm()
    parts, _ = job.flow.added(job.flow.of(known))
    assert len(parts) == 1
    assert not job.flow.unknown
    job.flow.added(job.flow.of(value))
    assert "(2, 3)" in job.flow.unknown


def slots(job: Job) -> torch.Tensor:
    """Each norm in an element of its own."""
    norms = torch.zeros(2)
    norms[0], norms[1] = job.a.norm(), job.b.norm()
    return norms.norm()


def elements(job: Job) -> torch.Tensor:
    """The elements of a vector, one by one."""
    norms = torch.stack([job.a.norm(), job.b.norm()])
    return norms[0] + norms[1]


@pytest.mark.parametrize(
    "compute",
    [
        slots,
        elements,
        lambda job: job.a.norm().item() + job.b.norm().item(),
        lambda job: torch.tensor([float(job.a.norm()), float(job.b.norm())]).sum(),
        lambda job: torch.tensor(float(max(job.a.norm(), job.b.norm()))),
    ],
)
def test_what_cannot_be_followed(compute: Callable[[Job], object]) -> None:
    """It is said to be unknown, and not that parameters are missing or there twice."""
    job = Job()
    with job.flow:
        value = compute(job)
    job.flow.added(job.flow.result(value))
    assert job.flow.unknown


def test_a_number_that_is_read_again() -> None:
    """A test of a norm that is then returned."""
    job = Job()

    def norm(_: Job) -> float:
        total = job.a.norm() + job.b.norm()
        return total.item() if total.isfinite().item() and total.item() > 0 else 0.0

    assert job.followed(norm) == ALL
    assert not job.flow.unknown


def test_other_collectives_are_unknown() -> None:
    """What the other ranks put in is theirs to say."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        job = Job()
        with job.flow:
            norm = job.a.norm()
            gathered = [torch.zeros(()) for _ in range(2)]
            dist.all_gather(gathered, norm)
            total = gathered[0] + gathered[1]
    finally:
        dist.destroy_process_group()
    job.flow.added(job.flow.of(total))
    assert "allgather" in job.flow.unknown


def test_memory_that_is_free_again() -> None:
    """What is put there next is something else."""
    job, memory = Job(), np.zeros(3)
    before = torch.from_numpy(memory)
    job.flow.set(before, Counter([(False, 0)]))
    assert not job.flow.added(job.flow.of(before))[1]
    assert not job.flow.unknown
    del before
    job.flow.added(job.flow.of(torch.from_numpy(memory)))
    assert "(3,)" in job.flow.unknown
