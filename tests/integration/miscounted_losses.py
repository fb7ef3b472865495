# SPDX-License-Identifier: Apache-2.0
"""Train with a fault in the share that one of several losses has in the gradients.

``MISCOUNTED`` names the fault. A single device, the reference, runs Megatron as it is.
"""

import os
import sys
from pathlib import Path

import megatron_ttrace

megatron_ttrace.enable()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import gpt_model  # noqa: E402
from megatron.core.num_microbatches_calculator import get_num_microbatches  # noqa: E402
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler  # noqa: E402
from megatron.core.transformer.moe.router import TopKRouter  # noqa: E402
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler  # noqa: E402


def auxiliary_loss_of_every_rank(first=1, last=2):
    """Each tensor-parallel rank adds the whole auxiliary loss's gradient; the log is right."""
    attach = TopKRouter.attach_and_log_load_balancing_loss

    def attached(self, activation, aux_loss_coeff, aux_loss, *args, **more):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        ranks = ranks if first <= self.layer_number <= last else 1
        return attach(self, activation, aux_loss_coeff * ranks, aux_loss * ranks, *args, **more)

    TopKRouter.attach_and_log_load_balancing_loss = attached


def auxiliary_loss_of_the_first_layer():
    """The same in the first layer only, below one whose auxiliary loss is right."""
    auxiliary_loss_of_every_rank(last=1)


def losses_of_every_microbatch():
    """The losses of routers are not divided by the number of microbatches."""
    scale = MoEAuxLossAutoScaler.set_loss_scale
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(
        lambda it: scale(it * get_num_microbatches())
    )


def no_z_loss(right=0):
    """The z loss is logged, and has no gradient, after ``right`` calls that are right."""
    apply, calls = TopKRouter.apply_z_loss, []

    def applied(self, logits, *args, **more):
        calls.append(self)
        with_loss = apply(self, logits if len(calls) <= right else logits.detach(), *args, **more)
        return with_loss if len(calls) <= right else logits

    TopKRouter.apply_z_loss = applied


def no_z_loss_in_the_second_step():
    """The first step's routers, two in each of three microbatches, are right."""
    no_z_loss(right=6)


def head_without_mtp():
    """Multi-token prediction takes the head's weight for a frozen one."""
    process = gpt_model.process_mtp_loss

    def processed(*args, output_layer, **more):
        output_layer.weight.requires_grad_(False)
        try:
            return process(*args, output_layer=output_layer, **more)
        finally:
            output_layer.weight.requires_grad_(True)

    gpt_model.process_mtp_loss = processed


def mtp_of_every_microbatch():
    """The loss of multi-token prediction is not divided by the number of microbatches."""
    scale = MTPLossAutoScaler.set_loss_scale
    MTPLossAutoScaler.set_loss_scale = lambda it: scale(it * get_num_microbatches())


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    globals()[os.environ["MISCOUNTED"]]()

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import pretrain_gpt  # noqa: E402

pretrain_gpt.main()
