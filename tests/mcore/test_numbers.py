# SPDX-License-Identifier: Apache-2.0
"""Numbers of a job."""

from megatron_ttrace.mcore.numbers import numbers
from megatron_ttrace.trace.meta import ReferenceMeta


def test_numbers() -> None:
    """Tokens are products; what is absent, zero or no number is left out."""
    arguments = {"micro_batch_size": 2, "seq_length": 32, "num_layers": 3, "loss_scale": None}
    arguments |= {"moe_aux_loss_coeff": 0.0, "clip_grad": 1.0, "adam_beta1": True}
    values = numbers(ReferenceMeta(identity={"arguments": arguments}, microbatches=4))
    assert values == {"layers": 3.0, "clip_grad": 1.0, "tokens": 64.0, "step_tokens": 256.0}
    assert numbers(ReferenceMeta()) == {}
