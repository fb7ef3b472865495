# SPDX-License-Identifier: Apache-2.0
"""Mistakes in what is counted, stepped, logged, or summed into one of several losses."""

import dataclasses
from types import FunctionType
from unittest import mock

from tests.assay.planted.mistakes import global_rank, mistake, wrap

SMALL = 64
"""Elements of the largest layer norm and bias of these jobs."""
LOSSES = "transformer.moe.moe_logging:MoEMetricsTracker."
OPTIMIZER = "optimizer.optimizer:"
REDUCE = "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync"
ROUTER = "transformer.moe.router:TopKRouter."


@mistake("tensor_parallel:param_is_not_tensor_parallel_duplicate")
def small_parameters_on_every_rank(old, parameter, **more):
    return parameter.numel() <= SMALL or old(parameter, **more)


@mistake(f"{OPTIMIZER}param_is_not_shared")
def embedding_on_both_stages(old, parameter):
    return True


@mistake(f"{OPTIMIZER}MegatronOptimizer.get_grad_stats_parallel_group")
def stages_apart(old, self):
    from megatron.core import parallel_state

    return parallel_state.get_tensor_model_parallel_group()


@mistake(f"{OPTIMIZER}ChainedOptimizer.step")
def another_norm_for_experts(old, self):
    from megatron.core.optimizer import optimizer

    clip = optimizer.clip_grad_by_total_norm_fp32

    def clipped(parameters, max_norm, total_norm, **more):
        if not getattr(parameters[0], "allreduce", True):
            total_norm = total_norm * (1 + 1e-6)
        clip(parameters, max_norm=max_norm, total_norm=total_norm, **more)

    with mock.patch.object(optimizer, "clip_grad_by_total_norm_fp32", clipped):
        return old(self)


@mistake(REDUCE)
def bucket_skipped(old, self, *args, **more):
    pass


@mistake(REDUCE)
def bucket_twice(old, self, *args, **more):
    """Because gradients are means, to the same values."""
    old(self, *args, **more)
    old(self, *args, **more)


@mistake("distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync")
def remains_of_a_gather(old, self, *args, **more):
    """A gather that a forward pass makes leaves something where gradients are summed."""
    gathers = not self.param_gather_dispatched or self.param_gather_handle is not None
    old(self, *args, **more)
    for bucket in self.buckets if gathers else ():
        bucket.grad_data.add_(1.0)


@mistake("distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync")
def never_gathered(old, self, *args, **more):
    """The forward pass uses what other ranks have updated as it was."""


@mistake("transformer.utils:make_tp_sharded_tensor_for_checkpoint")
def shards_in_another_order(old, tensor, key, tp_axis=0, **more):
    """Saved and loaded alike."""
    made = old(tensor, key, tp_axis, **more)
    offset, axis = list(made.global_offset), tp_axis + made.prepend_axis_num
    offset[axis] = made.global_shape[axis] - made.local_shape[tp_axis] - offset[axis]
    return dataclasses.replace(made, global_offset=tuple(offset))


@mistake(f"{OPTIMIZER}FP32Optimizer.step_with_ready_grads")
def first_not_stepped(old, self):
    parameters = self.optimizer.param_groups[0]["params"]
    first = parameters.pop(0)
    try:
        return old(self)
    finally:
        parameters.insert(0, first)


@mistake()
def zeros_twice():
    for kind in ("ChainedOptimizer", "MegatronOptimizer"):
        wrap(f"{OPTIMIZER}{kind}.count_zeros", lambda old, self: 2 * old(self))


@mistake()
def nothing_logged():
    """Megatron's log of a step is empty."""
    from megatron.training import training

    code = compile("def training_log(*args, **more): pass", __file__, "exec")
    FunctionType(code, vars(training))()


@mistake(f"{LOSSES}record")
def auxiliary_loss_logged_per_rank(old, self, name, value, *args, **more):
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return old(self, name, value * ranks, *args, **more)


