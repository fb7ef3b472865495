# SPDX-License-Identifier: Apache-2.0
"""Where a rank is among all ranks; Megatron's process groups, and what they exchange."""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.placement.mesh import DENSE, EXPERT, Axes, Mesh

_DESCRIBED = {
    "TENSOR_MODEL_PARALLEL": ("tp",),
    "TENSOR_AND_CONTEXT_PARALLEL": ("tp", "cp"),
    "TENSOR_AND_DATA_PARALLEL": ("tp", "dp"),
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": ("tp", "dp", "cp"),
    "CONTEXT_PARALLEL": ("cp",),
    "DATA_PARALLEL": ("dp",),
    "DATA_PARALLEL_GROUP_WITH_CP": ("dp", "cp"),
    "PIPELINE_MODEL_PARALLEL": ("pp",),
    "MODEL_PARALLEL": ("tp", "pp"),
    "EXPERT_MODEL_PARALLEL": ("ep",),
    "EXPERT_TENSOR_PARALLEL": ("etp",),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL": ("etp", "ep"),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL": ("etp", "ep", "pp"),
    "EXPERT_DATA_PARALLEL": ("edp",),
}
"""``group_desc`` of the groups of megatron/core/parallel_state.py, without its ending."""

_EMBEDDINGS = {"EMBEDDING": "embedding", "POSITION_EMBEDDING": "position-embedding"}
"""Groups of the first and the last pipeline stage."""


def group_name(description: str, members: Sequence[int], mesh: Mesh) -> str:
    """``tp``, ``dp-cp``, ``embedding``, ``world``: from a group's description; empty if unknown.

    Axes of size 1 are left out. A group over a part of an axis has no name of its own.
    """
    plain = description.removesuffix("_AG").removesuffix("_GLOO")
    words = plain.removesuffix("_GROUP")
    if words in _EMBEDDINGS:
        return _EMBEDDINGS[words]
    if description == "default_pg":
        return "world"
    axes = _DESCRIBED.get(words, ())
    if len(members) != math.prod(mesh.size(axis) for axis in axes):
        return ""
    return "-".join(axis for axis in axes if mesh.size(axis) > 1)


def described(group: Any, mesh: Mesh) -> str:
    """The axes of more than one rank that a process group spans, or its description."""
    import torch.distributed as dist

    description = group.group_desc or ""
    return group_name(description, dist.get_process_group_ranks(group), mesh) or description


def axes_of(members: Sequence[int], meshes: Sequence[Mesh]) -> str:
    """The axes that a group of global ranks spans; ``dp-part`` if only a part of one.

    ``ranks`` if it is neither.
    """
    spanned = []
    for layout in (DENSE, EXPERT):
        axes = [a for a in layout if len({meshes[rank].at(a) for rank in members}) > 1]
        if axes and len(members) == math.prod(meshes[0].size(axis) for axis in axes):
            return "-".join(axes)
        spanned.append(axes)
    return f"{spanned[0][0]}-part" if len(spanned[0]) == 1 else "ranks"


def unseen_axes(args: MegatronArguments) -> tuple[str, ...]:
    """Axes over which a run communicates outside of PyTorch's process groups.

    TransformerEngine's user buffers overlap tensor-parallel communication with products. The
    ``flex`` dispatcher has libraries of its own (megatron/core/transformer/moe/fused_a2a.py).
    """
    overlaps = bool(getattr(args, "tp_comm_overlap", False))
    flex = bool(args.num_experts) and args.moe_token_dispatcher_type == "flex"  # noqa: S105
    return ("tp",) * overlaps + ("etp", "ep") * flex


_COORDINATES = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "pp": "pipeline_model_parallel",
    "ep": "expert_model_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
    "edp": "expert_data_parallel",
}


def current_mesh(args: MegatronArguments) -> Mesh:
    """Read the initialised ``megatron.core.parallel_state``."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    def axes(value: str) -> Axes:
        return Axes(
            **{axis: getattr(mpu, f"get_{name}_{value}")() for axis, name in _COORDINATES.items()}
        )

    return Mesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        sizes=axes("world_size"),
        coordinates=axes("rank"),
        vpp=args.virtual_pipeline_model_parallel_size or 1,
    )


def of_tensor_parallel_ranks(value: list[float]) -> list[list[float]]:
    """What each tensor-parallel rank has. A collective of them, on CPUs."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    group = mpu.get_tensor_model_parallel_group()
    values: list[list[float]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def device_of(chunks: Iterable[torch.nn.Module]) -> torch.device:
    """The device of a rank, by its model chunks: a pipeline stage may be empty."""
    parameters = itertools.chain.from_iterable(chunk.parameters() for chunk in chunks)
    first = next(parameters, None)
    # Without a GPU this moves nothing (cpu/devices.py).
    return torch.empty(0).cuda().device if first is None else first.device


def reduced_in(args: MegatronArguments) -> tuple[str, str]:
    """Dtype of activations, and that of the reduction of gradients; empty if it is left open.

    ``grad_reduce_in_fp32`` of Megatron's data parallel wrapper is
    ``accumulate_allreduce_grads_in_fp32`` (megatron/training/training.py); Megatron-FSDP has dtypes
    of its own, and PyTorch's FSDP reduces in the model's dtype.
    """
    compute = torch.bfloat16 if args.bf16 else args.params_dtype
    gradients: torch.dtype | None = compute
    if getattr(args, "use_torch_fsdp2", False):
        gradients = None
    elif getattr(args, "use_megatron_fsdp", False):
        names = "megatron_fsdp_grad_comm_dtype", "megatron_fsdp_main_grads_dtype"
        dtypes = (getattr(args, name, None) for name in names)
        gradients = next((dtype for dtype in dtypes if isinstance(dtype, torch.dtype)), None)
    elif getattr(args, "accumulate_allreduce_grads_in_fp32", False):
        gradients = torch.float32
    return str(compute).removeprefix("torch."), str(gradients or "").removeprefix("torch.")


def kept_in(args: MegatronArguments) -> str:
    """Dtype of the gradients that an optimizer is given; empty if it is left open.

    Megatron-FSDP may keep them in another one than it reduces them in.
    """
    return "" if getattr(args, "use_megatron_fsdp", False) else reduced_in(args)[1]
