# SPDX-License-Identifier: Apache-2.0
"""What the single-device reference makes of every option: keep it, reset it, or refuse the run.

Layout and overlap are reset as a whole, with what depends on them: Megatron refuses most of it on
one rank (megatron/training/arguments.py, ``validate_args``, and
megatron/core/transformer/transformer_config.py, ``__post_init__``). What defines the numbers stays.
"""

import copy
from types import MappingProxyType
from typing import Any

from megatron_ttrace.mcore.options.roles import RESETS, ROLES, Role

DERIVED = MappingProxyType({"virtual_pipeline_model_parallel_size": None, "cpu_offloading": False})
"""Attributes that no option sets and that a reference sets all the same."""

_RUNNING = (Role.OPERATION, Role.CHECKPOINT, Role.LENGTH)
_OF_REFERENCE = frozenset(
    """
    load pretrained_checkpoint save async_save exit_on_missing_checkpoint
    load_main_params_from_ckpt moe_use_upcycling ckpt_format rerun_mode
    """.split()
)
"""Options about loading and saving: runs of ours other than a reference do as the user's."""

QUIET = MappingProxyType(
    {
        name: value
        for name, value in RESETS.items()
        if ROLES[name] in _RUNNING or name in _OF_REFERENCE
    }
)
"""What the reference run must not do: write, log, stop early, load and save."""

SILENT = MappingProxyType({name: QUIET[name] for name in QUIET if name not in _OF_REFERENCE})
"""What no run of ours must do although the user's run does: write, log, stop early."""

SINGLE_DEVICE = MappingProxyType(
    {name: RESETS[name] for name in RESETS if name not in QUIET} | DERIVED
)
"""What a single device does not do."""

_REPORTING = ("tensorboard_dir", "wandb_exp_name", "wandb_project")
"""Options that say where the verdicts go."""

REFUSED = {
    "batch_size": "Megatron has removed it: give --micro-batch-size",
    "checkpoint_activations": "Megatron has removed it: give --recompute-granularity",
    "fake_process_group": "ranks exchange nothing, so nothing can be equal: omit it",
    "freeze_all_layers": "nothing is trained: check the same job without it",
    "model_parallel_size": "Megatron has removed it: give --tensor-model-parallel-size",
    "mtp_hsm": "every token draws the input of a prediction at random, and other ones in another "
    "layout: check the same job without it",
    "perform_rl_step": "a step trains on samples that the model generates before, and those "
    "differ between layouts: check the model with its pretraining script",
    "skip_train": "no step is trained: omit it",
    "warmup": "Megatron has removed it: give --lr-warmup-fraction",
    "yaml_cfg": "Megatron ignores all other arguments with it: give the file's values as arguments",
}
"""Options with which a run cannot be checked, and why."""

_NEEDING_THE_DISTRIBUTED_OPTIMIZER = ("fp8_param_gather", "use_precision_aware_optimizer")
"""Options of arithmetic that Megatron has only in its distributed optimizer (``validate_args``,
megatron/core/optimizer/optimizer_config.py)."""

SINGLE_DEVICE_VALUES = MappingProxyType(
    {
        # The flex dispatcher refuses a single rank. Both dispatch the same tokens.
        ("moe_token_dispatcher_type", "flex"): "alltoall",
        # Muon with layer-wise distribution over data-parallel ranks.
        ("optimizer", "dist_muon"): "muon",
    }
)
"""Values of kept options that are about the layout, and what a single device has instead."""

NARROW = frozenset(
    """
    bf16 fp16 fp16_lm_cross_entropy apply_query_key_layer_scaling grad_reduce_in_bf16
    use_precision_aware_optimizer main_grads_dtype main_params_dtype exp_avg_dtype exp_avg_sq_dtype
    loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis
    fp8 fp8_recipe fp8_param_gather fp4 fp4_recipe fp4_param_gather first_last_layers_bf16
    num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 moe_router_padding_for_fp8
    cross_entropy_loss_fusion cross_entropy_fusion_impl
    """.split()
)
"""Options that make a job compute in less than float32, or need another that does."""

AUXILIARY = frozenset({"moe_aux_loss_coeff", "moe_z_loss_coeff"})
"""Options of losses that are added to that of the tokens; without the option they are 0."""

APART = AUXILIARY | frozenset(
    """
    mtp_num_layers mtp_loss_scaling_factor
    moe_expert_capacity_factor moe_pad_expert_input_to_capacity
    reset_position_ids reset_attention_mask
    """.split()
)
"""Options that no model of ``transformers`` is compared with; nothing else depends on them."""

