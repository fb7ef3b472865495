# SPDX-License-Identifier: Apache-2.0
# over 500 lines because: it has a fix for every finding, and no logic
"""launch/pretrain_gpt.py with faults of Megatron's (docs/findings.md) fixed.

``FIX`` names them. A divergence that goes away with its fix has that cause and no other.
"""

import functools
import importlib
import os
import sys
import types
from collections import defaultdict
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
# A checkout of Megatron has a regular package of this name, which would come first.
sys.modules["tests"] = types.ModuleType("tests")
sys.modules["tests"].__path__ = [str(ROOT / "tests")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    get_cuda_rng_tracker,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
)
from megatron.training import get_args  # noqa: E402

from tests.assay.planted.mistakes import wrap  # noqa: E402

FIXES = defaultdict(list)
FSDP = "distributed.fsdp.src.megatron_fsdp.param_and_grad_buffer"
MUON = "optimizer.emerging_optimizers"
BUCKETS = "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"


def fix(target, name=None):
    """Let a function take the place of another one (:func:`tests.assay.planted.mistakes.wrap`).

    The function is given what it replaces, and then the arguments. It is a part of the fix
    ``name``, by default that of its own name.
    """

    def register(function):
        put_in = functools.partial(wrap, target, function)
        FIXES[name or function.__name__.replace("_", "-")].append(put_in)
        return function

    return register


def over_context_parallel(count):
    """The mean of a count over the ranks that share a sequence."""
    group = parallel_state.get_context_parallel_group()
    count = count.clone().float()
    dist.all_reduce(count, group=group)
    return count / group.size()


@fix("transformer.multi_latent_attention:apply_rotary_pos_emb")
def mla_rotary_key(rotate, t, *args, **keywords):
    """Sum the gradient of the key's rotary part over the ranks, each of which has some heads."""
    shared_by_heads = t.shape[-2] == 1
    t = copy_to_tensor_model_parallel_region(t) if shared_by_heads else t
    return rotate(t, *args, **keywords)


@fix("pipeline_parallel.schedules:forward_step_calc_loss")
def masked_tokens(calculate, model, output, loss_func, *args, **keywords):
    """Divide by the tokens of the whole sequence."""

    def counted(*inputs):
        loss, count, report = loss_func(*inputs)
        # Megatron divides by this rank's count.
        return loss * count.clamp(min=1) / over_context_parallel(count), count, report

    return calculate(model, output, counted, *args, **keywords)


@fix("transformer.multi_token_prediction:roll_tensor")
def predicted_tokens(roll, *args, **keywords):
    """Divide by the predictable tokens of the whole sequence."""
    rolled, total = roll(*args, **keywords)
    return rolled, over_context_parallel(total)


@fix("transformer.experimental_attention_variant.dsa:DSAIndexerLossAutoScaler.set_loss_scale")
def indexer(set_scale, scale):
    """Average the indexer's loss over context parallelism, and do not multiply by its size."""
    set_scale(scale / parallel_state.get_context_parallel_world_size())


@fix("extensions.transformer_engine:TEDotProductAttention.__init__", "sinks")
@fix("transformer.dot_product_attention:DotProductAttention.__init__", "sinks")
def sinks(build, self, *args, **keywords):
    """Mark the attention sinks as divided by head."""
    build(self, *args, **keywords)
    if isinstance(getattr(self, "softmax_offset", None), torch.nn.Parameter):
        self.softmax_offset.tensor_model_parallel = True
        self.softmax_offset.partition_dim = 0
        self.softmax_offset.partition_stride = 1


@fix("ssm.gated_delta_net:GatedDeltaNet.reset_parameters")
def delta_net_start(reset, self):
    """Draw a delta net's filters from the random state of this tensor-parallel rank."""
    with get_cuda_rng_tracker().fork():
        self.conv1d.reset_parameters()
    reset(self)