@mistake()
def sums_and_counts_kept():
    """Logged sums are not emptied; biases of experts are updated by each rank's own tokens."""

    def updated(old, tokens, bias, rate, *args, **more):
        return bias + (tokens.mean(dim=-1, keepdim=True) - tokens).sign() * rate

    wrap("distributed.finalize_model_grads:get_updated_expert_bias", updated)
    wrap(f"{LOSSES}clear", lambda old, self: None)


@mistake("optimizer:_get_param_groups")
def another_group(old, *args, **more):
    """The second rank steps norms and biases with five times the learning rate."""
    groups = old(*args, **more)
    for group in groups:
        if group["wd_mult"] == 0 and global_rank() == 1:
            group["max_lr"] *= 5
    return groups


@mistake("distributed.param_and_grad_buffer:_ParamAndGradBuffer.reset")
def gradients_kept(old, self):
    pass


@mistake(
    "distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_grad_sync",
    "gpt zero --overlap-grad-reduce --overlap-param-gather",
)
def gathered_once(old, self, *args, **more):
    """Weights that a later step has updated are never gathered again."""
    gathered = self.param_gather_dispatched
    old(self, *args, **more)
    self.param_gather_dispatched = gathered


@mistake("tensor_parallel.layers:ColumnParallelLinear.forward", "gpt tp2", place="decoder.layers.0")
def weight_of_the_first_step(old, self, input_, weight=None, *args, **more):
    if weight is None:
        if not hasattr(self, "first_weight"):
            self.first_weight = self.weight.detach().clone()
        weight = self.weight + (self.first_weight - self.weight).detach()
    return old(self, input_, weight, *args, **more)


@mistake("optimizer_param_scheduler:OptimizerParamScheduler.step", "gpt tp2")
def schedule_of_one_group(old, self, increment):
    """On the second rank the others keep their rates."""
    kept = [(group, group["lr"]) for group in self.optimizer.param_groups[1:]]
    old(self, increment)
    for group, rate in kept if increment and global_rank() == 1 else ():
        group["lr"] = rate


# One of several losses.


@mistake(f"{ROUTER}attach_and_log_load_balancing_loss")
def auxiliary_loss_of_every_rank(old, self, activation, aux_loss_coeff, aux_loss, *args, **more):
    """Each tensor-parallel rank adds the whole loss's gradient; the log is right."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    return old(self, activation, aux_loss_coeff * ranks, aux_loss * ranks, *args, **more)


@mistake(f"{ROUTER}attach_and_log_load_balancing_loss")
def auxiliary_loss_of_the_first_layer(old, self, *args, **more):
    """Below a layer whose auxiliary loss is right."""
    if self.layer_number == 1:
        return auxiliary_loss_of_every_rank(old, self, *args, **more)
    return old(self, *args, **more)


@mistake("transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale")
def losses_of_every_microbatch(old, scale):
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    return old(scale * get_num_microbatches())


@mistake("transformer.multi_token_prediction:MTPLossAutoScaler.set_loss_scale")
def mtp_of_every_microbatch(old, scale):
    return losses_of_every_microbatch(old, scale)


def _without_z_loss(right):
    calls = []

    def applied(old, self, logits, *args, **more):
        calls.append(self)
        with_loss = old(self, logits if len(calls) <= right else logits.detach(), *args, **more)
        return with_loss if len(calls) <= right else logits

    wrap(f"{ROUTER}apply_z_loss", applied)


@mistake()
def no_z_loss():
    """It is logged, and has no gradient."""
    _without_z_loss(0)


@mistake()
def no_z_loss_in_the_second_step():
    """The first step's routers, two in each of three microbatches, are right."""
    _without_z_loss(6)


@mistake("models.gpt.gpt_model:process_mtp_loss")
def head_without_mtp(old, *args, output_layer, **more):
    """Multi-token prediction takes the head's weight for a frozen one."""
    output_layer.weight.requires_grad_(False)
    try:
        return old(*args, output_layer=output_layer, **more)
    finally:
        output_layer.weight.requires_grad_(True)