ALIASES = MappingProxyType(
    {
        "--apply-layernorm-1p": "layernorm_zero_centered_gamma",
        "--bert-no-binary-head": "bert_binary_head",
        "--ckpt-fully-parallel-save": "ckpt_fully_parallel_save_deprecated",
        "--cuda-graph-scope": "cuda_graph_scope_deprecated",
        "--disable-bias-linear": "add_bias_linear",
        "--disable-gloo-process-groups": "use_gloo_process_groups",
        "--disable-mamba-mem-eff-path": "use_mamba_mem_eff_path",
        "--disable-msc": "disable_msc_deprecated",
        "--dist-ckpt-format": "dist_ckpt_format_deprecated",
        "--fp4-format": "fp4",
        "--fp8-format": "fp8",
        "--inference-dynamic-batching-prefix-caching": (
            "inference_dynamic_batching_enable_prefix_caching"
        ),
        "--microbatch-group-size-per-virtual-pipeline-stage": "microbatch_group_size_per_vp_stage",
        "--muon-no-split-qkv": "muon_split_qkv",
        "--no-barrier-with-level-1-timing": "barrier_with_L1_time",
        "--no-inference-dynamic-batching-prefix-caching": (
            "inference_dynamic_batching_enable_prefix_caching"
        ),
        "--no-initialization": "perform_initialization",
        "--no-one-logger": "enable_one_logger",
        "--no-overlap-p2p-communication": "overlap_p2p_comm",
        "--no-position-embedding": "add_position_embedding",
        "--no-rope-fusion": "apply_rope_fusion",
        "--norm-epsilon": "layernorm_epsilon",
        "--overlap-p2p-communication-warmup-flush": "overlap_p2p_comm_warmup_flush",
        "--output-logit-dtype": "logit_dtype",
        "--persistent-save-interval": "save_interval",
        "--tokenizer-metadata": "metadata_path",
        "--tokenizer-special-tokens": "special_tokens",
        "--torch-fsdp2-no-reshard-after-forward": "torch_fsdp2_reshard_after_forward",
        "--use-dist-ckpt": "use_dist_ckpt_deprecated",
        "--use-mcore-models": "deprecated_use_mcore_models",
        "--use-nccl-ub": "nccl_ub",
        "--use-same-sampling-seed-across-dp-ranks": "offset_sampling_seed_by_dp_rank",
    }
)
"""Flags that are not named like the option they set, ``--no-X`` and ``--disable-X`` apart."""


def option_of(flag: str) -> str | None:
    """The option that a flag of the command line sets, or ``None`` if no release has it."""
    if flag in ALIASES:
        return ALIASES[flag]
    name = flag.removeprefix("--").replace("-", "_")
    for prefix in ("", "no_", "disable_"):
        if name.startswith(prefix) and name.removeprefix(prefix) in ROLES:
            return name.removeprefix(prefix)
    return None


def silence(args: object, *, reports: bool) -> None:
    """Switch off what would write for the user, log or stop a run of ours, before validation.

    A run that ``reports`` is a check: its verdicts are logged with the user's options, and it loads
    what the user's run would load.
    """
    for name, value in SILENT.items():
        is_used = reports and (name in _REPORTING or ROLES[name] is Role.CHECKPOINT)
        if hasattr(args, name) and not is_used:
            setattr(args, name, copy.copy(value))


def refusals(args: object) -> list[str]:
    """Why a run with these arguments cannot be checked, one line per option that is there."""
    return [
        f"{option} = {getattr(args, option)}: {why}"
        for option, why in REFUSED.items()
        if getattr(args, option, None)
    ]


def derive(args: object) -> dict[str, Any]:
    """The values that a reference of these arguments, not yet validated, has instead of them."""
    values: dict[str, Any] = {**SINGLE_DEVICE, **QUIET}
    if getattr(args, "ckpt_format", None) == "torch":
        values["ckpt_format"] = "torch"  # pretrain_vlm.py has no other; nothing is written
    if any(getattr(args, name, False) for name in _NEEDING_THE_DISTRIBUTED_OPTIMIZER):
        values["use_distributed_optimizer"] = True
    if getattr(args, "optimizer_cpu_offload", False):
        # Its optimizers are made without these options.
        dtypes = "exp_avg_dtype", "exp_avg_sq_dtype", "main_params_dtype"
        values |= dict.fromkeys(dtypes, "fp32")
    if getattr(args, "use_torch_fsdp2", False) and getattr(args, "bf16", False):
        # What it does to gradients: it has no buffers of another precision for them.
        values["grad_reduce_in_bf16"] = True
    for (name, value), instead in SINGLE_DEVICE_VALUES.items():
        if getattr(args, name, None) == value:
            values[name] = instead
    return {name: copy.copy(value) for name, value in values.items()}