@fix("ssm.gated_delta_net:GatedDeltaNet.__init__")
def delta_net_norm(build, self, *args, **keywords):
    """Sum the gradient of a delta net's norm over the ranks, each of which has some heads."""
    build(self, *args, **keywords)
    norm = self.out_norm
    forward, weight = norm.forward, norm.weight

    def summed(*inputs):
        shared = copy_to_tensor_model_parallel_region(weight)
        del norm._parameters["weight"]
        norm.weight = shared
        try:
            return forward(*inputs)
        finally:
            del norm.weight
            norm.weight = weight

    norm.forward = summed


@fix(f"{FSDP}:ParamAndGradBuffer.scale_gradients")
def fsdp_scaled_gradients(_, self, factor):
    """Keep what was summed over tensor parallelism: scale the copies beside the buffers."""
    for group in self.parameter_groups:
        if group.main_grad_buffer is not None:
            group.main_grad_buffer.data *= factor
    for _, parameter in self.optimizer_named_parameters:
        group = self.parameter_groups[self.param_to_param_group[parameter.orig_param]]
        name = "decoupled_grad" if self.use_decoupled_grad else "grad"
        gradient = getattr(parameter, name)
        if gradient is not None and gradient.dtype != group.main_grad_buffer.dtype:
            gradient._local_tensor.mul_(factor)


@fix(f"{FSDP}:DataParallelBuffer.__init__")
def fsdp_single_copies(build, self, config, *args, **keywords):
    """Reduce each microbatch's gradient alone, also where one rank holds all of it."""
    strategy = config.data_parallel_sharding_strategy
    if "gradient_scaling_factor" in keywords and strategy.startswith("optim_grads"):
        keywords["is_data_distributed"] = True
    build(self, config, *args, **keywords)


@fix("models.common.utils:TransformerLayerNode.forward_impl")
def norm_after_dense(run, self, *inputs):
    """Apply the final norm after a last layer without experts, too."""
    output = run(self, *inputs)
    decoder = self.chunk_state.model.decoder
    ends = self.name == "mlp" and self.is_last_layer and not self.is_mtp
    if ends and decoder.final_layernorm and not hasattr(decoder.layers[-1].mlp, "experts"):
        output = decoder.final_layernorm(output)
    return output


@fix("distributed:TorchFullyShardedDataParallel.scale_gradients")
def fsdp2_scaled_gradients(_, self, factor):
    """Divide by all tokens of a step; torch's FSDP2 has averaged over data parallelism."""
    for parameter in self.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(float(factor) * self.process_group.size())


@fix("transformer.moe.router:TopKRouter.reset_parameters")
def meta_buffers(reset, self):
    """Set a router's bias and counters to zero, as its constructor did, once they have memory."""
    reset(self)
    for buffer in self.buffers(recurse=False):
        buffer.zero_()


@fix("extensions.transformer_engine:TEGroupedLinear.__init__")
def expert_marks(build, self, *args, **keywords):
    """Mark grouped experts' weights as divided, as TransformerEngine did until 2.12."""
    build(self, *args, **keywords)
    for weight in self.parameters(recurse=False):
        weight.tensor_model_parallel = True


@fix("transformer.experimental_attention_variant.dsa:DSAIndexer.__init__")
def indexer_marks(build, self, *args, **keywords):
    """Do not sum the indexer's gradients over TP: with SP each rank has gathered its inputs."""
    build(self, *args, **keywords)
    for parameter in self.parameters():
        parameter.sequence_parallel = False


@fix("models.gpt:GPTModel.__init__")
def train_only_sinks(build, self, *args, **keywords):
    """Train nothing but the attention sinks (no fix: shows what their norm leaves out)."""
    build(self, *args, **keywords)
    for name, parameter in self.named_parameters():
        parameter.requires_grad_("softmax_offset" in name)


@fix("optimizer.optimizer:count_zeros_fp32")
def sharded_zeros(count, parameters, *args, **keywords):
    """Leave out copies on other tensor-parallel ranks, as the gradient norm does."""
    parameters = [each for each in parameters if param_is_not_tensor_parallel_duplicate(each)]
    return count(parameters, *args, **keywords)


@fix("optimizer.optimizer:count_zeros_fp32")
def padded_zeros(count, parameters, *args, **keywords):
    """Leave out rows that pad the last shard of a weight."""
    padded = [each for each in parameters if getattr(each, "pad_length", 0)]
    zeros = count(parameters, *args, **keywords)
    return zeros - sum(each.pad_length * each.shape[1] for each in padded)


