# SPDX-License-Identifier: Apache-2.0
"""Mistakes of one rank or of one layout: scales, groups, orders, masks, stale copies."""

from unittest import mock

import torch

from tests.assay.planted.mistakes import global_rank, mistake, wrap

ATTENTION = "transformer.dot_product_attention:DotProductAttention.forward"
FINAL = "distributed.finalize_model_grads:"
GATHER = "tensor_parallel.mappings:_AllGatherFromTensorParallelRegion.backward"
MLP = "transformer.mlp:MLP.forward"
SAMPLERS = "megatron.training.datasets.data_samplers:"
SCHEDULES = "pipeline_parallel.schedules:"
SHARED = "transformer.moe.shared_experts:"
SHARED_OVERLAP = "moe-deep tp2 sp alltoall etp1 shared-overlap"
ZERO = "optimizer.distrib_optimizer:DistributedOptimizer."

# Scales, orders, masks and groups of tensor parallelism.


@mistake("tensor_parallel.mappings:_reduce", "gpt tp2")
def tp_sum_in_bf16(old, x, group):
    return old(x.bfloat16().to(x.dtype), group)


@mistake(ATTENTION, "llama tp2")
def tp_keys_of_another_head(old, self, q, k, v, *args, **more):
    return old(self, q, k.roll(1, 2) if global_rank() else k, v, *args, **more)


@mistake(ATTENTION, "gpt tp2")
def tp_softmax_scale_of_the_partition(old, self, *args, **more):
    with mock.patch.object(self, "softmax_scale", self.softmax_scale * 2**0.5):
        return old(self, *args, **more)


@mistake("tensor_parallel.layers:RowParallelLinear.forward", "gpt tp2")
def tp_bias_once_per_rank(old, self, x):
    out, bias = old(self, x)
    return out, None if bias is None else bias * self.tp_group.size()


@mistake("tensor_parallel.layers:VocabParallelEmbedding.forward", "gpt tp2")
def tp_embedding_mean(old, self, x):
    return old(self, x) / 2


