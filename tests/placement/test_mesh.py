# SPDX-License-Identifier: Apache-2.0
"""Coordinates, ours and those of the tests, agree with Megatron's groups."""

import argparse
import contextlib

import pytest

from megatron_ttrace.mcore.groups import current_mesh
from megatron_ttrace.placement.mesh import AXES, SINGLE
from tests.placement.meshes import mesh_of

parallel_state = pytest.importorskip("megatron.core.parallel_state")


def test_one_device():
    """The reference's mesh has one place."""
    assert SINGLE.world_size == 1
    assert all(SINGLE.size(axis) == 1 and SINGLE.at(axis) == 0 for axis in AXES)
    assert SINGLE.describe() == {"world_size": 1}


def test_reports_name_the_axes_that_divide():
    """Axes of size one say nothing."""
    described = mesh_of(0, 16, tp=2, pp=2, vpp=3).describe()
    assert {"world_size": 16, "tp": 2, "pp": 2, "dp": 4, "vpp": 3}.items() <= described.items()
    assert "cp" not in described


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
    *((world, (1, 1, 1, 1, 1)) for world in (1, 6)),
    (24, (2, 3, 2, 3, 2)),
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
