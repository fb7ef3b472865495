# SPDX-License-Identifier: Apache-2.0
"""What the single-device reference makes of every option: keep it, reset it, or refuse the run.

Layout and overlap are reset as a whole, with what depends on them: Megatron refuses most of it on
one rank (megatron/training/arguments.py, ``validate_args``, and
megatron/core/transformer/transformer_config.py, ``__post_init__``). What defines the numbers stays.
"""

import copy
import dataclasses
import enum
from types import MappingProxyType
from typing import Any

from megatron_ttrace.mcore.options.roles import ROLES, Role


class Action(enum.Enum):
    """What a reference does with an option."""

    KEEP = "keep"
    RESET = "reset"
    REFUSE = "refuse"


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """What becomes of an option.

    Attributes:
        role: what it is about.
        action: what a reference does with it.
        value: what it is reset to.
        why: why a run with it is refused; otherwise empty.
    """

    role: Role
    action: Action
    value: Any = None
    why: str = ""


def _of(value: Any, names: str) -> dict[str, Any]:
    return {name: copy.copy(value) for name in names.split()}


_LAYOUT: dict[str, Any] = {
    **_of(
        False,
        """
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split
        cpu_offloading_retain_pinned_cpu_buffers create_all_gather_group ddp_average_in_collective
        ddp_pad_buckets_for_high_nccl_busbw ddp_reduce_scatter_with_fp32_accumulation
        defer_embedding_wgrad_compute delay_offload_until_cuda_graph delay_wgrad_compute
        distribute_saved_activations enable_cuda_graph enable_full_sharding_in_hsdp
        ep_overlap_early_attn_memory_release external_cuda_graph fine_grained_activation_offloading
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration
        gtp_remat_reduce_scatter_with_fp32_accumulation hybrid_context_parallel
        init_model_with_meta_device keep_fp8_transpose_cache
        megatron_fsdp_enable_fine_grained_param_gather megatron_fsdp_max_pool_double_buffer
        moe_enable_deepep moe_layer_recompute moe_paged_stash moe_permute_fusion_into_hybridep
        mtp_standalone optimizer_cpu_offload optimizer_cuda_graph
        overlap_cpu_optimizer_d2h_h2d overlap_dispatch_backward_with_experts_wgrad
        overlap_grad_reduce overlap_moe_expert_parallel_comm overlap_p2p_comm
        overlap_p2p_comm_warmup_flush overlap_param_gather
        overlap_param_gather_with_optimizer_step recompute_activations
        reuse_grad_buf_for_mxfp8_param_ag sequence_parallel tp_comm_overlap tp_comm_overlap_rs_dgrad
        use_distributed_optimizer use_megatron_fsdp use_torch_fsdp2 use_tp_pp_dp_mapping
        """,
    ),
    **_of(
        True,
        """
        align_grad_reduce align_param_gather gradient_reduce_div_fusion pin_cpu_grads pin_cpu_params
        torch_fsdp2_reshard_after_forward tp_comm_bulk_dgrad
        tp_comm_bulk_wgrad tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_split_ag tp_comm_split_rs
        use_layer_wise_param_layout
        """,
    ),
    **_of(
        None,
        """
        cuda_graph_scope_deprecated ddp_bucket_size ddp_num_buckets
        fine_grained_offloading_max_inflight_offloads recompute_granularity recompute_method
        recompute_modules suggested_communication_unit_size
        """,
    ),
    **_of([], "cuda_graph_modules gtp_remat_opt_in_modules offload_modules"),
    **_of([], "ddp_param_name_patterns_for_fp32_local_accumulation"),
    **_of("no_shard", "data_parallel_sharding_strategy outer_dp_sharding_strategy"),
    **_of(1.0, "activation_offload_fraction optimizer_offload_fraction"),
    **_of(0, "delta_offload_bytes_across_pp_ranks wgrad_deferral_limit"),
    "cp_comm_type": ["p2p"],
    "cuda_graph_impl": "none",
    "cuda_graph_warmup_steps": 3,
    "gdp_num_chunk_states_to_recompute": 2,
    "megatron_fsdp_version": 1,
    "min_offloaded_tensor_size": 1 << 20,
    "mlp_chunks_for_training": 1,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_paged_stash_buffer_size_factor_cpu": 0.0,
    "moe_paged_stash_buffer_size_factor_cuda": 1.1,
    "moe_paged_stash_page_size": 64,
}

_AXES: dict[str, Any] = {
    **_of(
        1,
        """
        context_parallel_size expert_model_parallel_size expert_tensor_parallel_size
        num_distributed_optimizer_instances pipeline_model_parallel_size tensor_model_parallel_size
        """,
    ),
    **_of(
        None,
        """
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers
        expert_tensor_parallel_num_weight_shards hierarchical_context_parallel_sizes
        max_seqlen_per_dp_cp_rank mhc_recompute_layer_num microbatch_group_size_per_vp_stage
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        pipeline_model_parallel_layout recompute_num_layers tensor_parallel_num_weight_shards
        """,
    ),
    "cpu_offloading_num_layers": 0,
}

_TRANSPORT: dict[str, Any] = {
    **_of(
        None,
        """
        nccl_communicator_config_path pipeline_model_parallel_comm_backend sharp_enabled_group
        symmetric_ar_type tp_comm_overlap_cfg
        """,
    ),
    **_of(
        False,
        """
        disable_symmetric_registration gtp_expert_remat_nccl_ub gtp_remat_nccl_ub nccl_ub
        use_ring_exchange_p2p use_sharp
        """,
    ),
    **_of("bf16", "moe_combine_bwd_dtype moe_dispatch_fwd_dtype"),
    "high_priority_stream_groups": [],
}

