# SPDX-License-Identifier: Apache-2.0
"""Which routing depends on the layout by design."""

import argparse

import pytest
import torch

from megatron_ttrace.mcore.balancing import depends_on_layout, is_bias, keep_biases
from megatron_ttrace.trace.records import RoutingIndex

SINKHORN = {"moe_router_load_balancing_type": "sinkhorn"}
CAPACITY = {"moe_expert_capacity_factor": 1.25}
SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}


def arguments(**values):
    """Megatron's, of experts on one device."""
    plain = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "num_experts": 8}
    return argparse.Namespace(**{**plain, "sequence_parallel": False, **values})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (SINKHORN, ()),
        (SP, ()),
        ({**SINKHORN, "tensor_model_parallel_size": 2}, ()),
        ({**SINKHORN, "sequence_parallel": True}, ()),
        ({**SINKHORN, **SP}, (RoutingIndex.CHOICE,)),
        ({**SINKHORN, "context_parallel_size": 2}, (RoutingIndex.CHOICE,)),
        (
            {"moe_router_load_balancing_type": ["aux_loss", "sinkhorn"], **SP},
            (RoutingIndex.CHOICE,),
        ),
        ({**CAPACITY, **SP}, (RoutingIndex.KEPT,)),
        ({**CAPACITY, **SINKHORN, **SP}, (RoutingIndex.CHOICE, RoutingIndex.KEPT)),
        ({**CAPACITY, **SP, "num_experts": None}, ()),
    ],
)
def test_where_a_rank_has_a_part_of_the_tokens(values, expected):
    """Only there, and only what looks at all of them."""
    assert tuple(depends_on_layout(arguments(**values))) == expected


def test_biases_have_the_precision_that_routers_use():
    """Before a first forward pass, too, in releases that leave them in the model's."""

    class Router(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("expert_bias", torch.zeros(4, dtype=torch.bfloat16))

        def _maintain_float32_expert_bias(self):
            self.expert_bias.data = self.expert_bias.data.float()

    router = Router()
    keep_biases([torch.nn.Sequential(torch.nn.Linear(2, 2), router)])
    assert router.expert_bias.dtype == torch.float32


@pytest.mark.parametrize(
    ("buffer", "expected"),
    [
        ("decoder.layers.0.mlp.router.expert_bias", True),
        ("decoder.layers.0.mlp.router.qb_beta", True),
        ("decoder.layers.0.mlp.router.qb_beta_accum", False),
        ("decoder.layers.0.mlp.router.local_tokens_per_expert", False),
    ],
)
def test_biases_of_routers(buffer, expected):
    """They get start values: with zeros, nothing shows what becomes of the old ones."""
    assert is_bias(buffer) is expected
