# SPDX-License-Identifier: Apache-2.0
"""Numbers of a job that Megatron multiplies or divides by."""

from megatron_ttrace.mcore.loss_scale import of_candidate
from megatron_ttrace.trace.meta import ReferenceMeta

BETAS = {"exp_avg": "adam_beta1", "exp_avg_sq": "adam_beta2"}
"""By the name of a moment, the share of it that a step keeps."""
_ARGUMENTS = {
    "layers": "num_layers",
    "auxiliary": "moe_aux_loss_coeff",
    "z": "moe_z_loss_coeff",
    "clip_grad": "clip_grad",
    **{beta: beta for beta in BETAS.values()},
}


def numbers(meta: ReferenceMeta, iteration: int, ranks: int) -> dict[str, float]:
    """The numbers of the job of a reference trace, from its ``meta.json``; unknown ones are absent.

    ``tokens`` are those of a microbatch, ``step_tokens`` those of the global batch, which the
    candidate's ``ranks`` divide. ``loss_scale`` is the candidate's in the traced ``iteration``,
    ``microbatches`` those of a rank if tokens are counted for gradients.
    """
    arguments = meta.identity.get("arguments")
    if not isinstance(arguments, dict):
        return {}
    values = {name: arguments.get(argument) for name, argument in _ARGUMENTS.items()}
    batch, length = arguments.get("micro_batch_size"), arguments.get("seq_length")
    if isinstance(batch, int) and isinstance(length, int):
        values["tokens"] = batch * length
        values["step_tokens"] = batch * length * meta.microbatches
    factor = ranks
    if arguments.get("calculate_per_token_loss"):
        # Gradients are divided by a number of tokens, which is a sum over these.
        factor, values["microbatches"] = 1, meta.microbatches // ranks
    # Also known where it is dynamic. That of the first iteration of a block is for all of it.
    begun = [at for at in meta.loss_scales if at.isdecimal() and int(at) <= iteration]
    if begun:
        values["loss_scale"] = of_candidate(meta.loss_scales[max(begun, key=int)], factor)
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    }
