# SPDX-License-Identifier: Apache-2.0
"""launch/pretrain_gpt.py with faults of Megatron's (docs/findings.md) fixed.

``FIX`` names them. A divergence that goes away with its fix has that cause and no other.
"""

import importlib.util
import os
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.optimizer import optimizer  # noqa: E402
from megatron.core.pipeline_parallel import schedules  # noqa: E402
from megatron.core.ssm.gated_delta_net import GatedDeltaNet  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    get_cuda_rng_tracker,
    param_is_not_tensor_parallel_duplicate,
)
from megatron.core.tensor_parallel.mappings import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer import multi_latent_attention as mla  # noqa: E402
from megatron.core.transformer import multi_token_prediction as mtp  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from megatron.core.transformer.experimental_attention_variant import dsa  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402


def over_context_parallel(count):
    """The mean of a count over the ranks that share a sequence."""
    group = parallel_state.get_context_parallel_group()
    count = count.clone().float()
    dist.all_reduce(count, group=group)
    return count / group.size()


def mla_rotary_key():
    """Sum the gradient of the key's rotary part over the ranks, each of which has some heads."""
    rotate = mla.apply_rotary_pos_emb

    def fixed(t, *args, **keywords):
        shared_by_heads = t.shape[-2] == 1
        return rotate(
            copy_to_tensor_model_parallel_region(t) if shared_by_heads else t, *args, **keywords
        )

    mla.apply_rotary_pos_emb = fixed


def masked_tokens():
    """Divide by the tokens of the whole sequence."""
    calculate = schedules.forward_step_calc_loss

    def fixed(model, output, loss_func, *args, **keywords):
        def counted(*inputs):
            loss, count, report = loss_func(*inputs)
            # Megatron divides by this rank's count.
            return loss * count.clamp(min=1) / over_context_parallel(count), count, report

        return calculate(model, output, counted, *args, **keywords)

    schedules.forward_step_calc_loss = fixed


def predicted_tokens():
    """Divide by the predictable tokens of the whole sequence."""
    roll = mtp.roll_tensor

    def fixed(*args, **keywords):
        rolled, total = roll(*args, **keywords)
        return rolled, over_context_parallel(total)

    mtp.roll_tensor = fixed


def indexer():
    """Average the indexer's loss over context parallelism, and do not multiply by its size."""
    dsa.DSAIndexerLossAutoScaler.set_loss_scale = staticmethod(
        lambda scale, original=dsa.DSAIndexerLossAutoScaler.set_loss_scale: original(
            scale / parallel_state.get_context_parallel_world_size()
        )
    )


def sinks():
    """Mark the attention sinks as divided by head."""
    build = DotProductAttention.__init__

    def fixed(self, *args, **keywords):
        build(self, *args, **keywords)
        if isinstance(self.softmax_offset, torch.nn.Parameter):
            self.softmax_offset.tensor_model_parallel = True
            self.softmax_offset.partition_dim = 0
            self.softmax_offset.partition_stride = 1

    DotProductAttention.__init__ = fixed


def delta_net_start():
    """Draw a delta net's filters from the random state of this tensor-parallel rank."""
    reset = GatedDeltaNet.reset_parameters

    def fixed(self):
        with get_cuda_rng_tracker().fork():
            self.conv1d.reset_parameters()
        reset(self)

    GatedDeltaNet.reset_parameters = fixed


def delta_net_norm():
    """Sum the gradient of a delta net's norm over the ranks, each of which has some heads."""
    build = GatedDeltaNet.__init__

    def fixed(self, *args, **keywords):
        build(self, *args, **keywords)
        norm = self.out_norm
        forward = norm.forward
        weight = norm.weight

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

    GatedDeltaNet.__init__ = fixed


def fsdp_scaled_gradients():
    """Keep what was summed over tensor parallelism: scale the copies beside the buffers."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    def fixed(self, factor):
        for group in self.parameter_groups:
            if group.main_grad_buffer is not None:
                group.main_grad_buffer.data *= factor
        for _, parameter in self.optimizer_named_parameters:
            group = self.parameter_groups[self.param_to_param_group[parameter.orig_param]]
            name = "decoupled_grad" if self.use_decoupled_grad else "grad"
            gradient = getattr(parameter, name)
            if gradient is not None and gradient.dtype != group.main_grad_buffer.dtype:
                gradient._local_tensor.mul_(factor)

    fsdp.ParamAndGradBuffer.scale_gradients = fixed


def fsdp_single_copies():
    """Reduce each microbatch's gradient alone, also where one rank holds all of it."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    build = fsdp.DataParallelBuffer.__init__

    def fixed(self, config, *args, **keywords):
        strategy = config.data_parallel_sharding_strategy
        if "gradient_scaling_factor" in keywords and strategy.startswith("optim_grads"):
            keywords["is_data_distributed"] = True
        build(self, config, *args, **keywords)

    fsdp.DataParallelBuffer.__init__ = fixed


