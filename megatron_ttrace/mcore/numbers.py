# SPDX-License-Identifier: Apache-2.0
"""Numbers of a job that Megatron multiplies or divides by."""

from megatron_ttrace.trace.meta import ReferenceMeta

BETAS = {"exp_avg": "adam_beta1", "exp_avg_sq": "adam_beta2"}
"""By the name of a moment, the share of it that a step keeps."""
_ARGUMENTS = {
    "layers": "num_layers",
    "loss_scale": "loss_scale",
    "auxiliary": "moe_aux_loss_coeff",
    "z": "moe_z_loss_coeff",
    "clip_grad": "clip_grad",
    **{beta: beta for beta in BETAS.values()},
}


def numbers(meta: ReferenceMeta) -> dict[str, float]:
    """The numbers of the job of a reference trace, from its ``meta.json``; unknown ones are absent.

    ``tokens`` are those of a microbatch, ``step_tokens`` those of the global batch.
    """
    arguments = meta.identity.get("arguments")
    if not isinstance(arguments, dict):
        return {}
    values = {name: arguments.get(argument) for name, argument in _ARGUMENTS.items()}
    batch, length = arguments.get("micro_batch_size"), arguments.get("seq_length")
    if isinstance(batch, int) and isinstance(length, int):
        values["tokens"] = batch * length
        values["step_tokens"] = batch * length * meta.microbatches
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
    }
