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


def auxiliary_loss_of_every_rank():
    """Each tensor-parallel rank adds the whole auxiliary loss's gradient; the log is right."""
    attach = TopKRouter.attach_and_log_load_balancing_loss

    def attached(self, activation, aux_loss_coeff, aux_loss, *args, **more):
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        return attach(self, activation, aux_loss_coeff * ranks, aux_loss * ranks, *args, **more)

    TopKRouter.attach_and_log_load_balancing_loss = attached


def losses_of_every_microbatch():
    """The losses of routers are not divided by the number of microbatches."""
    scale = MoEAuxLossAutoScaler.set_loss_scale
    MoEAuxLossAutoScaler.set_loss_scale = staticmethod(
        lambda it: scale(it * get_num_microbatches())
    )


def no_z_loss():
    """The z loss is logged, and has no gradient."""
    apply = TopKRouter.apply_z_loss

    def applied(self, logits, *args, **more):
        apply(self, logits.detach(), *args, **more)
        return logits

    TopKRouter.apply_z_loss = applied


def head_without_mtp():
    """Multi-token prediction has no gradient of the head's weight."""
    process = gpt_model.process_mtp_loss

    def processed(*args, output_layer, output_weight, **more):
        weight = output_layer.weight if output_weight is None else output_weight
        return process(*args, output_layer=output_layer, output_weight=weight.detach(), **more)

    gpt_model.process_mtp_loss = processed


if int(os.environ.get("WORLD_SIZE", "1")) > 1:
    globals()[os.environ["MISCOUNTED"]]()

sys.path.insert(0, str(Path(__file__).parents[2] / "launch"))
import pretrain_gpt  # noqa: E402

pretrain_gpt.main()