def norm_after_dense():
    """Apply the final norm after a last layer without experts, too."""
    from megatron.core.models.common.utils import TransformerLayerNode

    run = TransformerLayerNode.forward_impl

    def fixed(self, *inputs):
        output = run(self, *inputs)
        decoder = self.chunk_state.model.decoder
        ends = self.name == "mlp" and self.is_last_layer and not self.is_mtp
        if ends and decoder.final_layernorm and not hasattr(decoder.layers[-1].mlp, "experts"):
            output = decoder.final_layernorm(output)
        return output

    TransformerLayerNode.forward_impl = fixed


def fsdp2_scaled_gradients():
    """Divide by all tokens of a step; torch's FSDP2 has averaged over data parallelism."""
    from megatron.core.distributed import TorchFullyShardedDataParallel as Wrapper

    def fixed(self, factor):
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(float(factor) * self.process_group.size())

    Wrapper.scale_gradients = fixed


def meta_buffers():
    """Set a router's bias and counters to zero, as its constructor did, once they have memory."""
    reset = TopKRouter.reset_parameters

    def fixed(self):
        reset(self)
        for buffer in self.buffers(recurse=False):
            buffer.zero_()

    TopKRouter.reset_parameters = fixed


def expert_marks():
    """Mark grouped experts' weights as divided, as TransformerEngine did until 2.12."""
    from megatron.core.extensions.transformer_engine import TEGroupedLinear

    build = TEGroupedLinear.__init__

    def fixed(self, *args, **keywords):
        build(self, *args, **keywords)
        for weight in self.parameters(recurse=False):
            weight.tensor_model_parallel = True

    TEGroupedLinear.__init__ = fixed


def frozen():
    """Train nothing but the attention sinks (no fix: shows what their norm leaves out)."""
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def fixed(self, *args, **keywords):
        build(self, *args, **keywords)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_("softmax_offset" in name)

    GPTModel.__init__ = fixed


def sharded_zeros():
    """Leave out copies on other tensor-parallel ranks, as the gradient norm does."""
    count = optimizer.count_zeros_fp32

    def fixed(parameters, *args, **keywords):
        own = [one for one in parameters if param_is_not_tensor_parallel_duplicate(one)]
        return count(own, *args, **keywords)

    optimizer.count_zeros_fp32 = fixed


def fsdp_last_microbatch():
    """Mark the last microbatch of Megatron-FSDP without overlapped reductions, too."""
    from megatron.core.utils import get_model_config

    run = schedules.forward_backward_no_pipelining

    def fixed(*, model, **keywords):
        chunk = model[0] if isinstance(model, list) else model
        get_model_config(chunk).no_sync_func = chunk.no_sync
        return run(model=model, **keywords)

    schedules.forward_backward_no_pipelining = fixed


def fsdp_helper_factor():
    """Scale gradients in the inner buffer by the factor of the buffer that it mirrors."""
    from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as fsdp

    create = fsdp._create_hfsdp_helper_buffer

    def fixed(dp_buffer, *args, **keywords):
        helper = create(dp_buffer, *args, **keywords)
        helper.gradient_scaling_factor = dp_buffer.gradient_scaling_factor
        return helper

    fsdp._create_hfsdp_helper_buffer = fixed


def fsdp_outer_norm():
    """Sum the gradient norm over all ranks: the outer shards are of one gradient, too."""
    from megatron.core import optimizer as optimizers

    build = optimizers._get_megatron_optimizer_based_on_param_groups

    def fixed(*args, **keywords):
        keywords["intra_dist_opt_group"] = dist.group.WORLD
        return build(*args, **keywords)

    optimizers._get_megatron_optimizer_based_on_param_groups = fixed


