# SPDX-License-Identifier: Apache-2.0
"""This rank's coordinates, as Megatron's own ``parallel_state`` has them."""

from __future__ import annotations

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.placement.mesh import Axes, Mesh


def current_mesh(args: MegatronArguments) -> Mesh:
    """Read the initialised ``megatron.core.parallel_state``."""
    import torch.distributed as dist
    from megatron.core import parallel_state as mpu

    return Mesh(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        sizes=Axes(
            tp=mpu.get_tensor_model_parallel_world_size(),
            cp=mpu.get_context_parallel_world_size(),
            pp=mpu.get_pipeline_model_parallel_world_size(),
            ep=mpu.get_expert_model_parallel_world_size(),
            etp=mpu.get_expert_tensor_parallel_world_size(),
            dp=mpu.get_data_parallel_world_size(),
            edp=mpu.get_expert_data_parallel_world_size(),
        ),
        coordinates=Axes(
            tp=mpu.get_tensor_model_parallel_rank(),
            cp=mpu.get_context_parallel_rank(),
            pp=mpu.get_pipeline_model_parallel_rank(),
            ep=mpu.get_expert_model_parallel_rank(),
            etp=mpu.get_expert_tensor_parallel_rank(),
            dp=mpu.get_data_parallel_rank(),
            edp=mpu.get_expert_data_parallel_rank(),
        ),
        vpp=args.virtual_pipeline_model_parallel_size or 1,
    )