@fix("pipeline_parallel.schedules:forward_backward_no_pipelining")
def fsdp_last_microbatch(run, *, model, **keywords):
    """Mark the last microbatch of Megatron-FSDP without overlapped reductions, too."""
    from megatron.core.utils import get_model_config

    chunk = model[0] if isinstance(model, list) else model
    get_model_config(chunk).no_sync_func = chunk.no_sync
    return run(model=model, **keywords)


@fix(f"{FSDP}:_create_hfsdp_helper_buffer")
def fsdp_helper_factor(create, dp_buffer, *args, **keywords):
    """Scale gradients in the inner buffer by the factor of the buffer that it mirrors."""
    helper = create(dp_buffer, *args, **keywords)
    helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
    return helper


@fix("optimizer:_get_megatron_optimizer_based_on_param_groups")
def fsdp_outer_norm(build, *args, **keywords):
    """Sum the gradient norm over all ranks: the outer shards are of one gradient, too."""
    return build(*args, **keywords | {"intra_dist_opt_group": dist.group.WORLD})


@fix(f"{MUON}:TensorParallelAdaptiveMuon.orthogonalize", "adaptive-muon-scale")
def remember_dim(orthogonalize, self, parameter, *args, **keywords):
    """For the scale of its update."""
    self.divided = getattr(parameter, "partition_dim", -1)
    return orthogonalize(self, parameter, *args, **keywords)


@fix(f"{MUON}:TensorParallelAdaptiveMuon._apply_muon_scale", "adaptive-muon-scale")
def adaptive_muon_scale(scale, self, update, *shape):
    """Scale an update by the shape of the whole matrix, not of this rank's shard."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    whole = [size * (ranks if dim == self.divided else 1) for dim, size in enumerate(shape)]
    return scale(self, update, *whole)


QKV = set()


@fix("models.gpt:GPTModel.__init__", "muon-whole-qkv")
def remember_qkv(build, self, *args, **keywords):
    """The shapes of the matrices of queries, keys and values."""
    build(self, *args, **keywords)
    QKV.update(tuple(p.shape) for name, p in self.named_parameters() if "linear_qkv.weight" in name)


@fix(f"{MUON}:TensorParallelMuon.orthogonalize")
def muon_whole_qkv(orthogonalize, self, parameter, gradient, **keywords):
    """Split the whole matrix of queries, keys and values, where a rank has a part of a group."""
    if parameter.shape not in QKV or self.is_qkv_fn(parameter):
        return orthogonalize(self, parameter, gradient, **keywords)
    group = parallel_state.get_tensor_model_parallel_group()
    shards = [torch.empty_like(gradient) for _ in range(group.size())]
    dist.all_gather(shards, gradient.contiguous(), group=group)
    shapes, width = self.qkv_split_shapes, gradient.shape[1]
    groups = torch.cat(shards).view(-1, sum(shapes), width)
    parts = [
        self.scaled_orthogonalize_fn(part.reshape(-1, width), None, None).view(
            len(groups), -1, width
        )
        for part in groups.split(shapes, dim=1)
    ]
    whole = torch.cat(parts, dim=1).view(-1, width)
    return whole.chunk(group.size())[group.rank()]


@FIXES["adaptive-muon-runs"].append
def adaptive_muon_runs():
    """Set what main sets (no fix: without that 0.19 crashes with emerging-optimizers 0.3.0)."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon as Adaptive

    Adaptive.scale_mode, Adaptive.extra_scale_factor = "spectral", 1.0


@fix("distributed.torch_fully_sharded_data_parallel:TorchFullyShardedDataParallel.finish_grad_sync")
def fsdp2_experts(original, self, *args, **keywords):
    """With ``--expert-tensor-parallel-size 1``: sum experts' gradients over TP ranks' tokens."""
    original(self, *args, **keywords)
    for parameter in self.parameters():
        if not getattr(parameter, "allreduce", True) and parameter.grad is not None:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(parameter.grad.to_local(), group=group)


