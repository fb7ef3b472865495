# SPDX-License-Identifier: Apache-2.0
"""Train with a fault in Megatron that shows on several ranks only.

``BROKEN`` names the fault. A single device, the reference, runs Megatron as it is.
"""

import dataclasses
import os
import sys
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

import torch  # noqa: E402

LAUNCH = Path(__file__).parents[2] / "launch"


def unreduced_input_gradients():
    """The second layer does not sum the gradient of its MLP's input over tensor-parallel ranks."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    forward = TransformerLayer.forward

    def broken(self, *args, **more):
        if self.layer_number == 2:
            linear = self.mlp.linear_fc1
            linear.disable_grad_reduce, linear.allreduce_dgrad = True, False
        return forward(self, *args, **more)

    TransformerLayer.forward = broken


def gradients_in_low_precision():
    """Gradients are reduced in the model's dtype, whatever the arguments say."""
    from megatron.core.distributed import DistributedDataParallelConfig as Config

    init = Config.__init__

    def broken(self, *args, **more):
        init(self, *args, **more)
        self.grad_reduce_in_fp32 = False

    Config.__init__ = broken


def filters_of_the_next_rank():
    """A context-parallel rank convolves with the next one's filters."""
    from megatron.core.ssm.mamba_context_parallel import MambaContextParallel

    take = MambaContextParallel._slice_conv_param

    def broken(self, param):
        rank = self.cp_rank
        self.cp_rank = (rank + 1) % self.cp_size
        try:
            return take(self, param)
        finally:
            self.cp_rank = rank

    MambaContextParallel._slice_conv_param = broken


def decay_of_another_head():
    """A rank's last head decays as its first one does."""
    from megatron.core.ssm.mamba_context_parallel import MambaContextParallel

    take = MambaContextParallel.get_A_log

    def broken(self):
        decay = take(self)
        return torch.cat([decay[:-1], decay[:1]])

    MambaContextParallel.get_A_log = broken


def squashed_twice():
    """A sinkhorn router's probabilities go through its activation twice."""
    from megatron.core.transformer.moe.router import TopKRouter

    route = TopKRouter.sinkhorn_load_balancing

    def broken(self, logits):
        scores, chosen = route(self, logits)
        return torch.sigmoid(scores) * chosen, chosen

    TopKRouter.sinkhorn_load_balancing = broken


def a_token_too_few():
    """Every expert drops one token more than it must."""
    from megatron.core.transformer.moe import moe_utils

    capacity = moe_utils.get_capacity
    moe_utils.get_capacity = lambda *args, **more: capacity(*args, **more) - 1


def twice_the_factor():
    """A fused router scales its probabilities twice."""
    from megatron.core.transformer.moe import moe_utils

    choose = moe_utils.fused_topk_with_score_function

    def broken(*args, **more):
        probabilities, chosen = choose(*args, **more)
        return probabilities * 1.01, chosen

    moe_utils.fused_topk_with_score_function = broken


def unscaled_by_another():
    """Gradients are divided by another loss scale than the loss was multiplied by."""
    from megatron.core.optimizer.grad_scaler import MegatronGradScaler

    inverse = MegatronGradScaler.inv_scale
    MegatronGradScaler.inv_scale = property(lambda self: inverse.fget(self) * 1.01)


def keys_of_another_head():
    """A delta net's keys change places between the heads of a rank."""
    from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet

    prepare = GatedDeltaNet._prepare_input_for_gated_delta_rule

    def broken(self, *args):
        query, key, *others = prepare(self, *args)
        return query, key.roll(1, dims=2), *others

    GatedDeltaNet._prepare_input_for_gated_delta_rule = broken


def a_microbatch_too_few():
    """Of the head's weight gradients that were put off, the last one is forgotten."""
    from megatron.core.pipeline_parallel import schedules

    compute = schedules.drain_embedding_wgrad_compute

    def broken(config, activations, gradients, *args):
        activations.pop()
        gradients.pop()
        compute(config, activations, gradients, *args)

    schedules.drain_embedding_wgrad_compute = broken


def padding_among_the_rows():
    """An expert's output starts one row late where padding is taken off."""
    from megatron.core.extensions import transformer_engine

    unpad = transformer_engine.Fp8Unpadding.forward
    transformer_engine.Fp8Unpadding.forward = lambda self, rows, *args: unpad(
        self, rows.roll(1, dims=0), *args
    )


def two_documents_in_one():
    """Attention sees the first two packed documents as one."""
    from megatron.core.extensions.transformer_engine import TEDotProductAttention

    attend = TEDotProductAttention.forward

    def broken(self, *args, packed_seq_params, **more):
        bounds = packed_seq_params.cu_seqlens_q
        joined = torch.cat([bounds[:1], bounds[2:]]) if len(bounds) > 2 else bounds
        packed = dataclasses.replace(
            packed_seq_params,
            cu_seqlens_q=joined,
            cu_seqlens_kv=joined,
            max_seqlen_q=int(joined.diff().max()),
            max_seqlen_kv=int(joined.diff().max()),
        )
        return attend(self, *args, packed_seq_params=packed, **more)

    TEDotProductAttention.forward = broken


def recomputed_from_half():
    """A block is recomputed from half of its input."""
    from megatron.core.tensor_parallel import random

    detach = random.detach_variable

    def broken(inputs):
        return tuple(
            (one * 0.99).detach().requires_grad_(one.requires_grad)
            if torch.is_tensor(one) and one.is_floating_point()
            else one
            for one in detach(inputs)
        )

    random.detach_variable = broken


def residual_without_a_gradient():
    """Half of the gradients that go around a layer's experts are lost between its pieces."""
    from megatron.core.models.common.utils import TransformerLayerNode

    run = TransformerLayerNode.backward_impl

    def broken(self, outputs, gradients):
        for one in self.detached[:1]:
            one.grad = one.grad * 0.5
        return run(self, outputs, gradients)

    TransformerLayerNode.backward_impl = broken


def rows_of_other_tokens():
    """What is dispatched while another microbatch goes back arrives one row late."""
    from megatron.core.models.common.utils import TransformerLayerNode

    run = TransformerLayerNode.forward_impl

    def broken(self, *inputs):
        output = run(self, *inputs)
        return output.roll(1, dims=0) if self.name == "moe_dispatch" else output

    TransformerLayerNode.forward_impl = broken


def weights_of_a_microbatch_too_few():
    """The third layer forgets its experts' weight gradients of the microbatch that goes last."""
    from megatron.core.transformer.moe.moe_layer import MoELayer

    compute, calls = MoELayer.backward_dw, []

    def broken(self, routed_experts=True, shared_experts=False):
        calls.append(self.layer_number == 3 and routed_experts)
        if not calls[-1] or sum(calls) > 1:
            compute(self, routed_experts, shared_experts)

    MoELayer.backward_dw = broken


def only_the_host_steps():
    """An offloading optimizer forgets the parameters that stay on the GPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    make = HybridDeviceOptimizer._init_sub_optimizers

    def broken(self):
        make(self)
        self.gpu_optimizer.step = lambda closure=None: None

    HybridDeviceOptimizer._init_sub_optimizers = broken


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    globals()[os.environ["BROKEN"]]()

sys.path.insert(0, str(LAUNCH))
import pretrain_gpt  # noqa: E402

if "--hybrid-layer-pattern" in sys.argv:
    import pretrain_hybrid

    pretrain_gpt.main(pretrain_hybrid.provide_model, "hybrid_config_from_args")
else:
    pretrain_gpt.main()
