# SPDX-License-Identifier: Apache-2.0
"""The dtypes that a run's settings ask for in its collectives."""

from __future__ import annotations

import torch

from megatron_ttrace.mcore.arguments import MegatronArguments


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
        asked = (getattr(args, name, None) for name in names)
        gradients = next((one for one in asked if isinstance(one, torch.dtype)), None)
    elif getattr(args, "accumulate_allreduce_grads_in_fp32", False):
        gradients = torch.float32
    return _name(compute), _name(gradients)


def _name(dtype: torch.dtype | None) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")