@fix("optimizer.optimizer:MixedPrecisionOptimizer.step")
def unclipped_norm(step, self):
    """Compute the norm that is logged also where nothing is clipped."""
    success, norm, zeros = step(self)
    if success and not self.config.clip_grad:
        norm = self.get_grad_norm()
    return success, norm, zeros


@FIXES["fsdp2-norm"].append
def fsdp2_norm():
    """Add up the shards' main weights over the data-parallel ranks."""
    from megatron.training.utils import common_utils

    to_local, of_weight = common_utils.to_local_if_dtensor, common_utils._get_param_data

    def shard_of(weight):
        shard = to_local(weight)
        if shard is not weight:
            shard.is_shard = True
            if hasattr(weight, "main_param"):
                shard.main_param = to_local(weight.main_param)
        return shard

    def data_of(weight, *others):
        data, is_sharded = of_weight(weight, *others)
        return data, is_sharded or hasattr(weight, "is_shard")

    common_utils.to_local_if_dtensor, common_utils._get_param_data = shard_of, data_of


@FIXES["fsdp-expert-norm"].append
def fsdp_expert_norm():
    """With ZeRO-3 and without TP every element is on one rank of the world."""
    from megatron.training.utils import common_utils

    def norm(weights):
        squared = sum(weight._local_tensor.float().square().sum() for weight in weights)
        dist.all_reduce(squared)
        return squared.item() ** 0.5

    common_utils.calc_dtensor_params_l2_norm = norm


@FIXES["layer-wise-norm"].append
def layer_wise_norm():
    """Add each main weight's norm on the rank that has it, and no other rank's bf16 copy."""
    from megatron.training.utils import common_utils

    def main_weight(param, *_):
        return getattr(param, "main_param", None), True

    common_utils._get_param_data = main_weight


@FIXES["precise-norm"].append
def precise_norm():
    """Take the model's weights: the main ones are in the optimizer's kernel."""
    from megatron.training.utils import common_utils

    common_utils._get_param_data = lambda param, *_: (param.data.float(), False)


@FIXES["gathered-norm"].append
def gathered_norm():
    """Gather weights before their norm is computed."""
    from megatron.training import training

    norm = training.calc_params_l2_norm

    def of_gathered(model, *args, **keywords):
        if get_args().overlap_param_gather:
            training.force_param_sync(model)
        return norm(model, *args, **keywords)

    training.calc_params_l2_norm = of_gathered


@fix("transformer.moe.router:TopKRouter.get_aux_loss_coeff")
def global_loss(coefficient, self, kind):
    """Data parallelism averages gradients: each rank's share of a sum has to be that much more."""
    value = coefficient(self, kind)
    if kind == "global_aux_loss":
        value *= parallel_state.get_data_parallel_world_size()
    return value


@fix("transformer.moe.router:switch_load_balancing_loss_func")
def constant_load(loss, probs, tokens_per_expert, total_num_tokens, topk, num_experts, **keywords):
    """Balance experts against a constant load (no fix: the running mean depends on the layout)."""
    shares = torch.arange(1, num_experts + 1) / sum(range(1, num_experts + 1))
    tokens = shares.to(tokens_per_expert) * total_num_tokens * topk
    return loss(probs, tokens, total_num_tokens, topk, num_experts, **keywords)


@fix("models.gpt.gpt_model:GPTModel.__init__")
def rope_scaling_factor(init, self, *args, **keywords):
    """Give the model the factor of the command line."""
    init(self, *args, **{**keywords, "rope_scaling_factor": get_args().rope_scaling_factor})


@fix("transformer.mla_qk_norm_config:QKNormConfigResolver._resolve_mla_qk_layernorm")
def whole_queries(resolve, self):
    """Queries that are not compressed have no norm of their own."""
    classes = resolve(self)
    return classes if self.has_q_lora else {**classes, "linear_q_proj": self.linear_impl}


