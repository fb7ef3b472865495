# SPDX-License-Identifier: Apache-2.0
"""Coordinates agree with Megatron's own rank generator, for many orders and sizes."""

import argparse
import contextlib
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ttrace.mcore.groups import current_mesh
from megatron_ttrace.placement.mesh import AXES, SINGLE
from tests.placement.meshes import DEFAULT_ORDER, mesh_of

parallel_state = pytest.importorskip("megatron.core.parallel_state")

ORDERS = [DEFAULT_ORDER, "tp-cp-ep-pp-dp", "tp-pp-dp-cp-ep", "dp-tp-cp-ep-pp", "cp-tp-dp-ep-pp"]


def by_megatron(world, order, **sizes):
    """axis -> rank -> coordinate, from ``RankGenerator``'s groups."""
    sizes = {"tp": 1, "cp": 1, "pp": 1, "ep": 1, **sizes}
    data = world // (sizes["tp"] * sizes["cp"] * sizes["pp"] * sizes["ep"])
    generator = parallel_state.RankGenerator(dp=data, order=order, **sizes)
    return {
        axis: {
            rank: position
            for group in generator.get_ranks(axis)
            for position, rank in enumerate(group)
        }
        for axis in ("tp", "cp", "pp", "ep", "dp")
    }


def check(world, order, *, tp, cp, pp, ep, etp):
    """Every rank's coordinates are the positions in Megatron's groups."""
    dense = by_megatron(world, order, tp=tp, cp=cp, pp=pp)
    expert = by_megatron(world, order, tp=etp, pp=pp, ep=ep)
    for rank in range(world):
        mesh = mesh_of(rank, world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order)
        expected = {
            **{axis: dense[axis][rank] for axis in ("tp", "cp", "pp", "dp")},
            "ep": expert["ep"][rank],
            "etp": expert["tp"][rank],
            "edp": expert["dp"][rank],
        }
        assert {axis: mesh.at(axis) for axis in AXES} == expected


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("world", "sizes"),
    [
        (1, (1, 1, 1, 1, 1)),
        (8, (2, 2, 2, 1, 2)),
        (16, (4, 1, 2, 2, 1)),
        (24, (2, 3, 2, 3, 1)),
        (64, (4, 2, 2, 8, 1)),
        (96, (2, 2, 3, 4, 4)),
        (1024, (8, 4, 4, 16, 2)),
    ],
)
def test_against_rank_generator(order, world, sizes):
    """Sizes up to a world of 1,024, dense and expert side."""
    check(world, order, **dict(zip(("tp", "cp", "pp", "ep", "etp"), sizes, strict=True)))


@settings(max_examples=40)
@given(
    order=st.permutations(["tp", "cp", "ep", "dp", "pp"]).map("-".join),
    sizes=st.fixed_dictionaries(
        {axis: st.sampled_from([1, 2, 3]) for axis in ("tp", "cp", "pp", "ep", "etp")}
    ),
    data=st.sampled_from([1, 2]),
)
def test_any_order(order, sizes, data):
    """Every order that the generator accepts, not only the two that Megatron's flags give."""
    world = data * sizes["pp"]
    world *= sizes["tp"] * sizes["cp"] * sizes["ep"] * sizes["etp"]
    check(world, order, **sizes)


def test_a_short_order_is_completed_as_megatron_does():
    """``tp-dp-pp`` leaves out axes of size one; Megatron appends them."""
    check(8, "TP-pp-dp", tp=2, cp=1, pp=2, ep=1, etp=2)
    with pytest.raises(ValueError, match="the order tp-pp-dp leaves out cp, which has 2 ranks"):
        mesh_of(0, 8, tp=2, cp=2, order="tp-pp-dp")


@pytest.mark.parametrize("world", [7, 12])
def test_a_world_that_does_not_fit_is_refused(world):
    """No fractional data-parallel size."""
    with pytest.raises(ValueError, match=rf"world size {world} is not a multiple"):
        mesh_of(0, world, tp=2, cp=2, pp=2)
    with pytest.raises(ValueError, match="ep=5"):
        mesh_of(0, 8, tp=2, ep=5)


def test_coordinates_are_unique():
    """No two ranks of a world sit at one place."""
    places = {
        tuple(mesh_of(rank, 48, tp=2, cp=2, pp=3).at(axis) for axis in ("tp", "cp", "pp", "dp"))
        for rank in range(48)
    }
    assert places == set(itertools.product(range(2), range(2), range(3), range(4)))


def test_one_device():
    """The reference's mesh has one place."""
    assert SINGLE.world_size == 1
    assert all(SINGLE.size(axis) == 1 and SINGLE.at(axis) == 0 for axis in AXES)
    assert SINGLE.describe() == {"world_size": 1}


def test_reports_name_the_axes_that_divide():
    """Axes of size one say nothing."""
    found = mesh_of(0, 16, tp=2, pp=2, vpp=3).describe()
    assert {"world_size": 16, "tp": 2, "pp": 2, "dp": 4, "vpp": 3}.items() <= found.items()
    assert "cp" not in found


@contextlib.contextmanager
def initialised(rank, world, **sizes):
    """Megatron's groups without other processes: a fake backend that sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend="fake", rank=rank, world_size=world, store=FakeStore())
    try:
        parallel_state.initialize_model_parallel(create_gloo_process_groups=False, **sizes)
        yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


WORLDS = [
    *((world, sizes) for world in (32, 64) for sizes in ((2, 2, 2, 2, 2), (4, 2, 1, 4, 1))),
    (128, (8, 1, 4, 2, 4)),
    (1024, (8, 4, 4, 16, 2)),
]
"""World size, and sizes of tp, cp, pp, ep, etp."""


@pytest.mark.parametrize("order", ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"])
@pytest.mark.parametrize(("world", "sizes"), WORLDS)
@pytest.mark.parametrize("where", [0.0, 0.37, 1.0])
def test_against_an_initialised_parallel_state(where, world, sizes, order):
    """The getters that a running job reads, in both orders that Megatron's flags give."""
    rank = int(where * (world - 1))
    tp, cp, pp, ep, etp = sizes
    with initialised(
        rank,
        world,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
        order=order,
    ):
        mesh = mesh_of(rank, world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order)
        running = current_mesh(argparse.Namespace(virtual_pipeline_model_parallel_size=None))
        assert mesh == running
