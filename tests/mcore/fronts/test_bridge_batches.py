# SPDX-License-Identifier: Apache-2.0
"""A step's samples, divided into microbatches and joined again."""

import itertools
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.mcore.fronts.bridge_batches import Microbatches, Rejoined, order, padding


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_a_reference_reads_what_the_ranks_read(ranks, per_rank, size):
    """Microbatch ``j`` of rank ``r`` is number ``j * ranks + r``; no sample is lost."""
    count = ranks * per_rank
    positions = order(count * size, count, ranks)
    assert sorted(positions) == list(range(count * size))
    for rank in range(ranks):
        dealt = list(range(rank, count * size, ranks))
        for number in range(per_rank):
            at = (number * ranks + rank) * size
            assert positions[at : at + size] == dealt[number * size : (number + 1) * size]


@pytest.fixture
def loader(monkeypatch):
    """Two steps of four samples, two microbatches each; and Bridge's own division."""

    def divided(batch, count):
        parts = {name: value.chunk(count) for name, value in batch.items() if name == "tokens"}
        size = len(batch["names"]) // count
        return [
            {
                "tokens": parts["tokens"][number],
                "names": batch["names"][number * size : (number + 1) * size],
                "step": batch["step"],
            }
            for number in range(count)
        ]

    home = types.ModuleType("megatron.bridge.data.batch_utils")
    home.split_batch_into_microbatches = divided
    calculator = types.ModuleType("megatron.core.num_microbatches_calculator")
    calculator.get_num_microbatches = lambda: 2
    for module in (home, calculator):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return (
        {"tokens": torch.arange(4) + 4 * step, "names": list("abcd"), "step": step}
        for step in range(2)
    )


def test_a_step_is_what_it_was(loader):
    rejoined = Rejoined(Microbatches(loader, 1))
    for step in range(2):
        batch = next(rejoined)
        assert batch["tokens"].tolist() == list(range(4 * step, 4 * step + 4))
        assert (batch["names"], batch["step"]) == (list("abcd"), step)
    with pytest.raises(StopIteration):
        next(rejoined)


def test_samples_are_dealt(loader):
    """With two ranks and two microbatches of two samples, rank 0 has the samples 0 and 2."""
    microbatches = Microbatches(loader, 2).iterable
    first, second = itertools.islice(microbatches, 2)
    assert (first["tokens"].tolist(), first["names"]) == ([0, 2], ["a", "c"])
    assert (second["tokens"].tolist(), second["names"]) == ([1, 3], ["b", "d"])


SMALL = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 1,
    "eval_context_parallel_size": None,
    "sequence_parallel": False,
}
CP = {"context_parallel_size": 2}
SP = {"tensor_model_parallel_size": 3, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("layout", "fixed", "multiple"),
    [
        ({}, False, 1),
        ({"pipeline_model_parallel_size": 2}, True, 1),
        ({"expert_model_parallel_size": 2}, True, 1),
        (CP, False, 4),
        ({**SP, "sequence_parallel": False}, False, 1),
        (SP, False, 3),
        ({**CP, "eval_context_parallel_size": 3}, False, 12),
        ({**CP, **SP}, False, 12),
    ],
)
def test_padding_follows_from_the_layout(layout, fixed, multiple):
    """What Bridge derives for its candidate, a reference on one rank must be given."""
    options = types.SimpleNamespace(**{**SMALL, **layout})
    data = {"pad_to_max_length": False, "pad_to_multiple_of": 1}
    fields = padding(types.SimpleNamespace(**data), options)
    assert fields == {"pad_to_max_length": fixed, "pad_to_multiple_of": multiple}
    data |= {"enable_in_batch_packing": True, "in_batch_packing_pad_to_multiple_of": 1}
    fields = padding(types.SimpleNamespace(**data), options)
    assert fields == {"pad_to_max_length": fixed, "in_batch_packing_pad_to_multiple_of": multiple}


def test_what_is_padded_already_stays_so():
    """A data set's own multiple is kept."""
    data = types.SimpleNamespace(pad_to_max_length=True, pad_to_multiple_of=6)
    options = types.SimpleNamespace(**{**SMALL, **CP})
    assert padding(data, options) == {"pad_to_max_length": True, "pad_to_multiple_of": 12}
    assert padding(types.SimpleNamespace(seq_length=8), options) == {}