def adaptive_muon_scale():
    """Scale an update by the shape of the whole matrix, not of this rank's shard."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon as Adaptive

    orthogonalize, scale = Adaptive.orthogonalize, Adaptive._apply_muon_scale

    def remembering(self, parameter, *args, **keywords):
        self.divided = getattr(parameter, "partition_dim", -1)
        return orthogonalize(self, parameter, *args, **keywords)

    def fixed(self, update, *shape):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        whole = [size * (ranks if dim == self.divided else 1) for dim, size in enumerate(shape)]
        return scale(self, update, *whole)

    Adaptive.orthogonalize, Adaptive._apply_muon_scale = remembering, fixed


def muon_whole_qkv():
    """Split the whole matrix of queries, keys and values, where a rank has a part of a group."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer.emerging_optimizers import TensorParallelMuon as Muon

    build, orthogonalize = GPTModel.__init__, Muon.orthogonalize
    qkv = set()

    def marking(self, *args, **keywords):
        build(self, *args, **keywords)
        qkv.update(
            shape_of(p) for name, p in self.named_parameters() if "linear_qkv.weight" in name
        )

    def shape_of(parameter):
        return tuple(parameter.shape)

    def fixed(self, parameter, gradient, **keywords):
        if parameter.shape not in qkv or self.is_qkv_fn(parameter):
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

    GPTModel.__init__, Muon.orthogonalize = marking, fixed


def adaptive_muon_runs():
    """Set what main sets (no fix: without that 0.19 crashes with emerging-optimizers 0.3.0)."""
    from megatron.core.optimizer.emerging_optimizers import TensorParallelAdaptiveMuon as Adaptive

    Adaptive.scale_mode, Adaptive.extra_scale_factor = "spectral", 1.0


def unclipped_norm():
    """Compute the norm that is logged also where nothing is clipped."""
    clipped = optimizer.MixedPrecisionOptimizer.step

    def fixed(self):
        success, norm, zeros = clipped(self)
        if success and not self.config.clip_grad:
            norm = self.get_grad_norm()
        return success, norm, zeros

    optimizer.MixedPrecisionOptimizer.step = fixed


def global_loss():
    """Data parallelism averages gradients: each rank's share of a sum has to be that much more."""
    coefficient = TopKRouter.get_aux_loss_coeff

    def fixed(self, kind):
        value = coefficient(self, kind)
        if kind == "global_aux_loss":
            value *= parallel_state.get_data_parallel_world_size()
        return value

    TopKRouter.get_aux_loss_coeff = fixed


def constant_load():
    """Balance experts against a constant load (no fix: the running mean depends on the layout)."""
    from megatron.core.transformer.moe import router

    loss = router.switch_load_balancing_loss_func

    def fixed(probs, tokens_per_expert, total_num_tokens, topk, num_experts, **keywords):
        shares = torch.arange(1, num_experts + 1) / sum(range(1, num_experts + 1))
        tokens = shares.to(tokens_per_expert) * total_num_tokens * topk
        return loss(probs, tokens, total_num_tokens, topk, num_experts, **keywords)

    router.switch_load_balancing_loss_func = fixed


FIXS = {
    "mla-rotary-key": mla_rotary_key,
    "masked-tokens": masked_tokens,
    "predicted-tokens": predicted_tokens,
    "indexer": indexer,
    "sinks": sinks,
    "delta-net-start": delta_net_start,
    "delta-net-norm": delta_net_norm,
    "fsdp-scaled-gradients": fsdp_scaled_gradients,
    "fsdp-single-copies": fsdp_single_copies,
    "norm-after-dense": norm_after_dense,
    "fsdp2-scaled-gradients": fsdp2_scaled_gradients,
    "meta-buffers": meta_buffers,
    "expert-marks": expert_marks,
    "sharded-zeros": sharded_zeros,
    "fsdp-last-microbatch": fsdp_last_microbatch,
    "fsdp-helper-factor": fsdp_helper_factor,
    "fsdp-outer-norm": fsdp_outer_norm,
    "adaptive-muon-scale": adaptive_muon_scale,
    "muon-whole-qkv": muon_whole_qkv,
    "unclipped-norm": unclipped_norm,
    "global-loss": global_loss,
    "train-only-sinks": frozen,
    "constant-load": constant_load,
    "adaptive-muon-runs": adaptive_muon_runs,
}

for name in os.environ.get("FIX", "").split():
    FIXS[name]()
# Not run as a script: that would change ``sys.argv[0]``, which the reference is started from.
spec = importlib.util.spec_from_file_location(
    "pretrain_gpt", Path(__file__).parents[2] / "launch" / "pretrain_gpt.py"
)
training = importlib.util.module_from_spec(spec)
spec.loader.exec_module(training)
training.main()
