# SPDX-License-Identifier: Apache-2.0
"""Which gradients the buckets of a step added up, from the collectives that ran."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ttrace.capture.flow import Memory, Parts
from megatron_ttrace.capture.reducing import Reducing
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.placement.mesh import AXES, Axes, Mesh
from megatron_ttrace.trace.counted import Counting, Term

SECOND_OF_TWO = Mesh(
    1, 2, Axes(*(2 if one in ("dp", "edp") else 1 for one in AXES)), Axes(0, 0, 0, 0, 0, 1, 1)
)
WORLD = ((0, 1, 1),)


class Group:
    """A stand-in for Megatron's group of buckets: ``sync`` is what its reduction does."""

    def __init__(self, *buckets: torch.Tensor) -> None:
        self.buckets = [SimpleNamespace(grad_data=one) for one in buckets]
        self.sync = lambda bucket: dist.all_reduce(bucket, group="dp")

    def start_grad_sync(self) -> None:
        """As Megatron's."""
        for bucket in self.buckets:
            self.sync(bucket.grad_data)


def dist_reduce_scatter_func(output, input, op="sum", group=None):
    """The collective that stands where Megatron has its own, made of another one."""
    dist.all_reduce(input, op=op, group=group)


def scatter(bucket: torch.Tensor) -> torch.Tensor:
    """This rank's half of a bucket, reduced."""
    half = bucket[bucket.numel() // 2 :]
    dist_reduce_scatter_func(half, bucket, op="sum", group="dp")
    return half


class Job:
    """Two buckets: a and b with padding between them; an expert's weight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first, self.second = torch.zeros(16), torch.zeros(4)
        self.group = Group(self.first, self.second)
        self.chunk = SimpleNamespace(bucket_groups=[self.group], expert_parallel_bucket_groups=[])
        self.parts = Parts(SECOND_OF_TWO)
        self.reducing = Reducing([self.chunk], self.memory, lambda work: work())
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, op="sum", group=None: None)
        monkeypatch.setattr("megatron_ttrace.capture.reducing.group_ranks", lambda group: WORLD)

    def memory(self) -> Memory:
        """Where the gradients are."""
        memory = Memory(self.parts, of_rank=True)
        memory.add(self.first[:8], ParameterPlace("a", (4, 2), ()), (0, 8), 8)
        memory.add(self.first[9:15], ParameterPlace("b", (6,), ()), (0, 6), 6)
        memory.add(self.second, ParameterPlace("mlp.experts.w", (4,), ()), (0, 4), 4)
        return memory

    def counted(self) -> Counting:
        """After one reduction of everything."""
        with self.reducing.active():
            self.group.start_grad_sync()
        found = self.reducing.counting()
        assert found is not None
        return found

    def names(self, terms: tuple[Term, ...]) -> list[str]:
        """Of parameters."""
        return [self.parts.parts[term.number].name for term in terms]


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Job:
    """A new one."""
    return Job(monkeypatch)


EXPERT = "mlp.experts.w"
IN_TURN = [(["a", "b"], ()), ([], (Term(0),)), ([EXPERT], ()), ([], (Term(2),))]


@pytest.mark.parametrize(
    ("sync", "made", "own", "sums"),
    [
        # One collective per bucket.
        (lambda b: dist.all_reduce(b), [(["a", "b"], ()), ([EXPERT], ())], [], (Term(0), Term(1))),
        # The second collective takes what the first has made.
        (lambda b: [dist.all_reduce(b) for _ in range(2)], IN_TURN, [], (Term(1), Term(3))),
        # Inner collectives are not counted; the shard then goes through another one.
        (lambda b: dist.all_reduce(scatter(b)), IN_TURN, [], (Term(1), Term(3))),
        # What no collective takes is this rank's own.
        (lambda b: None, [], ["a", "b", EXPERT], ()),
    ],
)
def test_what_is_reduced(
    job: Job,
    sync: Callable[[torch.Tensor], object],
    made: list[tuple[list[str], tuple[Term, ...]]],
    own: list[str],
    sums: tuple[Term, ...],
) -> None:
    """Which gradients each collective takes, and which earlier ones."""
    job.group.sync = sync
    found = job.counted()
    assert [(job.names(one.parts), one.sums) for one in found.made] == made
    assert [(one.group, one.order) for one in found.made] == [(WORLD, n) for n in range(len(made))]
    assert (job.names(found.parts), found.sums, found.unknown) == (own, sums, "")


def test_the_ranks_of_a_gradient(job: Job) -> None:
    """The second rank's gradients are its part of both ranks'."""
    job.counted()
    part = job.parts.parts[0]
    assert (part.shape, part.boxes[0].logical) == ((2, 4, 2), (1, 0, 0))
    assert vars(job.group).keys() == {"buckets", "sync"}


def test_a_part_of_what_was_reduced(job: Job) -> None:
    """It cannot be followed, which is said."""

    def sync(bucket: torch.Tensor) -> None:
        dist.all_reduce(bucket)
        dist.all_reduce(bucket[:3])

    job.group.sync = sync
    assert "part of a bucket" in job.counted().unknown


def test_no_buckets() -> None:
    """Of FSDP nothing is said."""
    assert Reducing([SimpleNamespace()], Job.memory, lambda work: work()).counting() is None


@pytest.mark.parametrize(
    "sync",
    [
        lambda bucket: dist.all_reduce(bucket, "sum", "dp"),
        lambda bucket: dist.all_reduce(tensor=bucket, group="dp"),
        lambda bucket: dist_reduce_scatter_func(bucket[8:], bucket, "sum", "dp"),
        lambda bucket: dist_reduce_scatter_func(input=bucket, output=bucket[8:], group="dp"),
    ],
)
def test_arguments_by_position_or_name(
    job: Job, monkeypatch: pytest.MonkeyPatch, sync: Callable[[torch.Tensor], None]
) -> None:
    """The group is that of the call, and what is taken the input."""
    monkeypatch.setattr(
        "megatron_ttrace.capture.reducing.group_ranks", lambda group: {"dp": WORLD}[group]
    )
    job.group.buckets = job.group.buckets[:1]
    job.group.sync = sync
    [made] = job.counted().made
    assert job.names(made.parts) == ["a", "b"]
