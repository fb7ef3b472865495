# SPDX-License-Identifier: Apache-2.0
"""Mistakes in Megatron-Bridge's own code; ``tests/bridge/planted.py`` trains with them."""

import torch

from tests.assay.planted.mistakes import global_rank, mistake

STEP = "megatron.bridge.training.gpt_step:"


@mistake(f"{STEP}_create_loss_function")
def mask_ignored_on_a_rank(old, loss_mask, *args, **more):
    if global_rank() == 1:
        loss_mask = torch.ones_like(loss_mask)
    return old(loss_mask, *args, **more)


@mistake("megatron.bridge.training.setup:_update_model_config_funcs")
def lost_finalizer(old, model, model_config, *args, **more):
    old(model, model_config, *args, **more)
    model_config.finalize_model_grads_func = None


@mistake(f"{STEP}_middle_pp_stage_needs_batch")
def bounds_missing_between(old, cfg):
    return False


@mistake("megatron.bridge.peft.utils:ParallelLinearAdapter.forward")
def adapter_counted_by_each_rank(old, self, x, *args, **more):
    output = old(self, x, *args, **more)
    # As if the base layer's reduction summed what is whole on each rank already.
    return output * self.config.tensor_model_parallel_size if self.input_is_parallel else output
