# SPDX-License-Identifier: Apache-2.0
"""Mistakes in features that few layouts have, in inputs, in initial values, and in what is loaded.

Some are no mistakes of a layout: a model that is frozen in part, or that no seed repeats.
"""

import contextlib
import dataclasses
import time
from unittest import mock

import numpy
import torch

from megatron_ttrace.mcore.optimizer import owned_by
from tests.assay.planted.mistakes import global_rank, mistake, wrap

ATTEND = "extensions.transformer_engine:TEDotProductAttention.forward"
MAMBA = "ssm.mamba_context_parallel:MambaContextParallel."
MODEL = "models.gpt.gpt_model:GPTModel."
NODE = "models.common.utils:TransformerLayerNode."


@mistake("transformer.transformer_layer:TransformerLayer.forward")
def unreduced_input_gradients(old, self, *args, **more):
    if self.layer_number == 2:
        linear = self.mlp.linear_fc1
        linear.disable_grad_reduce, linear.allreduce_dgrad = True, False
    return old(self, *args, **more)


@mistake("models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward")
def embedding_drops_per_rank(old, self, *args, **more):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    with get_cuda_rng_tracker().fork():
        return old(self, *args, **more)


@mistake("tensor_parallel.random:_set_all_rng_states")
def random_states_of_the_backward_pass(old, *states):
    """Recomputation draws on."""


@mistake("tensor_parallel.random:_fork_rng")
def random_states_are_left(old):
    """What runs after a recomputation draws its numbers."""
    return contextlib.nullcontext()


@mistake("distributed.distributed_data_parallel_config:DistributedDataParallelConfig.__init__")
def gradients_in_low_precision(old, self, *args, **more):
    old(self, *args, **more)
    self.grad_reduce_in_fp32 = False


@mistake(f"{MAMBA}_slice_conv_param", "cp2/hybrid/fp32", place="decoder.layers.0.mixer")
def filters_of_the_next_rank(old, self, parameter):
    with mock.patch.object(self, "cp_rank", (self.cp_rank + 1) % self.cp_size):
        return old(self, parameter)


@mistake(f"{MAMBA}get_A_log", "tp2-sp/hybrid/bf16", place="decoder.layers.0.mixer")
def decay_of_another_head(old, self):
    decay = old(self)
    return torch.cat([decay[:-1], decay[:1]])


@mistake(
    "transformer.moe.router:TopKRouter.sinkhorn_load_balancing",
    *("sinkhorn-tp2-sp/moe-te/fp32", "sinkhorn-cp2/moe-te/bf16"),
    place="decoder.layers.0.mlp.router",
)
def squashed_twice(old, self, logits):
    scores, chosen = old(self, logits)
    return torch.sigmoid(scores) * chosen, chosen


@mistake(
    "transformer.moe.moe_utils:get_capacity",
    "capacity-ep2/moe-te/fp32",
    place="decoder.layers.0.mlp.router",
)
def a_token_too_few(old, *args, **more):
    return old(*args, **more) - 1


@mistake(
    "transformer.moe.moe_utils:fused_topk_with_score_function",
    "fused-router-tp2-sp/moe-te/fp32",
    place="decoder.layers.0.mlp.router",
)
def twice_the_factor(old, *args, **more):
    probabilities, chosen = old(*args, **more)
    return probabilities * 1.01, chosen


@mistake(
    "optimizer.grad_scaler:MegatronGradScaler.inv_scale",
    *("tp2/gpt-te/fp16", "dp4-zero-overlap/llama-te/fp16"),
)
def unscaled_by_another(old, self):
    return old(self) * 1.01


@mistake(
    "ssm.gated_delta_net.gdn:GatedDeltaNet._prepare_input_for_gated_delta_rule",
    "cp2/gdn-te/fp32",
    place="decoder.layers.0.self_attention",
)
def keys_of_another_head(old, self, *args):
    query, key, *others = old(self, *args)
    return query, key.roll(1, dims=2), *others


# The head is the embedding.
@mistake(
    "pipeline_parallel.schedules:drain_embedding_wgrad_compute",
    "defer-pp2/gpt-te/fp32",
    place="embedding.word_embeddings",
)
def a_microbatch_too_few(old, config, activations, gradients, *args):
    activations.pop()
    gradients.pop()
    old(config, activations, gradients, *args)


@mistake(
    "extensions.transformer_engine:Fp8Unpadding.forward",
    "tp2-sp-etp2/moe-te/fp8-delayed",
    place="decoder.layers.0.mlp",
)
def padding_among_the_rows(old, self, rows, *args):
    return old(self, rows.roll(1, dims=0), *args)


