# SPDX-License-Identifier: Apache-2.0
"""Numbers of a job."""

import pytest

from megatron_ttrace.mcore.numbers import numbers
from megatron_ttrace.trace.meta import ReferenceMeta


def test_numbers() -> None:
    """Tokens are products; what is absent, zero or no number is left out."""
    arguments = {"micro_batch_size": 2, "seq_length": 32, "num_layers": 3}
    arguments |= {"moe_aux_loss_coeff": 0.0, "clip_grad": 1.0, "adam_beta1": True}
    values = numbers(ReferenceMeta(identity={"arguments": arguments}, microbatches=4), 1, 2)
    assert values == {"layers": 3.0, "clip_grad": 1.0, "tokens": 64.0, "step_tokens": 256.0}
    assert numbers(ReferenceMeta(), 1, 2) == {}
    counted = {"arguments": {"calculate_per_token_loss": True}}
    assert numbers(ReferenceMeta(identity=counted, microbatches=4), 1, 2) == {"microbatches": 2.0}


@pytest.mark.parametrize(
    ("iteration", "ranks", "per_token", "scale"),
    [
        *((2, 1, False, 64.0), (3, 2, False, 32.0), (4, 3, False, 16.0), (4, 3, True, 64.0)),
        *((6, 1, False, 8.0), (1, 1, False, None)),
    ],
)
def test_the_loss_scale(iteration: int, ranks: int, per_token: bool, scale: float | None) -> None:
    """The candidate's in the block of the iteration, also if the job's own scale is dynamic."""
    arguments = {"loss_scale": None, "calculate_per_token_loss": per_token}
    scales = {"2": 64.0, "6": 8.0, "x": 1.0}
    meta = ReferenceMeta(identity={"arguments": arguments}, loss_scales=scales)
    assert numbers(meta, iteration, ranks).get("loss_scale") == scale
