# SPDX-License-Identifier: Apache-2.0
"""Train with a fault in which elements Megatron counts, or in a number that it logs.

``MISCOUNTED`` names the fault. A single device, the reference, runs Megatron as it is.
"""

import importlib
import os
import sys
from pathlib import Path
from types import FunctionType

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.optimizer import optimizer  # noqa: E402

SMALL = 64
"""Elements of the largest layer norm and bias of these jobs."""


def small_ones_on_every_rank():
    """Small parameters are in the gradient norm once for each tensor-parallel rank."""
    is_first = tensor_parallel.param_is_not_tensor_parallel_duplicate
    tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda parameter, **more: (
        parameter.numel() <= SMALL or is_first(parameter, **more)
    )


def embedding_on_both_stages():
    """Both copies of the tied embedding are in the gradient norm."""
    optimizer.param_is_not_shared = lambda parameter: True


def stages_apart():
    """Each pipeline stage has a gradient norm of its own."""
    optimizer.MegatronOptimizer.get_grad_stats_parallel_group = lambda self: (
        parallel_state.get_tensor_model_parallel_group()
    )


def another_norm_for_experts():
    """Experts are clipped by another norm than everything else, by one millionth."""
    step = optimizer.ChainedOptimizer.step

    def stepped(self):
        clip = optimizer.clip_grad_by_total_norm_fp32

        def clipped(parameters, max_norm, total_norm, **more):
            if not getattr(parameters[0], "allreduce", True):
                total_norm = total_norm * (1 + 1e-6)
            clip(parameters, max_norm=max_norm, total_norm=total_norm, **more)

        optimizer.clip_grad_by_total_norm_fp32 = clipped
        try:
            return step(self)
        finally:
            optimizer.clip_grad_by_total_norm_fp32 = clip

    optimizer.ChainedOptimizer.step = stepped


def reductions(times):
    """Each group of buckets is reduced so many times."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    start = Group.start_grad_sync

    def started(self, *args, **more):
        for _ in range(times):
            start(self, *args, **more)

    Group.start_grad_sync = started


def bucket_skipped():
    """Gradients are not reduced."""
    reductions(0)


def bucket_twice():
    """Gradients are reduced twice; because they are means, to the same values."""
    reductions(2)


def first_not_stepped():
    """The first parameter of the optimizer's first group is left out of each step."""
    step = optimizer.FP32Optimizer.step_with_ready_grads

    def stepped(self):
        parameters = self.optimizer.param_groups[0]["params"]
        first = parameters.pop(0)
        try:
            return step(self)
        finally:
            parameters.insert(0, first)

    optimizer.FP32Optimizer.step_with_ready_grads = stepped


def zeros_twice():
    """The logged number of zeros is twice what was counted."""
    for kind in (optimizer.ChainedOptimizer, optimizer.MegatronOptimizer):
        count = kind.count_zeros
        kind.count_zeros = lambda self, count=count: 2 * count(self)


def nothing_logged():
    """Megatron's log of a step is empty."""
    from megatron.training import training

    code = compile("def training_log(*args, **more): pass", __file__, "exec")
    FunctionType(code, vars(training))()


def auxiliary_loss_per_rank():
    """The logged auxiliary loss is a sum over tensor-parallel ranks that all have the whole."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    record = MoEMetricsTracker.record

    def recorded(self, name, value, *args, **more):
        record(
            self, name, value * parallel_state.get_tensor_model_parallel_world_size(), *args, **more
        )

    MoEMetricsTracker.record = recorded


def sums_and_counts_kept():
    """Logged sums are not emptied, and biases of experts are updated by each rank's own tokens."""
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker

    def updated(tokens, bias, rate, *args, **more):
        return bias + (tokens.mean(dim=-1, keepdim=True) - tokens).sign() * rate

    finalizing = importlib.import_module("megatron.core.distributed.finalize_model_grads")
    finalizing.get_updated_expert_bias = updated
    MoEMetricsTracker.clear = lambda self: None


def another_group():
    """The second rank steps norms and biases with five times the learning rate."""
    optimizers = importlib.import_module("megatron.core.optimizer")
    grouped = optimizers._get_param_groups

    def grouping(*args, **more):
        groups = grouped(*args, **more)
        for group in groups:
            if group["wd_mult"] == 0 and int(os.environ["RANK"]) == 1:
                group["max_lr"] *= 5
        return groups

    optimizers._get_param_groups = grouping


def gradients_kept():
    """Gradients are not zeroed when a step begins."""
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer

    _ParamAndGradBuffer.reset = lambda self: None


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    globals()[os.environ["MISCOUNTED"]]()

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import pretrain_gpt  # noqa: E402

pretrain_gpt.main()