@mistake(ATTEND, "packed-tp2-sp/llama-te/fp32", place="decoder.layers.0.self_attention")
def two_documents_in_one(old, self, *args, packed_seq_params, **more):
    bounds = packed_seq_params.cu_seqlens_q
    joined = torch.cat([bounds[:1], bounds[2:]]) if len(bounds) > 2 else bounds
    packed = dataclasses.replace(
        packed_seq_params,
        cu_seqlens_q=joined,
        cu_seqlens_kv=joined,
        max_seqlen_q=int(joined.diff().max()),
        max_seqlen_kv=int(joined.diff().max()),
    )
    return old(self, *args, packed_seq_params=packed, **more)


@mistake(
    "tensor_parallel.random:detach_variable",
    "recompute-mlp-tp2/llama-te/fp32",
    place="decoder.layers.",
)
def recomputed_from_less(old, inputs):
    return tuple(
        (x * 0.99).detach().requires_grad_(x.requires_grad)
        if torch.is_tensor(x) and x.is_floating_point()
        else x
        for x in old(inputs)
    )


@mistake(f"{NODE}backward_impl", "ep2-in-pieces/moe-te/bf16", place="decoder.layers.1")
def residual_without_a_gradient(old, self, outputs, gradients):
    for residual in self.detached[:1]:
        residual.grad = residual.grad * 0.5
    return old(self, outputs, gradients)


@mistake(f"{NODE}forward_impl", "pp2-vpp2-ep2-in-pieces/moe-te/bf16", place="decoder.layers.0.mlp")
def rows_of_other_tokens(old, self, *inputs):
    output = old(self, *inputs)
    return output.roll(1, dims=0) if self.name == "moe_dispatch" else output


@mistake(
    "transformer.moe.moe_layer:MoELayer.backward_dw",
    "pp2-vpp2-ep2-in-pieces-mtp/moe-deep/bf16",
    place="decoder.layers.2.mlp.experts",
)
def weights_of_a_microbatch_too_few(old, self, routed_experts=True, shared_experts=False):
    is_last = self.layer_number == 3 and routed_experts and not hasattr(self, "_forgot")
    if is_last:
        self._forgot = True
    else:
        old(self, routed_experts, shared_experts)


@mistake(
    "optimizer.cpu_offloading:HybridDeviceOptimizer._init_sub_optimizers",
    "offload-half-dp2-zero/llama-te/bf16",
)
def only_the_host_steps(old, self):
    old(self)
    self.gpu_optimizer.step = lambda closure=None: None


# Two modules of one model.


@mistake()
def two_modules():
    def larger(old, self, *args, **more):
        output, bias = old(self, *args, **more)
        return output * (1.01 if getattr(self, "is_larger", False) else 1.0), bias

    def built(old, self, *args, **more):
        old(self, *args, **more)
        first, second = self.decoder.layers
        first.self_attention.linear_qkv.is_larger = second.mlp.linear_fc2.is_larger = True

    wrap("tensor_parallel.layers:ColumnParallelLinear.forward", larger)
    wrap("tensor_parallel.layers:RowParallelLinear.forward", larger)
    wrap(f"{MODEL}__init__", built)


@mistake("transformer.attention:CrossAttention.forward")
def encoder_in_another_order(old, self, *args, key_value_states, **more):
    return old(self, *args, key_value_states=key_value_states.roll(1, 0), **more)


# Inputs.


def _fed(name, old, self, args, more):
    order = ("input_ids", "position_ids", "attention_mask")
    args = [x.roll(1, -1) if order[number] == name else x for number, x in enumerate(args)]
    more |= {name: more[name].roll(1, -1)} if name in more else {}
    return old(self, *args, **more)


@mistake(f"{MODEL}__call__")
def position_ids(old, self, *args, **more):
    return _fed("position_ids", old, self, args, more)


@mistake(f"{MODEL}__call__")
def labels(old, self, *args, **more):
    return _fed("labels", old, self, args, more)


# Initial values and what is loaded.


@mistake(f"{MODEL}__init__")
def initial_values(old, self, *args, **more):
    """Five ways to go wrong, before Megatron wraps the model."""

    def draw(parameter, seed):
        drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.data.copy_(drawn * 0.02)

    old(self, *args, **more)
    first, second = self.decoder.layers
    first.mlp.linear_fc1.weight.data.zero_()
    if global_rank() == 1:
        first.mlp.linear_fc2.weight.data.mul_(1.5)
    draw(second.mlp.linear_fc1.weight, 5)
    draw(self.embedding.position_embeddings.weight, global_rank())
    self.decoder.final_layernorm.weight.data.zero_()


class OtherRank:
    """A tensor-parallel group in which this rank has another one's number."""

    def __init__(self, group):
        self._group = group

    def size(self):
        return self._group.size()

    def rank(self):
        return self.size() - 1 - self._group.rank()