@fix("transformer.pipeline_parallel_layer_layout:PipelineParallelLayerLayout.validate_layer_layout")
def mtp_off_first_rank(validate, self, *args, **keywords):
    """Refuse what Megatron means to refuse, also in the last virtual stage."""
    standalone = validate(self, *args, **keywords)
    first = [layer.name for layer in self.layout[0][-1]]
    assert "mtp" not in first, f"MTP is in the first pp rank: {first}"
    return standalone


@fix(
    "distributed.fsdp.src.megatron_fsdp.megatron_fsdp:MegatronFSDP._init_fsdp_param_and_grad_buffer"
)
def fsdp_outer_sum(init, self):
    """Sum over the instances, as within them: a token's share is divided later."""
    if self.calculate_per_token_loss:
        self.ddp_config.average_in_collective = False
    return init(self)


@fix(f"{MUON}:TensorParallelMuon.orthogonalize")
def muon_replicas(orthogonalize, self, parameter, gradient, **keywords):
    """A replicated weight is not gathered."""
    if not getattr(parameter, "tensor_model_parallel", False):
        parameter.partition_dim = -1
    return orthogonalize(self, parameter, gradient, **keywords)


@fix("transformer.moe.moe_logging:MoEMetricsTracker._sync_metrics")
def stages_without_experts(sync, self, *args, **keywords):
    """A stage without experts reduces over the same groups as those with experts."""
    for name, entry in self._metrics.items():
        if name == "load_balancing_loss" and entry.reduce_group is None:
            entry.reduce_group = parallel_state.get_tensor_and_context_parallel_group()
    return sync(self, *args, **keywords)


@fix("distributed.distributed_data_parallel:DistributedDataParallel.__init__")
def experts_and_shards(make, self, config, *args, **keywords):
    """Experts' gradients are divided by all ranks with different tokens."""
    make(self, config, *args, **keywords)
    if not config.calculate_per_token_loss:
        shards = config.expert_gtp_weight_remat_size / config.gtp_weight_remat_size
        for bucket in (b for buffer in self.expert_parallel_buffers for b in buffer.buckets):
            bucket.gradient_scaling_factor *= shards


@fix("distributed.distributed_data_parallel:DistributedDataParallel.__init__")
def experts_delayed(make, self, config, ddp_config, *args, **keywords):
    """Add gradients that are computed late when they are there."""
    ddp_config.delay_wgrad_compute |= config.overlap_dispatch_backward_with_experts_wgrad
    make(self, config, ddp_config, *args, **keywords)


@fix("tensor_parallel.gtp_api:configure_gtp_remat_from_recipe")
def shards_when_needed(configure, **keywords):
    """Weights are gathered when they are used, gradients scattered when they are made."""
    from megatron.core.tensor_parallel import generalized_tensor_parallelism as gtp

    configure(**keywords)
    gtp.update_gtp_config(weight_prefetch=False, async_reduction=False)


@fix("distributed.distributed_data_parallel:DistributedDataParallel.broadcast_params")
def shards_and_random_init(broadcast, self):
    """Also ranks that gather weights from each other begin with equal copies of the others."""
    broadcast(self)
    for parameter in self.module.parameters():
        if not getattr(parameter, "is_gtp_weight_remat", False):
            is_shared = getattr(parameter, "allreduce", True)
            name = "" if is_shared else "expert_"
            group = getattr(parallel_state, f"get_{name}gtp_weight_remat_group")()
            dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group)


@fix("optimizer.fully_sharded_optimizer:FullyShardedOptimizer.get_grad_stats_parallel_group")
def fsdp_v2_norm(_, self):
    """Data-parallel ranks are added up where gradients are known to be sharded."""
    return parallel_state.get_model_parallel_group()


@fix(f"{BUCKETS}.reset", "reduced-once")
def reduced_once(reset, self):
    """A bucket group reduces its gradients once a step, also if that leaves no handle."""
    self.has_started = False
    reset(self)


@fix(f"{BUCKETS}.start_grad_sync", "reduced-once")
def start_once(start, self, *args, **keywords):
    if not self.has_started:
        self.has_started = True
        start(self, *args, **keywords)


