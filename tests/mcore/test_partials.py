# SPDX-License-Identifier: Apache-2.0
"""Which gradients are partial: sparse attention's, over absorbed latents."""

import torch

from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.partials import partials


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
    assert partials([chunk]) == {("a.core", 1): "tp", ("a.core", 6): "cp"}


def test_others():
    """A key of its own for every head is divided like the queries."""
    assert partials([names(a=torch.nn.Identity(), a__core=DSAttention())]) == {}
    assert partials([names(a=AbsorbedMLASelfAttention(), a__core=torch.nn.Identity())]) == {}