@mistake(everywhere=True)
def descriptions_of_a_checkpoint():
    """Another rank's half of the vocabulary; gate and up projection divided as one matrix."""

    def described(old, self, *args, **more):
        with mock.patch.object(self, "tp_group", OtherRank(self.tp_group)):
            return old(self, *args, **more)

    wrap("tensor_parallel.layers:VocabParallelEmbedding.sharded_state_dict", described)
    wrap("transformer.mlp:apply_swiglu_sharded_factory", lambda old, shards, *args, **more: shards)


@mistake(f"{MODEL}__init__", everywhere=True)
def frozen_in_part(old, self, *args, **more):
    """No mistake: before Megatron wraps the model, what wants no gradients gets no buffers."""
    old(self, *args, **more)
    for name, parameter in self.named_parameters():
        if "embedding" in name or "self_attention" in name:
            parameter.requires_grad_(False)


# Noise in the second layer's MLP.


def _noisy(draw, size):
    def built(old, self, *args, **more):
        old(self, *args, **more)
        self.mlp.is_noisy = self.layer_number == 2

    def forward(old, self, *args, **more):
        output, bias = old(self, *args, **more)
        if self.is_noisy:
            output = output + draw(output.shape).to(output.dtype) * output.std() * size
        return output, bias

    wrap("transformer.transformer_layer:TransformerLayer.__init__", built)
    wrap("transformer.mlp:MLP.forward", forward)


@mistake()
def noise_of_a_seed():
    """No repair explains it."""
    _noisy(lambda shape: torch.randn(shape, generator=torch.Generator().manual_seed(1)), 0.1)


@mistake(everywhere=True)
def noise_of_no_seed():
    drawn = numpy.random.default_rng()
    _noisy(lambda shape: torch.from_numpy(drawn.standard_normal(shape)), 1e-3)


@mistake("transformer.mlp:MLP.forward", everywhere=True)
def larger_on_several_ranks(old, self, *args, **more):
    output, bias = old(self, *args, **more)
    return output * (1.01 if torch.distributed.get_world_size() > 1 else 1.0), bias


@mistake("transformer.mlp:MLP.forward", everywhere=True)
def larger_on_one_rank_of_the_full_size(old, self, *args, **more):
    output, bias = old(self, *args, **more)
    return output * (1 + 2**-20 if output.shape[-1] == 32 and global_rank() == 1 else 1.0), bias


# Ranks that wait for each other.


def _meet(where, late):
    """Both ranks enter a collective in ``where``; the second one ``late`` seconds after, or not."""
    import torch.distributed as dist

    from megatron_ttrace.run import stall

    stall.SECONDS, group, met = 3.0, [], []

    def meet(old, self, *args, **more):
        result = old(self, *args, **more)
        if where == f"{MODEL}__init__":
            group.append(dist.new_group([0, 1]))
        if not met and (global_rank() == 0 or late):
            time.sleep(global_rank() * late)
            dist.all_reduce(torch.ones(4), group=group[0])
        met.append(True)
        if where == f"{MODEL}__init__":
            dist.barrier()
        return result

    def build(old, self, *args, **more):
        old(self, *args, **more)
        group.append(dist.new_group([0, 1]))

    if where != f"{MODEL}__init__":
        wrap(f"{MODEL}__init__", build)
    wrap(where, meet)


@mistake()
def mismatched_forward():
    """The ranks add up tensors of different sizes, so gloo aborts one of them."""
    import torch.distributed as dist

    from megatron_ttrace.run import stall

    def meet(old, *args, **more):
        dist.all_reduce(torch.ones(4 + 4 * global_rank()))
        return old(*args, **more)

    stall.SECONDS = 3.0
    wrap("transformer.mlp:MLP.forward", meet)


@mistake()
def stalled_forward():
    """Rank 0 enters a collective that rank 1 never joins."""
    _meet("transformer.mlp:MLP.forward", 0)


@mistake()
def stalled_building():
    _meet(f"{MODEL}__init__", 0)


@mistake()
def slow_forward():
    _meet("transformer.mlp:MLP.forward", 8)


@mistake()
def parts_of_a_checkpoint_that_are_not_loaded():
    """Moments of a weight, a router's bias, main weights of a layer, steps of the schedule."""

    def loaded(old, model, optimizer, scheduler, *args, **more):
        result = old(model, optimizer, scheduler, *args, **more)
        with torch.no_grad():
            for name, parameter in model[0].named_parameters():
                part = owned_by(optimizer).get(parameter)
                if part and name.endswith("layers.1.self_attention.linear_qkv.weight"):
                    part.state["exp_avg_sq"].zero_()
                if part and name.endswith("layers.0.self_attention.linear_proj.weight"):
                    part.main.copy_(part.main.roll(1))
            for name, buffer in model[0].named_buffers():
                if name.endswith("layers.0.mlp.router.expert_bias"):
                    buffer.zero_()
        scheduler.num_steps += 4
        scheduler.step(0)
        return result

    wrap("megatron.training.training:load_checkpoint", loaded)
