# SPDX-License-Identifier: Apache-2.0
"""Which tensors are partial: of shared keys, of shared groups, of experts run in pieces."""

import types

import pytest
import torch

from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.partials import partials
from megatron_ttrace.trace.records import Kind


class DSAttention(torch.nn.Module):
    """By its name only."""


class AbsorbedMLASelfAttention(torch.nn.Module):
    """Its queries and keys are latents."""


def names(**modules):
    """A chunk with these modules."""
    return Names({name.replace("__", "."): m for name, m in modules.items()}, {}, {}, frozenset())


def test_the_key_and_the_weight_of_an_absorbed_one():
    """All heads share the key; the weight's gradient is of a rank's own tokens."""
    chunk = names(a=AbsorbedMLASelfAttention(), a__core=DSAttention(), b=torch.nn.Linear(1, 1))
    assert partials([chunk]) == {
        (Kind.GRAD_INPUT, "a.core", 1): "tp",
        (Kind.GRAD_INPUT, "a.core", 6): "cp",
    }


def test_others():
    """A key of its own for every head is divided like the queries."""
    assert partials([names(a=torch.nn.Identity(), a__core=DSAttention())]) == {}
    assert partials([names(a=AbsorbedMLASelfAttention(), a__core=torch.nn.Identity())]) == {}


class Attention(torch.nn.Module):
    """As Megatron's: it knows its groups and the number of tensor-parallel ranks."""

    def __init__(self, groups, ranks):
        super().__init__()
        self.config = types.SimpleNamespace(num_query_groups=groups)
        self.world_size = ranks
        self.linear_qkv = torch.nn.Identity()


class SharedExpertMLP(torch.nn.Module):
    """By its name and its option."""

    def __init__(self, overlaps):
        super().__init__()
        self.config = types.SimpleNamespace(moe_shared_expert_overlap=overlaps)


@pytest.mark.parametrize(("groups", "ranks"), [(1, 2), (2, 4), (2, 2), (4, 2), (None, 2)])
def test_keys_and_values_of_shared_groups(groups, ranks):
    """Ranks that share a group have summands of its gradients, back to the norm of the keys."""
    partial = partials([names(a=Attention(groups, ranks), a__core_attention=torch.nn.Identity())])
    shared = {
        (Kind.GRAD_INPUT, "a.core_attention", 1),
        (Kind.GRAD_INPUT, "a.core_attention", 2),
        (Kind.GRAD_OUTPUT, "a.k_layernorm", 0),
        (Kind.GRAD_INPUT, "a.k_layernorm", 0),
    }
    assert partial == (dict.fromkeys(shared, "tp") if groups and groups < ranks else {})


def test_latent_attention_has_no_groups():
    """It has the option, and projections of its own."""
    latent = Attention(1, 2)
    del latent.linear_qkv
    assert partials([names(a=latent, a__core_attention=torch.nn.Identity())]) == {}


@pytest.mark.parametrize("overlaps", [True, False])
def test_shared_experts(overlaps):
    """Only where they are run in pieces is the reduction outside of them."""
    partial = partials([names(a=SharedExpertMLP(overlaps))])
    both = {(Kind.OUTPUT, "a.linear_fc2", 0): "tp", (Kind.GRAD_INPUT, "a.linear_fc1", 0): "tp"}
    assert partial == (both if overlaps else {})
