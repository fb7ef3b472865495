# SPDX-License-Identifier: Apache-2.0
"""Tensors in nested arguments and results, and their exchange."""

import collections

import torch
from torch import nn

from megatron_ttrace.capture.modules import tensors_in, with_tensors

Pair = collections.namedtuple("Pair", "left right")


def test_positions_count_every_slot():
    """An argument that is ``None`` here and a tensor there does not shift the others."""
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [i for i, _ in tensors_in((a, None, b))] == [0, 2]
    assert [i for i, _ in tensors_in((a, {"x": None, "y": [b, (c,)]}, 7))] == [0, 2, 3]
    assert [i for i, _ in tensors_in(type("Output", (dict,), {})(a=a))] == [0]
    assert not [*tensors_in(None), *tensors_in(nn.Parameter(a))]
    nested = torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    assert [i for i, _ in tensors_in((nested, b))] == [1]
    assert [i for i, _ in tensors_in(Pair(a, b))] == [0, 1]


def test_exchanging_tensors_keeps_the_structure():
    """Tuples, lists, dicts, named tuples; the rest is the same object."""
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    value = (a, [None, b], {"x": Pair(b, 7)})
    found = with_tensors(value, {2: c})
    assert found[0] is a
    assert found[1] == [None, c]
    assert found[2]["x"] == Pair(b, 7)
    assert isinstance(found[2]["x"], Pair)


def test_exchanging_tensors_keeps_the_type_of_an_output():
    """The caller may read its attributes."""

    class Output(collections.OrderedDict):
        """As Hugging Face's: its items are attributes as well."""

        def __getattr__(self, name):
            return self[name]

    a, b = torch.ones(1), torch.zeros(1)
    value = Output(hidden=a, rest=(None, Output(logits=b)))
    found = with_tensors(value, {2: a})
    assert found.hidden is a
    assert found.rest[1].logits is a
    assert value.rest[1].logits is b