@FIXES["standalone-mtp"].append
def standalone_mtp():
    """Repeat the decoder's last layer also in a stage without decoder layers."""
    from megatron.training.models import gpt

    build = gpt.mtp_block_spec

    def of_all_layers(config, _, vp_stage=None):
        return build(config, None, vp_stage)

    gpt.mtp_block_spec = of_all_layers


@fix("transformer.moe.moe_logging:MoEMetricsTracker.ensure_initialized", "hybrid-losses")
def all_layers(original, self, name, num_layers, device=None):
    """A stage without experts has a loss for every layer, as a stage with experts has."""
    args = get_args()
    original(self, name, args.num_layers + (args.mtp_num_layers or 0), device)


@fix("models.hybrid.hybrid_block:HybridStack.forward", "hybrid-masks")
def own_masks(forward, self, *args, **keywords):
    """With sequence parallelism each rank draws from a state of its own, as for GPT."""
    if not self.config.sequence_parallel:
        return forward(self, *args, **keywords)
    with get_cuda_rng_tracker().fork():
        return forward(self, *args, **keywords)


@fix(
    "optimizer.distrib_optimizer:DistributedOptimizer.start_param_sync_for_bucket_group_subset",
    "mixed-groups",
)
def mixed_groups(start, self):
    """Also gather groups of buckets of which Muon has the first and Adam another one."""
    start(self)
    for chunk in self.model_chunks:
        for group in chunk.bucket_groups:
            tags = {
                bucket.params_list[0].is_managed_by_layer_wise_optimizer for bucket in group.buckets
            }
            if len(tags) > 1:
                group.start_param_sync()


@fix("optimizer.layer_wise_optimizer:LayerWiseDistributedOptimizer.shard_params")
def copies_of_experts(shard, self, optimizers, full_param_layouts=None):
    """Experts are divided among their copies, also if nothing else has any."""
    sizes = self.dp_cp.size(), self.expt_dp.size()
    if sizes[0] > 1 or sizes[1] == 1:
        shard(self, optimizers, full_param_layouts)
        return
    if full_param_layouts is None:
        self._shard_params_ping_pong(optimizers, *sizes)
    else:
        self._shard_params_from_layout(optimizers, full_param_layouts, *sizes)
    self.dp_cp_params_list = None


@fix(
    "transformer.experimental_attention_variant.dsa:DSAttention._get_index_share_topk_holder",
    "shared-choices",
)
def of_its_pass(holder_of, self, *args):
    """Recompute with what layers chose in the same pass, not in the latest one."""
    holder, passes = holder_of(self, *args), self.__dict__.setdefault("passes", [])
    if torch.is_grad_enabled():
        return passes.pop(0) if passes else holder
    passes.append(dict(holder))
    return holder


SAMPLER = "megatron.training.datasets.data_samplers:MegatronPretrainingRandomSampler"


@fix(f"{SAMPLER}.__init__")
def few_samples(start, self, *args, **keywords):
    """The job: a data set of 13 samples, read several times."""
    start(self, *args, **keywords)
    self.total_samples = 13
    self.last_batch_size = 13 % self.micro_batch_times_data_parallel_size


@fix(f"{SAMPLER}.__iter__")
def whole_batches(read, self):
    """Leave samples out before they are divided, not on each rank."""
    self.total_samples -= self.last_batch_size
    self.last_batch_size = 0
    return read(self)


ADAPTER = "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel"


@fix(f"{ADAPTER}.sync_rng_states_across_tp_group", "own-states")
def leave_states(sync, self):
    """Random states of a tensor-parallel rank stay its own; the common ones are equal already."""


@fix("optimizer.optimizer:_get_param_grad_norm_group")
def detached_heads(find, param):
    """Megatron-FSDP's parameters belong where those that they replace do."""
    return find(getattr(param, "orig_param", param))


FIXES.default_factory = None  # an unknown name is an error
for name in os.environ.get("FIX", "").split():
    for put_in in FIXES[name]:
        put_in()
# Not run as a script: that would change ``sys.argv[0]``, which the reference is started from.
is_hybrid = "--hybrid-layer-pattern" in sys.argv
importlib.import_module("pretrain_hybrid" if is_hybrid else "pretrain_gpt").main()
