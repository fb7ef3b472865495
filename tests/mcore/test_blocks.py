# SPDX-License-Identifier: Apache-2.0
"""A whole matrix is stepped as tensor-parallel ranks step their parts of it."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.mcore.blocks import mesh_of_blocks, step_in_blocks
from megatron_ttrace.mcore.parameters import place_of_part, place_parameter
from megatron_ttrace.mcore.stacked import Shares
from tests.placement.meshes import mesh_of


class TensorParallelMuon:
    """Megatron's, which orthogonalises; here a momentum is divided by its sum."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.param_groups = [{"params": parameters, "momentum": 0.9}]

    def orthogonalize(
        self, p: torch.Tensor, grad: torch.Tensor, *, momentum: float
    ) -> torch.Tensor:
        assert momentum == 0.9
        return grad / grad.sum()


class Soap(TensorParallelMuon):
    """Another one."""


def weight(dim: int | None, *, experts: bool = False) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.arange(32.0).view(8, 4))
    parameter.tensor_model_parallel, parameter.partition_dim = dim is not None, dim
    parameter.allreduce = not experts
    return parameter


@pytest.mark.parametrize(
    ("dim", "experts", "stacked", "rows"),
    [
        (0, False, 1, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (0, False, 2, [[0, 1, 4, 5], [2, 3, 6, 7]]),
        (0, True, 1, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (None, False, 1, [[*range(8)]]),
    ],
)
def test_rows(dim: int | None, experts: bool, stacked: Shares, rows: list[list[int]]) -> None:
    """Those of a gated layer are from both of its halves."""
    parameter, mesh = weight(dim, experts=experts), mesh_of_blocks([2, 4])
    inner = TensorParallelMuon([parameter])
    place = place_of_part("a.weight", parameter, mesh, stacked)
    names = step_in_blocks(SimpleNamespace(optimizer=inner), [(parameter, place)], mesh)
    assert names == (("a.weight",) if len(rows) > 1 else ())
    momentum = torch.rand(8, 4)
    stepped = inner.orthogonalize(parameter, momentum, momentum=0.9)
    for part in rows:
        assert torch.equal(stepped[part], momentum[part] / momentum[part].sum())


def test_columns_and_others() -> None:
    """A matrix of another optimizer stays whole."""
    first, second, mesh = weight(1), weight(1), mesh_of_blocks([2, 1])
    inners = TensorParallelMuon([first]), Soap([second])
    leaves = [SimpleNamespace(optimizer=inner) for inner in inners]
    places = [(p, place_of_part("a.weight", p, mesh)) for p in (first, second)]
    names = step_in_blocks(SimpleNamespace(chained_optimizers=leaves), places, mesh)
    assert names == ("a.weight",)
    momentum = torch.rand(8, 4)
    left, right = momentum.split(2, dim=1)
    blocks = torch.cat([left / left.sum(), right / right.sum()], dim=1)
    torch.testing.assert_close(inners[0].orthogonalize(first, momentum, momentum=0.9), blocks)
    assert torch.equal(
        inners[1].orthogonalize(second, momentum, momentum=0.9), momentum / momentum.sum()
    )


@pytest.mark.parametrize("stacked", [1, 2])
def test_a_part_is_where_a_rank_has_it(stacked: Shares) -> None:
    """The same boxes as of a rank's own parameter."""
    whole, mesh = weight(0), mesh_of(1, 2, tp=2)
    own = torch.nn.Parameter(torch.zeros(4, 4))
    own.tensor_model_parallel, own.partition_dim = True, 0
    place = place_parameter("a.weight", own, mesh, stacked)
    assert place_of_part("a.weight", whole, mesh, stacked) == place
