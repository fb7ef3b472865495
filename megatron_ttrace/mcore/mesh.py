# SPDX-License-Identifier: Apache-2.0
"""This rank's coordinates, from Megatron's ``parallel_state``."""

from __future__ import annotations

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.placement.mesh import Axes, Mesh

_GROUPS = {
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

    def axes(what: str) -> Axes:
        found = {axis: getattr(mpu, f"get_{name}_{what}")() for axis, name in _GROUPS.items()}
        return Axes(**found)

    return Mesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        sizes=axes("world_size"),
        coordinates=axes("rank"),
        vpp=args.virtual_pipeline_model_parallel_size or 1,
    )
