# SPDX-License-Identifier: Apache-2.0
"""A reference reads shuffled samples in the order of its candidate's data-parallel ranks."""

import itertools
import types

import pytest

from megatron_ttrace.mcore import cyclic

samplers = pytest.importorskip("megatron.training.datasets.data_samplers")
Sampler = samplers.MegatronPretrainingRandomSampler


def read(rank, size, sharding, consumed=0):
    """The first five microbatches of two samples that a rank reads."""
    sampler = Sampler(object(), 41, consumed, 2, rank, size, sharding)
    return list(itertools.islice(sampler, 5))


@pytest.mark.parametrize("consumed", [0, 16])
@pytest.mark.parametrize("sharding", [True, False])
def test_one_rank_reads_what_four_read(monkeypatch, sharding, consumed):
    """With shards of the data set and without; two ranks of a reference divide it."""
    each = [read(rank, 4, sharding, consumed) for rank in range(4)]
    dealt = list(itertools.chain.from_iterable(zip(*each, strict=True)))
    assert dealt[:5] != read(0, 1, sharding, consumed)
    monkeypatch.setattr(Sampler, "__iter__", Sampler.__iter__)
    cyclic.deal_to(4)
    assert read(0, 1, sharding, consumed) == dealt[:5]
    assert [read(rank, 2, sharding, consumed)[:2] for rank in range(2)] == [
        dealt[0:4:2],
        dealt[1:4:2],
    ]


@pytest.mark.parametrize(("loader", "expected"), [("cyclic", 4), ("single", 1), (None, 1)])
def test_who_depends_on_the_layout(loader, expected):
    """Only shuffled samples do."""
    args = types.SimpleNamespace(dataloader_type=loader, data_parallel_size=4)
    assert cyclic.dealt_to(args) == expected