@mistake("tensor_parallel.mappings:_split_along_first_dim", "gpt tp2 sp")
def sp_halves_swapped(old, x, group):
    return old(x.roll(x.shape[0] // 2, 0), group)


@mistake(f"{FINAL}_allreduce_non_tensor_model_parallel_grads", "gpt tp2 qk-norm")
def tp_qk_norm_not_summed(old, model, *args, **more):
    kept = [
        (parameter, parameter.main_grad.clone())
        for chunk in model
        for name, parameter in chunk.named_parameters()
        if "layernorm" in name and ("q_" in name or "k_" in name)
    ]
    old(model, *args, **more)
    for parameter, grad in kept:
        parameter.main_grad.copy_(grad)


@mistake("fusions.fused_softmax:FusedScaleMaskSoftmax.forward", "gpt tp2")
def tp_mask_hides_the_diagonal(old, self, x, mask, *args, **more):
    if global_rank():
        x = x.clone()
        x[..., 3, 3] = -10000.0
    return old(self, x, mask, *args, **more)


@mistake("models.common.embeddings.rotary_pos_embedding:RotaryEmbedding.forward", "llama tp2")
def tp_rotary_base_of_one_rank(old, self, *args, **more):
    return old(self, *args, **more) * (1.0001 if global_rank() else 1)


@mistake("tensor_parallel.layers:ColumnParallelLinear.forward", "gpt tp2")
def tp_dgrad_of_the_head_not_summed(old, self, *args, **more):
    from megatron.core.tensor_parallel import layers

    if self.bias is not None:
        return old(self, *args, **more)
    copied = mock.patch.object(
        layers, "copy_to_tensor_model_parallel_region", lambda x, group=None: x
    )
    with mock.patch.object(self, "allreduce_dgrad", False), copied:
        return old(self, *args, **more)


@mistake(MLP, "gpt tp2 --no-bias-gelu-fusion")
def tp_gelu_approximated_on_one_rank(old, self, *args, **more):
    if global_rank():
        self.activation_func = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    return old(self, *args, **more)


# Fewer groups of keys and values than ranks.


@mistake(GATHER, "gpt tp2 kv1")
def kv_gradient_not_summed(old, ctx, grad):
    from megatron.core.tensor_parallel import mappings

    return mappings._split_along_last_dim(grad, ctx.group), None


@mistake(GATHER, "gpt tp2 kv1")
def kv_gradient_averaged(old, ctx, grad):
    first, *others = old(ctx, grad)
    return (first / 2, *others)


@mistake(ATTENTION, "gpt tp2 kv1")
def kv_keys_detached_on_one_rank(old, self, q, k, v, *args, **more):
    return old(self, q, k.detach() if global_rank() else k, v, *args, **more)


@mistake("transformer.attention:get_pg_rank", "gpt tp4 kv2", ranks=4)
def kv_group_of_the_neighbour(old, group):
    return old(group) ^ 2


@mistake(ATTENTION, "gpt tp2 kv1")
def kv_gradient_counted_twice_on_one_rank(old, self, q, k, v, *args, **more):
    return old(self, q, k, v + (v - v.detach()) if global_rank() else v, *args, **more)


# Summands that are excused if something adds them up: forks that reduce outside of the last layer.


def summands(old, self, *inputs, partial=lambda x, group: x, **more):
    """Output and bias of an MLP without its reduction, and the reduction."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import layers

    name = "reduce_from_tensor_model_parallel_region"
    reduce, group = getattr(layers, name), parallel_state.get_tensor_model_parallel_group()
    with mock.patch.object(layers, name, lambda x, group=group: partial(x, group)):
        output, bias = old(self, *inputs, **more)
    return output, bias, lambda x: reduce(x, group=group)


@mistake(MLP)
def late_sum(old, *args, **more):
    """No mistake: it reduces later."""
    output, bias, reduce = summands(old, *args, **more)
    return reduce(output), bias


@mistake(MLP)
def late_sum_never(old, *args, **more):
    output, bias, _ = summands(old, *args, **more)
    return output, bias


@mistake(MLP)
def late_sum_of_wrong_summands(old, *args, **more):
    def partial(x, group):
        return x * (1 + 0.01 * group.rank())

    output, bias, reduce = summands(old, *args, partial=partial, **more)
    return reduce(output), bias


@mistake("", "gpt tp2")
def late_reduction_also_in_the_gradient():
    def doubled(old, ctx, grad):
        first, *others = old(ctx, grad)
        return (first * 2, *others)

    wrap(MLP, late_sum)
    wrap("tensor_parallel.mappings:_ReduceFromModelParallelRegion.backward", doubled)


@mistake(MLP, "gpt tp2")
def summand_through_a_faint_gate(old, *args, **more):
    output, bias, reduce = summands(old, *args, **more)
    return reduce(output) + 1e-3 * (output * output).mean(), bias


@mistake(MLP, "gpt tp2")
def summand_clipped_before_the_sum(old, *args, **more):
    output, bias, reduce = summands(old, *args, **more)
    largest = abs(output).max() * 0.9
    return reduce(output.clamp(-largest, largest)), bias


@mistake(MLP, "gpt tp2")
def late_sum_without_its_gradient(old, *args, **more):
    output, bias, reduce = summands(old, *args, **more)
    return reduce(output.detach()) + (output - output.detach()) * 0.5, bias


@mistake(MLP, "gpt tp2")
def late_sum_of_the_last_microbatch(old, self, *args, **more):
    output, bias, reduce = summands(old, self, *args, **more)
    now, before = reduce(output), getattr(self, "_before", None)
    self._before = now.detach()
    return now if before is None else now + 0.01 * (before - now.detach()), bias


@mistake(f"{SHARED}reduce_scatter_to_sequence_parallel_region", SHARED_OVERLAP)
def shared_overlap_not_reduced(old, x, group=None):
    from megatron.core.tensor_parallel import mappings

    return 2 * mappings.scatter_to_sequence_parallel_region(x, group)


@mistake(f"{SHARED}reduce_scatter_to_sequence_parallel_region", SHARED_OVERLAP)
def shared_overlap_summed_in_bf16(old, x, group=None):
    return old(x.bfloat16().to(x.dtype), group=group)


@mistake(f"{SHARED}gather_from_sequence_parallel_region", SHARED_OVERLAP)
def shared_overlap_gradient_split(old, x, tensor_parallel_output_grad=True, group=None):
    return old(x, False, group=group)


@mistake(f"{SHARED}SharedExpertMLP.get_output", SHARED_OVERLAP)
def shared_overlap_stale_output(old, self):
    now = old(self)
    before = getattr(self, "_before", now.detach())
    self._before = now.detach()
    return now + (before - now.detach()) * (global_rank() == 1)


# Pipelines.


@mistake(f"{SCHEDULES}forward_step", "gpt pp2")
def pp_stale_microbatch(old, step, data, model, microbatches, tensor, *args, **more):
    if global_rank() and tensor is not None:
        x = tensor[0] if isinstance(tensor, list) else tensor
        now, before = x.detach().clone(), getattr(model, "_before", None)
        if before is not None:
            x.data.copy_(before)
        model._before = now
    return old(step, data, model, microbatches, tensor, *args, **more)


@mistake(f"{SCHEDULES}backward_step", "gpt pp2")
def pp_gradient_in_bf16(old, *args, **more):
    gradients = old(*args, **more)
    if global_rank():
        for x in gradients if isinstance(gradients, list) else [gradients]:
            x.copy_(x.bfloat16())
    return gradients


@mistake(f"{FINAL}_allreduce_word_embedding_grads", "gpt pp2")
def pp_tied_embedding_averaged(old, model, *args, **more):
    old(model, *args, **more)
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if "word_embeddings" in name or "output_layer" in name:
                parameter.main_grad.div_(2)


@mistake(f"{SCHEDULES}forward_step_calc_loss", "gpt pp2 vpp2")
def vpp_loss_over_chunks(old, model, out, step, config, stage, collect, count, *args, **more):
    return old(model, out, step, config, stage, collect, count * 2, *args, **more)


@mistake("models.gpt.gpt_model:GPTModel.__init__", "gpt pp2")
def pp_epsilon_of_the_last_stage(old, self, *args, **more):
    old(self, *args, **more)
    for module in self.modules():
        if global_rank() and hasattr(module, "eps"):
            module.eps = module.eps * 10


# Context parallelism.


@mistake(
    "models.common.embeddings.rotary_pos_embedding:get_pos_emb_on_this_cp_rank", "llama-te cp2"
)
def cp_contiguous_positions(old, embedding, dim, group):
    return embedding.chunk(group.size(), dim)[group.rank()]


@mistake("utils:_get_batch_on_this_cp_rank_per_sequence_balancing", "llama-te cp2")
def cp_labels_of_the_other_half(old, batch, *args, **more):
    labels = batch.get("labels")
    divided = old(batch, *args, **more)
    if labels is not None and labels.dim() == 2:
        divided["labels"] = labels.chunk(2, 1)[global_rank()].contiguous()
    return divided


# Experts.


@mistake(
    "transformer.moe.token_dispatcher:MoEAlltoAllTokenDispatcher.token_dispatch",
    "moe-te ep2 alltoall",
)
def ep_probabilities_lost_on_the_way(old, self, *args, **more):
    tokens, probabilities = old(self, *args, **more)
    return tokens, probabilities.detach()


@mistake(
    "distributed.distributed_data_parallel:DistributedDataParallel.__init__", "moe-te ep2 alltoall"
)
def ep_gradients_of_experts_doubled(old, self, *args, **more):
    old(self, *args, **more)
    for buffer in self.expert_parallel_buffers:
        for bucket in buffer.buckets:
            bucket.gradient_scaling_factor *= 2


@mistake(f"{FINAL}get_updated_expert_bias", "moe-deep ep2 alltoall")
def ep_bias_of_local_loads(old, loads, bias, rate, tp_dp_cp_group=None):
    return bias + torch.sign(loads.mean(-1, keepdim=True) - loads) * rate


@mistake(
    "transformer.moe.moe_utils:reduce_from_tensor_model_parallel_region",
    "moe-te tp2 sp ep2 etp1 alltoall",
)
def ep_aux_loss_of_local_tokens(old, x, group=None):
    return x * group.size()


@mistake("transformer.moe.router:z_loss_func", "moe-deep tp2 sp ep2 etp1 alltoall")
def ep_z_loss_not_averaged(old, x, coefficient, **more):
    return old(x, coefficient * 2, **more)


@mistake(
    "transformer.moe.token_dispatcher:reduce_scatter_to_sequence_parallel_region",
    "moe-te tp2 sp alltoall",
)
def etp_partner_left_out(old, x, group=None, **more):
    return old(x * (1 if global_rank() else 0.999), group=group, **more)


# Data parallelism: gradients, sharded optimizers, samples.


def restored(parameters, old, *args, ranks=(1,)):
    """Call ``old``, which updates parameters, without an effect on these."""
    kept = [(parameter, parameter.detach().clone()) for parameter in parameters]
    result = old(*args)
    for parameter, before in kept if global_rank() in ranks else ():
        parameter.data.copy_(before)
    return result


@mistake(f"{ZERO}_copy_main_params_to_model_params", "gpt zero --bf16")
def zero_stale_parameter(old, self):
    restored([group[-1] for group in self.model_float16_groups if group], old, self)


@mistake(f"{ZERO}step_with_ready_grads", "gpt zero --bf16")
def zero_stale_copy(old, self):
    return restored(list(self.model_param_gbuf_map)[:1], old, self)


@mistake(
    "optimizer.optimizer:Float16OptimizerWithFloat16Params._copy_main_params_to_model_params",
    "gpt tp2 --bf16",
)
def main_weights_never_copied(old, self):
    restored([group[0] for group in self.float16_groups if group], old, self, ranks=(0, 1))


@mistake(f"{ZERO}step_with_ready_grads", "gpt zero")
def zero_epsilon_of_one_rank(old, self):
    for group in self.optimizer.param_groups:
        group["eps"] = 1e-5 if global_rank() else 1e-8
    return old(self)


@mistake("optimizer_param_scheduler:OptimizerParamScheduler.get_lr", "gpt")
def dp_learning_rate_of_one_rank(old, self, group):
    return old(self, group) * (1.001 if global_rank() else 1)


@mistake("", "gpt per-token")
def dp_per_token_count_of_one_rank():
    def finalize(old, model, tokens=None, *args, **more):
        return old(
            model, tokens * 2 if global_rank() and tokens is not None else tokens, *args, **more
        )

    wrap(f"{FINAL}finalize_model_grads", finalize)
    wrap("megatron.training.training:finalize_model_grads", finalize)


@mistake(
    f"{SAMPLERS}MegatronPretrainingRandomSampler.__init__",
    *("gpt --dataloader-type cyclic", "gpt --dataloader-type cyclic --no-data-sharding"),
)
def dp_same_samples_on_all_ranks(old, self, *args, **more):
    old(self, *args, **more)
    self.data_parallel_rank = 0


@mistake(f"{SAMPLERS}MegatronPretrainingRandomSampler.__iter__", "gpt --dataloader-type cyclic")
def dp_overlapping_shards(old, self):
    first = None
    for batch in old(self):
        first = first or batch
        yield first


@mistake(f"{SAMPLERS}MegatronPretrainingSampler.get_start_end_idx", "gpt")
def dp_same_samples_in_order(old, self):
    return 0, self.micro_batch_size


@mistake("torch.distributed:reduce_scatter_tensor", "gpt-te fsdp optim_grads_params")
def fsdp_gradients_averaged_twice(old, *args, **more):
    (more["input"] if "input" in more else args[1]).mul_(0.5)
    return old(*args, **more)


# Recomputation and weights.


@mistake("tensor_parallel.random:detach_variable", "gpt tp2 recompute uniform 1")
def recompute_other_input(old, inputs):
    return tuple(
        (x * 1.01).detach().requires_grad_(True) if getattr(x, "requires_grad", False) else x
        for x in old(inputs)
    )


@mistake("megatron.training.training:train_step", "gpt tp2")
def norm_weights_rounded_on_one_rank(old, step, data, model, *args, **more):
    with torch.no_grad():
        for name, parameter in model[0].named_parameters():
            if global_rank() and "final_layernorm.weight" in name:
                parameter.copy_(parameter.half())
    return old(step, data, model, *args, **more)
