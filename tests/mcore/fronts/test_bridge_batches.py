# SPDX-License-Identifier: Apache-2.0
"""A step's samples, divided into microbatches and joined again."""

import itertools
import sys
import types

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.mcore.fronts.bridge_batches import Microbatches, Rejoined, order


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_a_reference_reads_what_the_ranks_read(ranks, each, size):
    """Microbatch ``j`` of rank ``r`` is number ``j * ranks + r``; no sample is lost."""
    count = ranks * each
    positions = order(count * size, count, ranks)
    assert sorted(positions) == list(range(count * size))
    for rank in range(ranks):
        dealt = list(range(rank, count * size, ranks))
        for number in range(each):
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
