# SPDX-License-Identifier: Apache-2.0
"""Which reported differences count as right."""

import pytest

from tests.assay.checkpoints.answers import Named, is_right

PROJ = "decoder.layers.1.self_attention.linear_proj.weight"


@pytest.mark.parametrize(
    ("named", "truth", "right"),
    [
        (Named("exp_avg", PROJ), ("exp_avg", PROJ), True),
        (Named("main weight", PROJ), ("main", PROJ), True),
        (Named("exp_avg", PROJ), ("momentum_buffer", PROJ), True),
        (Named("weight", PROJ.rpartition(".")[0]), ("weight", PROJ), True),
        (Named("agreed", PROJ), ("main", PROJ), True),
        (Named("agreed", PROJ), ("exp_avg", PROJ), False),
        (Named("weight", PROJ), ("exp_avg", PROJ), False),
        (Named("exp_avg", PROJ.replace("1", "0")), ("exp_avg", PROJ), False),
        (Named("exp_avg_sq", PROJ), ("exp_avg", PROJ), False),
        (Named("loss", "3"), ("exp_avg", PROJ), False),
        (Named("number", "group 0.step"), ("number", "step"), True),
        (Named("samples", "3"), ("number", "consumed_train_samples"), True),
        (Named("number", "group 0.beta1"), ("number", "step"), False),
        (Named("weight", PROJ), ("described", PROJ.replace(".1.", ".")), True),
        (Named("main weight", PROJ), ("described", f"optimizer.state.param.{PROJ}"), True),
        (Named("weight", PROJ), ("described", f"optimizer.state.exp_avg.{PROJ}"), False),
    ],
)
def test_right(named, truth, right):
    """The state must be the one that was changed, of the parameter or its module."""
    assert is_right(named, [truth]) is right
