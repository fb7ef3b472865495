# SPDX-License-Identifier: Apache-2.0
"""Which losses a job has, and changing a coefficient where modules read it."""

from types import SimpleNamespace

import pytest
import torch

from megatron_ttrace.mcore.losses import hidden, present, revealed, weighted
from megatron_ttrace.trace.findings import Loss

MOE = {"num_experts": 4, "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}
INDEXER = {"num_experts": None, "dsa_indexer_loss_coeff": 0.1}


@pytest.mark.parametrize(
    ("arguments", "losses"),
    [
        ({"num_experts": None, "moe_aux_loss_coeff": 0.01, "mtp_loss_scaling_factor": 0.1}, []),
        (MOE, [Loss.AUXILIARY]),
        ({**MOE, "moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-3}, [Loss.Z]),
        ({**MOE, "moe_router_load_balancing_type": "sinkhorn"}, []),
        (
            {
                **MOE,
                "moe_router_load_balancing_type": ["seq_aux_loss", "aux_loss", "global_aux_loss"],
                "moe_aux_loss_coeff": [0.1, 0.0, 0.2],
            },
            [Loss.SEQUENCE, Loss.GLOBAL],
        ),
        ({"num_experts": None, "mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}, [Loss.MTP]),
        ({**INDEXER, "experimental_attention_variant": "dsa"}, [Loss.INDEXER]),
        ({**INDEXER, "hybrid_layer_pattern": "MD-"}, [Loss.INDEXER]),
    ],
)
def test_present(arguments, losses):
    """Those with a coefficient that is not zero, of what the model has."""
    assert list(present(SimpleNamespace(**arguments))) == losses


@pytest.mark.parametrize(
    ("arguments", "dtype", "coefficient"),
    [
        ({}, torch.bfloat16, 0.01),
        ({}, torch.float32, 0.0),
        ({"num_experts": None}, torch.bfloat16, 0.0),
        ({"moe_aux_loss_coeff": 0.0}, torch.bfloat16, 0.0),
        ({"moe_router_load_balancing_type": "none"}, torch.bfloat16, 0.0),
    ],
)
def test_hidden(arguments, dtype, coefficient):
    """In 16 bits, of a loss that there is."""
    assert hidden(SimpleNamespace(**{**MOE, **arguments}, params_dtype=dtype)) == coefficient


def test_weighted():
    """In the configs of all modules, once each; restored afterwards."""
    model, inner = torch.nn.Sequential(torch.nn.Identity()), SimpleNamespace(**MOE)
    model.config = model[0].config = inner
    with weighted([model], Loss.AUXILIARY, 64.0):
        assert inner.moe_aux_loss_coeff == 0.64
    assert inner.moe_aux_loss_coeff == 0.01
    with weighted([model], Loss.Z, 64.0):
        assert vars(inner) == MOE


def test_weighted_in_a_list():
    """The others in the list keep their coefficients."""
    model = torch.nn.Identity()
    coefficients = [0.1, 0.2]
    model.config = SimpleNamespace(
        moe_router_load_balancing_type=["seq_aux_loss", "aux_loss"], moe_aux_loss_coeff=coefficients
    )
    with weighted([model], Loss.SEQUENCE, 2.0):
        assert model.config.moe_aux_loss_coeff == [0.2, 0.2]
    assert model.config.moe_aux_loss_coeff is coefficients


@pytest.mark.parametrize(
    ("dtype", "before", "within"),
    [
        (torch.bfloat16, (0.01, 1e-4), (0.01, 0.01)),
        (torch.bfloat16, (0.01, 0.0), (0.01, 0.0)),
        (torch.float32, (0.01, 1e-4), (0.01, 1e-4)),
    ],
)
def test_revealed(dtype, before, within):
    """In 16 bits a small share of a gradient is rounded away."""
    names = "moe_aux_loss_coeff", "moe_z_loss_coeff"
    args = SimpleNamespace(**{**MOE, **dict(zip(names, before, strict=True))}, params_dtype=dtype)
    model = torch.nn.Identity()
    model.config = SimpleNamespace(**vars(args))
    with revealed(args, [model]):
        assert [getattr(model.config, name) for name in names] == pytest.approx(within)
    assert [getattr(model.config, name) for name in names] == [*before]
