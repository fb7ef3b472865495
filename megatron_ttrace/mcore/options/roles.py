# SPDX-License-Identifier: Apache-2.0
"""What every option of a known Megatron (``versions.KNOWN``) is about.

Options are named as attributes of Megatron's parsed arguments. A release that registers an option
without a role fails ``tests/mcore/options/test_decisions.py``.
"""

import enum
from types import MappingProxyType


class Role(enum.Enum):
    """What an option is about."""

    CODE = "decides which code runs, or what it computes"
    DATA = "decides what becomes of the data"
    SIZE = "decides how much is computed"
    AXIS = "decides how many ranks, stages or layers a part of the layout spans"
    LAYOUT = "decides how work is spread, overlapped, recomputed or stored"
    TRANSPORT = "decides how ranks exchange bytes"
    LENGTH = "decides how long the run is"
    INPUT = "names data or a tokenizer"
    CHECKPOINT = "is about checkpoints"
    OPERATION = "logs, profiles or supervises the run"
    FOREIGN = "belongs to another program than pretraining"
    REFUSED = "cannot be checked"


# "name:0" is a switch, "name:3" has three values, "name:+" as many as follow, and others have one.
# With moe_shared_expert_overlap the shared experts' own forward is not called: other modules have
# inputs then, so it is code and not layout.
_NAMES = {
    Role.CODE: """
        accumulate_allreduce_grads_in_fp32:0 activation_func_clamp_value adam_beta1 adam_beta2
        adam_eps add_bias_linear:0 add_position_embedding:0 add_qkv_bias:0
        apply_query_key_layer_scaling:0 apply_residual_connection_post_layernorm:0
        apply_rope_fusion:0 apply_wd_to_qk_layernorm:0 attention_backend attention_dropout
        attention_output_gate:0 attention_softmax_in_fp32:0 batch_invariant_backend
        batch_invariant_mode:0 bf16:0 bias_dropout_fusion:0 bias_gelu_fusion:0
        bias_swiglu_fusion:0 calculate_per_token_loss:0 check_for_nan_in_loss_and_grad:0 clip_grad
        clone_scatter_output_in_embedding:0 cross_entropy_fusion_impl cross_entropy_loss_fusion:0
        data_parallel_random_init:0 decoupled_lr decoupled_min_lr deprecated_use_mcore_models:0
        deterministic_mode:0 disable_bf16_reduced_precision_matmul:0 disable_jit_fuser:0
        dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32:0 dsa_indexer_loss_coeff
        dsa_indexer_rope_interleaved:0 dsa_indexer_rotate_activation:0 dsa_indexer_scoring_relu:0
        dsa_indexer_skip_topk_offset dsa_indexer_topk_freq dsa_indexer_use_sparse_loss:0
        dsa_kernel_backend embedding_init_method_std enable_experimental:0
        enable_mhc_connections:0 end_weight_decay exp_avg_dtype exp_avg_sq_dtype
        experimental_attention_variant flash_attention_version fp16:0 fp16_lm_cross_entropy:0
        fp32_residual_connection:0 fp4 fp4_param_gather:0 fp4_quantizer_factory fp4_recipe fp8
        fp8_amax_compute_algo fp8_amax_history_len fp8_interval fp8_margin fp8_output_proj:0
        fp8_param_gather:0 fp8_quantizer_factory fp8_recipe fp8_wgrad:0 freeze_all_layers:0
        fused_residual_rmsnorm:0 gdp_cutedsl_kernel:0 glu_linear_offset grad_reduce_in_bf16:0
        gradient_accumulation_fusion:0 group_query_attention:0 hidden_dropout hysteresis
        init_method_std init_method_xavier_uniform:0 initial_loss_scale is_hybrid_model:0
        kitchen_attention_backend layernorm_epsilon layernorm_zero_centered_gamma:0
        lazy_mpu_init:0 linear_conv_kernel_dim lion_beta1 lion_beta2 logit_dtype loss_scale
        loss_scale_window lr lr_decay_style lr_wsd_decay_style main_grads_dtype main_params_dtype
        mamba_training_ssm_states_dtype masked_softmax_fusion:0 megatron_fsdp_grad_comm_dtype
        megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype mhc_init_gating_factor
        mhc_sinkhorn_iterations min_loss_scale min_lr mla_down_proj_fusion:0
        moe_apply_probs_on_input:0 moe_aux_loss_coeff:+ moe_enable_routing_replay:0
        moe_expert_capacity_factor moe_expert_rank_capacity_factor moe_grouped_gemm:0
        moe_input_jitter_eps moe_mlp_glu_interleave_size moe_pad_expert_input_to_capacity:0
        moe_permute_fusion:0 moe_router_bias_update_rate moe_router_dtype
        moe_router_enable_expert_bias:0 moe_router_force_biased moe_router_force_load_balancing:0
        moe_router_fusion:0 moe_router_load_balancing_type:+ moe_router_padding_for_fp8:0
        moe_router_padding_for_quantization:0 moe_router_pre_softmax:0
        moe_router_quantile_balancing_ema moe_router_score_function moe_router_topk_scaling_factor
        moe_shared_expert_gate:0 moe_shared_expert_glu_interleave_size moe_shared_expert_overlap:0
        moe_single_grouped_bias:0 moe_single_grouped_weight:0 moe_token_dispatcher_type
        moe_token_drop_policy moe_use_grouped_tensor:0 moe_z_loss_coeff mscale mscale_all_dim
        mtp_detach_heads:0 mtp_loss_scaling_factor mtp_use_repeated_layer:0
        multi_latent_attention:0 muon_coefficient_type muon_extra_scale_factor
        muon_fp32_matmul_prec muon_momentum muon_nesterov:0 muon_num_ns_steps
        muon_scalar_optimizer muon_scale_mode muon_split_qkv:0 muon_tp_mode muon_use_syrk:0
        mup_attn_scale_power mup_embedding_mult mup_output_mult mup_width_mult
        no_persist_layer_norm:0 no_weight_decay_cond_type normalization onnx_safe openai_gelu:0
        optimizer perform_initialization:0 position_embedding_type qk_clip:0 qk_clip_alpha
        qk_clip_threshold qk_l2_norm:0 qk_layernorm:0 quick_geglu:0
        relative_attention_max_distance relative_attention_num_buckets rope_scaling_factor
        rope_type rotary_base rotary_interleaved:0 rotary_percent rotary_scaling_factor
        rotary_seq_len_interpolation_factor seed sgd_momentum softmax_type spec:+ squared_relu:0
        start_weight_decay swiglu:0 te_precision_config_file te_rng_tracker:0 transformer_impl
        untie_embeddings_and_output_weights:0 use_cpu_initialization:0 use_flash_attn:0
        use_fused_weighted_squared_relu:0 use_grouped_gemm_for_dense_mlp:0
        use_grouped_gemm_for_shared_expert:0 use_kitchen_attention:0 use_mamba_mem_eff_path:0
        use_mup:0 use_precision_aware_optimizer:0 use_rope_scaling:0
        use_rotary_position_embeddings:0 use_te_activation_func:0
        use_torch_optimizer_for_cpu_offload:0 use_transformer_engine_op_fuser:0 weight_decay
        weight_decay_incr_style yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int:0
    """,
    Role.DATA: """
        allow_ambiguous_pad_tokens:0 create_attention_mask_in_dataloader:0
        dataloader_inter_document_masking:0 dataloader_type eod_mask_loss:0 fim_data:0
        fim_eod_token fim_fragment_rate fim_middle_token fim_no_prefix fim_pad_token
        fim_prefix_token fim_rate fim_split_sample fim_spm_rate fim_suffix_token
        iterations_to_skip:+ mid_level_dataset_surplus mock_data:0 num_dataset_builder_threads
        num_workers phase_transition_iterations reset_attention_mask:0 reset_position_ids:0 sft:0
        sft_tokenizer_prompt_format
    """,
    Role.SIZE: """
        decoder_num_layers decoder_seq_length dsa_indexer_head_dim dsa_indexer_n_heads
        dsa_indexer_topk encoder_num_layers encoder_seq_length ffn_hidden_size
        first_last_layers_bf16:0 gdp_num_householder global_batch_size
        heterogeneous_layers_config_encoded_json heterogeneous_layers_config_path hidden_size
        hybrid_layer_pattern hybrid_override_pattern kv_channels kv_lora_rank
        linear_attention_freq linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim make_vocab_size_divisible_by mamba_head_dim mamba_num_groups
        mamba_num_heads mamba_state_dim max_position_embeddings mhc_num_residual_streams
        micro_batch_size moe_ffn_hidden_size moe_latent_size moe_layer_freq moe_router_group_topk
        moe_router_num_groups moe_router_topk moe_shared_expert_intermediate_size mrope_section:+
        mtp_hybrid_override_pattern mtp_num_layers mup_base_head_dim mup_base_hidden_size
        no_rope_freq num_attention_heads num_experts num_layers num_layers_at_end_in_bf16
        num_layers_at_start_in_bf16 num_query_groups pad_vocab_size:0 padded_vocab_size
        q_lora_rank qk_head_dim qk_pos_emb_head_dim rampup_batch_size:3 seq_length
        step_batch_size_schedule v_head_dim vocab_extra_ids vocab_size window_attn_skip_freq
        window_size yarn_original_max_position_embeddings
    """,
    Role.AXIS: """
        context_parallel_size cpu_offloading_num_layers decoder_first_pipeline_num_layers
        decoder_last_pipeline_num_layers expert_model_parallel_size
        expert_tensor_parallel_num_weight_shards expert_tensor_parallel_size
        hierarchical_context_parallel_sizes:+ max_seqlen_per_dp_cp_rank mhc_recompute_layer_num
        microbatch_group_size_per_vp_stage num_distributed_optimizer_instances
        num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        pipeline_model_parallel_layout pipeline_model_parallel_size recompute_num_layers
        tensor_model_parallel_size tensor_parallel_num_weight_shards
    """,
    Role.LAYOUT: """
        account_for_embedding_in_pipeline_split:0 account_for_loss_in_pipeline_split:0
        activation_offload_fraction align_grad_reduce:0 align_param_gather:0 ckpt_format
        cp_comm_type:+ cpu_offloading_retain_pinned_cpu_buffers:0 create_all_gather_group:0
        cuda_graph_impl cuda_graph_modules:+ cuda_graph_scope_deprecated:+ cuda_graph_warmup_steps
        data_parallel_sharding_strategy ddp_average_in_collective:0 ddp_bucket_size
        ddp_num_buckets ddp_pad_buckets_for_high_nccl_busbw:0
        ddp_param_name_patterns_for_fp32_local_accumulation:+
        ddp_reduce_scatter_with_fp32_accumulation:0 defer_embedding_wgrad_compute:0
        delay_offload_until_cuda_graph:0 delay_wgrad_compute:0 delta_offload_bytes_across_pp_ranks
        distribute_saved_activations:0 enable_cuda_graph:0 enable_full_sharding_in_hsdp:0
        ep_overlap_early_attn_memory_release:0 external_cuda_graph:0
        fine_grained_activation_offloading:0 fine_grained_offloading_max_inflight_offloads
        fsdp_db_use_persist_buf_on_alloc_fail:0 fsdp_double_buffer:0 fsdp_manual_registration:0
        gdp_num_chunk_states_to_recompute gradient_reduce_div_fusion:0 gtp_remat_opt_in_modules:+
        gtp_remat_reduce_scatter_with_fp32_accumulation:0 hybrid_context_parallel:0
        init_model_with_meta_device:0 keep_fp8_transpose_cache:0
        megatron_fsdp_enable_fine_grained_param_gather:0 megatron_fsdp_max_pool_double_buffer:0
        megatron_fsdp_version min_offloaded_tensor_size mlp_chunks_for_training
        moe_enable_deepep:0 moe_flex_dispatcher_backend moe_layer_recompute:0 moe_paged_stash:0
        moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda
        moe_paged_stash_page_size moe_permute_fusion_into_hybridep:0 mtp_standalone:0
        offload_modules:+ optimizer_cpu_offload:0 optimizer_cuda_graph:0
        optimizer_offload_fraction outer_dp_sharding_strategy overlap_cpu_optimizer_d2h_h2d:0
        overlap_dispatch_backward_with_experts_wgrad:0 overlap_grad_reduce:0
        overlap_moe_expert_parallel_comm:0 overlap_p2p_comm:0 overlap_p2p_comm_warmup_flush:0
        overlap_param_gather:0 overlap_param_gather_with_optimizer_step:0 pin_cpu_grads:0
        pin_cpu_params:0 recompute_activations:0 recompute_granularity recompute_method
        recompute_modules:+ reuse_grad_buf_for_mxfp8_param_ag:0 sequence_parallel:0
        suggested_communication_unit_size torch_fsdp2_reshard_after_forward:0 tp_comm_bulk_dgrad:0
        tp_comm_bulk_wgrad:0 tp_comm_overlap:0 tp_comm_overlap_ag:0 tp_comm_overlap_rs:0
        tp_comm_overlap_rs_dgrad:0 tp_comm_split_ag:0 tp_comm_split_rs:0
        use_distributed_optimizer:0 use_layer_wise_param_layout:0 use_megatron_fsdp:0
        use_torch_fsdp2:0 use_tp_pp_dp_mapping:0 wgrad_deferral_limit
    """,
    Role.TRANSPORT: """
        disable_symmetric_registration:0 distributed_backend gtp_expert_remat_nccl_ub:0
        gtp_remat_nccl_ub:0 high_priority_a2a_comm_stream:0 high_priority_stream_groups:+
        local_rank moe_combine_bwd_dtype moe_deepep_num_sms moe_dispatch_fwd_dtype
        moe_flex_dispatcher_num_sms moe_hybridep_num_blocks_permute
        moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms moe_hybridep_num_sms_preprocessing
        moe_hybridep_pad_uneven_dispatch_inputs:0 moe_ncclep_static_shape:0 moe_ncclep_zero_copy:0
        nccl_communicator_config_path nccl_ub:0 pipeline_model_parallel_comm_backend
        sharp_enabled_group symmetric_ar_type tp_comm_bootstrap_backend use_gloo_process_groups:0
        use_ring_exchange_p2p:0 use_sharp:0
    """,
    Role.LENGTH: """
        decrease_batch_size_if_needed:0 eval_global_batch_size eval_interval eval_iters
        eval_micro_batch_size exit_duration_in_mins exit_interval full_validation:0 lr_decay_iters
        lr_decay_samples lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples
        lr_wsd_decay_iters lr_wsd_decay_samples multiple_validation_sets:0
        override_opt_param_scheduler:0 start_eval_at_iter test_mode:0 train_iters train_samples
        use_checkpoint_opt_param_scheduler:0 validation_set_names:+
    """,
    Role.INPUT: """
        chat_template data_args_path data_cache_path data_path:+ dataloader_defer_npy_index_mmap:0
        dataloader_fast_cache_load:0 disable_msc_deprecated:0 enable_msc:0 merge_file
        metadata_path mmap_bin_files:0 null_tokenizer_eod_id null_tokenizer_pad_id
        object_storage_cache_path per_dataset_sequences_path per_split_data_args_path
        special_tokens:+ split test_data_path:+ tiktoken_num_special_tokens tiktoken_pattern
        tokenizer_hf_no_include_special_tokens:0 tokenizer_hf_no_use_fast:0 tokenizer_model
        tokenizer_sentencepiece_ignore_extra_whitespaces:0 tokenizer_sentencepiece_legacy:0
        tokenizer_type tp_comm_overlap_cfg train_data_path:+ trust_remote_code:0 use_gigatoken:0
        valid_data_path:+ vocab_file
    """,
    Role.CHECKPOINT: """
        async_ckpt_cpu_priority async_ckpt_io_priority async_ckpt_use_cpu_shm:0 async_save:0
        async_strategy auto_detect_ckpt_format:0 ckpt_assume_constant_structure:0
        ckpt_convert_format ckpt_convert_save ckpt_convert_update_legacy_dist_opt_format:0
        ckpt_drop_redundant_extra_state:0 ckpt_fully_parallel_load:0
        ckpt_fully_parallel_load_exchange_algo ckpt_fully_parallel_load_per_rank_objects:0
        ckpt_fully_parallel_load_process_group ckpt_fully_parallel_save:0
        ckpt_fully_parallel_save_deprecated:0 ckpt_fully_parallel_save_process_group
        ckpt_load_validate_sharding_integrity:0 ckpt_pg_tensors_cache_create:0
        ckpt_pg_tensors_cache_path ckpt_step dist_ckpt_format_deprecated
        dist_ckpt_optim_fully_reshardable:0 dist_ckpt_save_pre_mcore_014:0 dist_ckpt_strictness
        dist_ckpt_workers distrib_optim_fully_reshardable_mem_efficient:0
        exit_on_missing_checkpoint:0 finetune:0 load load_main_params_from_ckpt:0
        moe_upcycling_granularity moe_use_upcycling:0 no_load_optim:0 no_load_rng:0
        no_save_optim:0 no_save_rng:0 non_persistent_ckpt_type non_persistent_global_ckpt_dir
        non_persistent_local_ckpt_algo non_persistent_local_ckpt_dir non_persistent_save_interval
        override_ckpt_iteration pretrained_checkpoint replication:0 replication_factor
        replication_jump save save_interval save_retain_interval save_tokenizer_assets:0
        stream_ckpt_dequant:0 strict_fsdp_dtensor_load:0 use_checkpoint_args:0
        use_dist_ckpt_deprecated:0 use_mp_args_from_checkpoint_args:0 use_persistent_ckpt_worker:0
        use_tokenizer_model_from_checkpoint_args:0 verify_integrity:0
    """,
    Role.OPERATION: """
        adlr_autoresume:0 adlr_autoresume_interval app_tag_run_name app_tag_run_version
        barrier_with_L1_time:0 calc_ft_timeouts:0 check_for_large_grads:0 check_for_spiky_loss:0
        check_weight_hash_across_dp_replicas_interval config_logger_dir
        disable_straggler_on_startup:0 distributed_timeout_minutes
        distributed_timeout_seconds_after_init dump_param_to_param_group_map
        empty_unused_memory_level enable_ft_package:0 enable_one_logger:0 error_injection_rate
        error_injection_type exit_signal exit_signal_handler:0
        exit_signal_handler_for_dataloader:0 exit_signal_handler_for_training:0
        fault_injector_delay_start_iteration fault_injector_fault_delay
        fault_injector_fault_probabilities fault_injector_fault_types fault_injector_mtti_seconds
        fault_injector_num_ranks fault_injector_offset_seconds fault_injector_ranks
        fault_injector_seed flight_recorder_dump_on_timeout:0 flight_recorder_dump_path
        flight_recorder_extra_dump_on_exec:0 flight_recorder_include_only_active:0
        flight_recorder_include_stack_trace:0 flight_recorder_trace_buffer_size
        ft_num_warmup_iters gpu_sniff_test_interval inprocess_active_world_size
        inprocess_barrier_timeout inprocess_completion_timeout inprocess_empty_cuda_cache:0
        inprocess_granularity inprocess_hard_timeout inprocess_heartbeat_interval
        inprocess_heartbeat_timeout inprocess_last_call_wait inprocess_max_iterations
        inprocess_monitor_process_interval inprocess_monitor_thread_interval
        inprocess_progress_watchdog_interval inprocess_restart:0 inprocess_soft_timeout
        inprocess_termination_grace_time log_device_memory_used:0 log_energy:0 log_interval
        log_loss_scale_to_tensorboard:0 log_max_attention_logit:0 log_memory_interval
        log_memory_to_tensorboard:0 log_num_zeros_in_grad:0 log_params_norm:0 log_progress:0
        log_straggler:0 log_throughput:0 log_timers_to_tensorboard:0
        log_validation_ppl_to_tensorboard:0 log_world_size_to_tensorboard:0 logging_level
        logits_save_dir logits_save_dtype logits_save_top_k logits_save_top_p
        logits_save_top_p_min_k manual_gc:0 manual_gc_eval:0 manual_gc_interval
        memory_snapshot_path moe_per_layer_logging:0 moe_routing_trace_capture_hidden_states:0
        moe_routing_trace_capture_logits:0 moe_routing_trace_dump_weights:0
        moe_routing_trace_max_training_iters moe_routing_trace_path nvtx_ranges:0
        one_logger_async:0 one_logger_project one_logger_run_name otel_enabled:0 otel_service_name
        otel_span_groups profile:0 profile_ranks:+ profile_step_end profile_step_start
        pytorch_profiler_collect_callstack:0 pytorch_profiler_collect_chakra:0
        pytorch_profiler_collect_shapes:0 record_memory_history:0 record_shapes:0 rerun_mode
        result_rejected_tracker_filename run_workload_inspector_server:0 save_activations_interval
        save_dgrads_interval save_params_interval save_tokens_per_expert_interval
        save_wgrads_interval straggler_ctrlr_port straggler_minmax_count tensorboard_dir
        tensorboard_log_interval tensorboard_queue_size timing_log_level timing_log_option
        train_sync_interval use_pytorch_profiler:0 wandb_entity wandb_exp_name wandb_project
        wandb_save_dir
    """,
    Role.FOREIGN: """
        bert_binary_head:0 bert_embedder_type bert_load biencoder_projection_dim
        biencoder_shared_query_context_model:0 block_data_path cache_mla_latents:0
        classes_fraction data_per_class_fraction data_sharding:0 decode_only_cuda_graphs:0
        dino_bottleneck_size dino_freeze_last_layer dino_head_hidden_size dino_local_crops_number
        dino_local_img_size dino_norm_last_layer:0 dino_teacher_temp dino_warmup_teacher_temp
        dino_warmup_teacher_temp_epochs embedding_path enable_chunked_prefill:0 evidence_data_path
        flash_decode:0 grpo_clamp_eps_lower grpo_clamp_eps_upper grpo_entropy_term_weight
        grpo_filter_groups_with_same_reward:0 grpo_group_size grpo_iterations grpo_kl_beta
        grpo_prompts_per_step head_lr_mult ict_head_size ict_load img_h img_w indexer_batch_size
        indexer_log_interval inference_batch_times_seqlen_threshold inference_coordinator_port
        inference_cuda_graph_all_prefills:0 inference_cuda_graph_max_tokens
        inference_cuda_graph_scope inference_disable_ep_consensus:0
        inference_disable_triton_nvls_kernels:0 inference_dynamic_batching:0
        inference_dynamic_batching_async_sched_mode inference_dynamic_batching_block_size
        inference_dynamic_batching_buffer_size_gb
        inference_dynamic_batching_cuda_graph_mixed_prefill_count
        inference_dynamic_batching_cuda_graph_sizing_distribution
        inference_dynamic_batching_enable_prefix_caching:0
        inference_dynamic_batching_logprobs_mode inference_dynamic_batching_mamba_memory_ratio
        inference_dynamic_batching_max_requests inference_dynamic_batching_max_tokens
        inference_dynamic_batching_num_cuda_graphs
        inference_dynamic_batching_paused_buffer_size_gb
        inference_dynamic_batching_prefix_caching_coordinator_policy
        inference_dynamic_batching_prefix_caching_eviction_policy
        inference_dynamic_batching_prefix_caching_mamba_gb
        inference_dynamic_batching_prefix_caching_routing_alpha
        inference_dynamic_batching_sampling_backend
        inference_dynamic_batching_track_generated_token_events:0
        inference_dynamic_batching_track_paused_request_events:0
        inference_dynamic_batching_unified_memory_level inference_fuse_tp_communication:0
        inference_grouped_gemm_backend inference_logging_step_interval inference_max_requests
        inference_max_seq_length inference_moe_disable_fused_quant_kernels:0
        inference_moe_token_dispatcher_type inference_rng_tracker:0 inference_shards
        inference_text_gen_server_logging:0 inference_use_synchronous_zmq_collectives:0
        inference_wandb_logging:0 iter_per_epoch langrl_env_config logits_load_decode_threads
        logits_load_dir logits_load_ignore_errors:0 logits_load_kd_loss_alpha
        logits_load_msc_prefetch_depth logits_load_prefetch_factor
        mamba_inference_conv_states_dtype mamba_inference_ssm_states_dtype mask_factor mask_prob
        mask_type max_tokens_to_oom mlp_chunks_for_prefill
        moe_pad_experts_for_cuda_graph_inference:0 nccl_all_reduce_for_prefill:0 num_channels
        num_classes num_speculative_tokens offset_sampling_seed_by_dp_rank:0
        output_bert_embeddings:0 patch_dim query_in_block_prob refit_method
        retriever_report_topk_accuracies:+ retriever_score_scaling:0 rl_consumption_granularity
        rl_default_temperature rl_default_top_k rl_default_top_p rl_durable_rollout_bank:0
        rl_generation_batch_size rl_generation_lag rl_importance_sampling_truncation_coef
        rl_inference_expert_model_parallel_size rl_inference_expert_tensor_model_parallel_size
        rl_inference_logprobs_is_correction:0 rl_inference_model_unified_memory_level
        rl_inference_parsers:+ rl_inference_pipeline_model_parallel_size
        rl_inference_tensor_model_parallel_size rl_kv_cache_management_mode
        rl_max_inflight_requests rl_num_parallel_generation_batches rl_num_parallel_generations
        rl_offload_inference_model_weights_when_idle:0 rl_offload_optimizer_during_inference:0
        rl_parallel_generation_tasks rl_partial_rollouts:0 rl_persist_cuda_graphs:0 rl_profile:0
        rl_profile_dir rl_prompts_per_eval rl_rollout_bank_dir rl_rollout_bank_max_bytes
        rl_sequence_packing_algo rl_sequence_packing_max_sequences_per_bin rl_skip_bos_token:0
        rl_submission_granularity rl_training_cuda_graphs:0 rl_use_sequence_packing:0
        rl_verify_model_weights_swap:0 sample_rate short_seq_prob swin_backbone_type
        titles_data_path use_legacy_static_engine:0 use_one_sent_docs:0 vision_backbone_type
        vision_pretraining:0 vision_pretraining_type
    """,
    Role.REFUSED: """
        batch_size checkpoint_activations:0 fake_process_group:0 model_parallel_size mtp_hsm:0
        perform_rl_step:0 skip_train:0 warmup yaml_cfg
    """,
}

_OPTIONS = {
    name: (role, values or "1")
    for role, words in _NAMES.items()
    for name, _, values in (word.partition(":") for word in words.split())
}
ROLES = MappingProxyType({name: role for name, (role, _) in _OPTIONS.items()})
"""The role of each option."""
MANY = 1 << 30
VALUES = MappingProxyType(
    {name: MANY if values == "+" else int(values) for name, (_, values) in _OPTIONS.items()}
)
"""How many words follow each option at most; :data:`MANY`: any number."""