DERIVED = MappingProxyType({"virtual_pipeline_model_parallel_size": None, "cpu_offloading": False})
"""Attributes that no option sets and that a reference sets all the same."""

SINGLE_DEVICE = MappingProxyType({**_AXES, **_LAYOUT, **_TRANSPORT, **DERIVED})
"""What a single device does not do."""

SILENT = MappingProxyType(
    {
        **_of(
            None,
            """
            check_weight_hash_across_dp_replicas_interval ckpt_convert_format
            ckpt_pg_tensors_cache_path
            dump_param_to_param_group_map exit_duration_in_mins exit_interval
            fault_injector_num_ranks fault_injector_ranks flight_recorder_dump_path
            gpu_sniff_test_interval logits_save_dir moe_routing_trace_path
            non_persistent_ckpt_type non_persistent_save_interval result_rejected_tracker_filename
            save_activations_interval save_dgrads_interval save_params_interval
            save_tokens_per_expert_interval save_wgrads_interval tensorboard_dir
            """,
        ),
        **_of(
            False,
            """
            adlr_autoresume calc_ft_timeouts ckpt_pg_tensors_cache_create enable_ft_package
            enable_one_logger exit_signal_handler inprocess_restart log_progress log_straggler
            otel_enabled profile record_memory_history replication run_workload_inspector_server
            use_pytorch_profiler
            """,
        ),
        **_of("", "config_logger_dir wandb_exp_name wandb_project"),
        "error_injection_rate": 0,
    }
)
"""What a run of ours must not do although the user's run does: write, log, stop early."""

QUIET = MappingProxyType(
    {
        **SILENT,
        **_of(None, "load pretrained_checkpoint save"),
        **_of(
            False,
            """
            async_save exit_on_missing_checkpoint load_main_params_from_ckpt moe_use_upcycling
            """,
        ),
        # That of Megatron-FSDP is refused without it.
        "ckpt_format": "torch_dist",
        "rerun_mode": "disabled",
    }
)
"""What the reference run must not do: that, load and save."""

_REPORTING = ("tensorboard_dir", "wandb_exp_name", "wandb_project")
"""Options that say where the verdicts go."""

_REFUSED = {
    "batch_size": "Megatron has removed it: give --micro-batch-size",
    "checkpoint_activations": "Megatron has removed it: give --recompute-granularity",
    "fake_process_group": "ranks exchange nothing, so nothing can be equal: omit it",
    "model_parallel_size": "Megatron has removed it: give --tensor-model-parallel-size",
    "mtp_hsm": "every token draws the input of a prediction at random, and other ones in another "
    "layout: check the same job without it",
    "perform_rl_step": "a step trains on samples that the model generates before, and those "
    "differ between layouts: check the model with its pretraining script",
    "skip_train": "no step is trained: omit it",
    "warmup": "Megatron has removed it: give --lr-warmup-fraction",
    "yaml_cfg": "Megatron ignores all other arguments with it: give the file's values as arguments",
}

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


def decision(option: str) -> Decision | None:
    """What becomes of an option; ``None`` for one that no known release registers."""
    role = ROLES.get(option)
    if role is None:
        return None
    if option in _REFUSED:
        return Decision(role, Action.REFUSE, why=_REFUSED[option])
    for values in (SINGLE_DEVICE, QUIET):
        if option in values:
            return Decision(role, Action.RESET, values[option])
    return Decision(role, Action.KEEP)


def silence(args: object, *, reports: bool) -> None:
    """Switch off what would write for the user, log or stop a run of ours, before validation.

    Args:
        args: as parsed.
        reports: whether the run is a check: its verdicts are logged with the user's options, and it
            loads what the user's run would load.
    """
    for name, value in SILENT.items():
        is_used = reports and (name in _REPORTING or ROLES[name] is Role.CHECKPOINT)
        if hasattr(args, name) and not is_used:
            setattr(args, name, copy.copy(value))


def refusals(args: object) -> list[str]:
    """Why a run with these arguments cannot be checked, one line per option that is there."""
    return [
        f"{option} = {getattr(args, option)}: {why}"
        for option, why in _REFUSED.items()
        if getattr(args, option, None)
    ]


def derive(args: object) -> dict[str, Any]:
    """The values that a reference of these arguments has instead of them.

    Args:
        args: as parsed, before Megatron validates them.
    """
    values: dict[str, Any] = {**SINGLE_DEVICE, **QUIET}
    if getattr(args, "ckpt_format", None) == "torch":
        values["ckpt_format"] = "torch"  # pretrain_vlm.py has no other; nothing is written
    if any(getattr(args, name, False) for name in _NEEDING_THE_DISTRIBUTED_OPTIMIZER):
        values["use_distributed_optimizer"] = True
    if getattr(args, "optimizer_cpu_offload", False):
        # Its optimizers are made without these options.
        values |= _of("fp32", "exp_avg_dtype exp_avg_sq_dtype main_params_dtype")
    if getattr(args, "use_torch_fsdp2", False) and getattr(args, "bf16", False):
        # What it does to gradients: it has no buffers of another precision for them.
        values["grad_reduce_in_bf16"] = True
    for (name, value), instead in SINGLE_DEVICE_VALUES.items():
        if getattr(args, name, None) == value:
            values[name] = instead
    return {name: copy.copy(value) for name, value in values.items()}
