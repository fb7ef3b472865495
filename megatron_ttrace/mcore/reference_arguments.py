# SPDX-License-Identifier: Apache-2.0
"""From the candidate's arguments to those of its single-device reference.

Everything that spreads the model or reorders work is reset; everything that defines the numbers
(model, data, optimizer, precision) stays. Two values must be carried over explicitly, because
Megatron derives them from the layout: the global batch size (default: micro batch times data
parallel size) and the padded vocabulary (a multiple of ``--make-vocab-size-divisible-by`` times the
tensor parallel size, megatron/training/vocab_utils.py).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.flags import Settings

SINGLE_DEVICE: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "hierarchical_context_parallel_sizes": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "virtual_pipeline_model_parallel_size": None,
    "pipeline_model_parallel_layout": None,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "account_for_embedding_in_pipeline_split": False,
    "account_for_loss_in_pipeline_split": False,
    "overlap_p2p_comm": False,
    "sequence_parallel": False,
    "use_distributed_optimizer": False,
    "use_megatron_fsdp": False,
    "data_parallel_sharding_strategy": "no_shard",
    # The one of Megatron-FSDP is refused without it; the reference writes no checkpoint.
    "ckpt_format": "torch_dist",
    "use_torch_fsdp2": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    "overlap_param_gather_with_optimizer_step": False,
    "num_distributed_optimizer_instances": 1,
    "tp_comm_overlap": False,
    "recompute_granularity": None,
    "recompute_method": None,
    "recompute_num_layers": None,
    "recompute_activations": False,
    "recompute_modules": None,
    "distribute_saved_activations": False,
    "cpu_offloading": False,
}
"""What a single device does not do. Names an older Megatron lacks are left out."""

QUIET: dict[str, Any] = {
    "save": None,
    "load": None,
    "tensorboard_dir": None,
    "wandb_project": "",
    "wandb_exp_name": "",
    "exit_interval": None,
    "exit_signal_handler": False,
    "profile": False,
    "rerun_mode": "disabled",
    "log_progress": False,
}
"""What the reference run must not do although the user's run does: write, log, stop early."""


def overrides_of(args: MegatronArguments) -> dict[str, Any]:
    """The values a reference must take over from a *validated* candidate."""
    return {
        "global_batch_size": args.global_batch_size,
        "make_vocab_size_divisible_by": args.make_vocab_size_divisible_by
        * args.tensor_model_parallel_size,
    }


def apply(args: argparse.Namespace, settings: Settings) -> None:
    """Turn a parsed command line into the reference's, before Megatron validates it.

    Raises:
        TTraceError: when the overrides file is unreadable.
    """
    own: dict[str, Any] = {}
    if settings.overrides is not None:
        own = read_overrides(settings.overrides)
    chosen = explicit(settings.reference_args)
    for name, value in {**SINGLE_DEVICE, **QUIET, **own}.items():
        if hasattr(args, name) and name not in chosen:
            setattr(args, name, value)
    pattern = getattr(args, "hybrid_layer_pattern", None)
    if pattern and "hybrid_layer_pattern" not in chosen:
        # Where pipeline stages end (``Symbols.PIPE``, hybrid_layer_allocation.py).
        args.hybrid_layer_pattern = pattern.replace("|", "")


def explicit(reference_args: str) -> set[str]:
    """Names of the arguments that ``--ttrace-reference-args`` sets; they win over the derived."""
    return {
        word.split("=")[0].removeprefix("--").replace("-", "_")
        for word in reference_args.split()
        if word.startswith("--")
    }


def read_overrides(path: Path) -> dict[str, Any]:
    """The overrides written for a reference run."""
    try:
        values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["overrides"]
    except (OSError, ValueError, KeyError) as error:
        raise TTraceError(f"{path} cannot be read: {error}") from error
    return values
