# SPDX-License-Identifier: Apache-2.0
"""Groups are named by the axes that they span."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ttrace.mcore.groups import (
    axes_of,
    device_of,
    group_name,
    kept_in,
    reduced_in,
    unseen_axes,
)
from tests.placement.meshes import mesh_of

LAYOUT = {"tp": 2, "cp": 2, "pp": 2, "ep": 2, "etp": 1}
MESHES = [mesh_of(rank, 16, **LAYOUT) for rank in range(16)]


@pytest.mark.parametrize(
    ("description", "members", "name"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", (0, 1), "tp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", (0, 2, 4, 6), "dp-cp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_AG", (0, 2, 4, 6), "dp-cp"),
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", (0, 1), "ep"),
        ("EMBEDDING_GROUP", (0, 8), "embedding"),
        ("default_pg", tuple(range(16)), "world"),
        # A part of the data-parallel ranks.
        ("DATA_PARALLEL_GROUP_WITH_CP", (0, 2), ""),
        ("", (0, 1), ""),
        ("of another program", (0, 1), ""),
    ],
)
def test_description(description: str, members: tuple[int, ...], name: str) -> None:
    """Megatron's description, unless the group has other ranks; axes of size 1 are left out."""
    assert group_name(description, members, MESHES[0]) == name


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ((0, 1), "tp"),
        ((0, 2), "cp"),
        ((0, 1, 2, 3), "tp-cp"),
        ((0, 8), "pp"),
        ((0, 4), "dp"),
        ((0, 3), "ranks"),
        ((0, 1, 2), "ranks"),
    ],
)
def test_coordinates(members: tuple[int, ...], name: str) -> None:
    """Without a description: the axes along which the members differ, if they are all there."""
    assert axes_of(members, MESHES) == name


def test_a_part_of_an_axis() -> None:
    """Half of four data-parallel ranks, as an instance of the distributed optimizer."""
    meshes = [mesh_of(rank, 8, tp=2) for rank in range(8)]
    assert [axes_of(members, meshes) for members in ((0, 2), (0, 3))] == ["dp-part", "ranks"]


@pytest.mark.parametrize(
    ("overlap", "experts", "dispatcher", "axes"),
    [
        (False, None, "flex", ()),
        (True, None, "flex", ("tp",)),
        (False, 4, "alltoall", ()),
        (True, 4, "flex", ("tp", "etp", "ep")),
    ],
)
def test_unseen(overlap: bool, experts: int | None, dispatcher: str, axes: object) -> None:
    """Communication of other libraries."""
    args: Any = SimpleNamespace(
        tp_comm_overlap=overlap, num_experts=experts, moe_token_dispatcher_type=dispatcher
    )
    assert unseen_axes(args) == axes


FP32, BF16 = torch.float32, torch.bfloat16
FSDP = {"use_megatron_fsdp": True, "megatron_fsdp_main_grads_dtype": FP32}


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({"accumulate_allreduce_grads_in_fp32": True}, "float32"),
        ({"accumulate_allreduce_grads_in_fp32": False}, "bfloat16"),
        ({"use_torch_fsdp2": True, "accumulate_allreduce_grads_in_fp32": True}, ""),
        (FSDP, "float32"),
        ({**FSDP, "megatron_fsdp_grad_comm_dtype": BF16}, "bfloat16"),
        ({"use_megatron_fsdp": True, "accumulate_allreduce_grads_in_fp32": True}, ""),
    ],
)
def test_gradients(options: dict[str, object], gradients: str) -> None:
    """Of each kind of data parallelism; the compute dtype is the model's."""
    args: Any = SimpleNamespace(bf16=True, params_dtype=BF16, **options)
    assert reduced_in(args) == ("bfloat16", gradients)
    assert kept_in(args) == ("" if "use_megatron_fsdp" in options else gradients)


def test_single_precision() -> None:
    """Without a half precision, everything is in float32."""
    args: Any = SimpleNamespace(bf16=False, params_dtype=FP32)
    assert reduced_in(args) == ("float32", "float32")


def test_device_of_empty_stages(monkeypatch):
    """A chunk, or all of a rank's, may have no layer (``--pipeline-model-parallel-layout``)."""
    empty, full = torch.nn.Module(), torch.nn.Linear(1, 1, device="meta")
    assert device_of([empty, full]).type == "meta"
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor.to("meta"))
    assert device_of([empty]).type == "meta"
