# SPDX-License-Identifier: Apache-2.0
"""Samples are the same in every layout."""

import itertools
import sys
import types

import numpy
import pytest

from megatron_ttrace.mcore import samples
from megatron_ttrace.trace.errors import TTraceError

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
    samples_by_rank = [read(rank, 4, sharding, consumed) for rank in range(4)]
    dealt = list(itertools.chain.from_iterable(zip(*samples_by_rank, strict=True)))
    assert dealt[:5] != read(0, 1, sharding, consumed)
    monkeypatch.setattr(Sampler, "__iter__", Sampler.__iter__)
    samples.deal_to(4, Sampler)
    assert read(0, 1, sharding, consumed) == dealt[:5]
    assert [read(rank, 2, sharding, consumed)[:2] for rank in range(2)] == [
        dealt[0:4:2],
        dealt[1:4:2],
    ]


def test_ranks_that_shuffle_differently(monkeypatch):
    """Each of them reads a part of a list of its own, so some samples are read twice."""
    original = Sampler.__iter__

    def shuffled(self):
        for batch in original(self):
            yield [(sample + self.data_parallel_rank) % 40 for sample in batch]

    monkeypatch.setattr(Sampler, "__iter__", shuffled)
    samples.deal_to(4, Sampler)
    with pytest.raises(TTraceError, match=r"read sample \d+ twice"):
        read(0, 1, False)


@pytest.mark.parametrize(
    ("loader", "expected"), [("cyclic", 4), ("batch", 4), ("single", 1), ("", 1)]
)
def test_whose_order_depends_on_the_layout(loader, expected):
    args = types.SimpleNamespace(dataloader_type=loader, data_parallel_size=4)
    assert samples.dealt_to(args) == expected


class FimDataset:
    """As Megatron's: one generator for all samples."""

    def __init__(self):
        self.config = types.SimpleNamespace(random_seed=5)
        self.np_rng = numpy.random.RandomState(5)

    def _query_document_sample_shuffle_indices(self, idx):
        return idx, int(self.np_rng.randint(1 << 30))


def test_the_order_of_reading_is_without_effect(monkeypatch):
    """Every sample has its own random numbers; asking twice changes nothing."""
    module = types.SimpleNamespace(GPTFIMDataset=FimDataset)
    monkeypatch.setitem(sys.modules, "megatron.training.datasets.fim_dataset", module)
    original = FimDataset._query_document_sample_shuffle_indices
    monkeypatch.setattr(FimDataset, "_query_document_sample_shuffle_indices", original)
    samples.rearrange_by_sample()
    samples.rearrange_by_sample()
    samples_read = []
    for order in ((0, 1, 2, 3), (3, 1), (2, 0)):
        dataset = FimDataset()
        samples_read += [dataset._query_document_sample_shuffle_indices(idx) for idx in order]
    assert len(set(samples_read)) == 4


@pytest.mark.parametrize(("sft", "expected"), [(True, 4), (False, 1)])
def test_whose_padding_depends_on_the_layout(sft, expected):
    assert samples.padded_for(types.SimpleNamespace(sft=sft, context_parallel_size=4)) == expected


def test_padded_as_in_another_layout(monkeypatch):
    """The data set reads its configuration anew for every sample."""

    class Dataset:
        config = types.SimpleNamespace(context_parallel_size=1)

        def __getitem__(self, idx):
            return idx, self.config.context_parallel_size

    module = types.SimpleNamespace(SFTDataset=Dataset)
    monkeypatch.setitem(sys.modules, "megatron.training.datasets.sft_dataset", module)
    samples.pad_for(4)
    assert Dataset()[3] == (3, 4)


def test_indices_are_written_at_once(tmp_path, monkeypatch):
    """Another process finds all of an index, or nothing; what is no path is written as it is."""
    original, index, found = numpy.save, tmp_path / "index.npy", []

    def save(file, array):
        original(file, array)
        found.append(index.exists())

    monkeypatch.setattr(numpy, "save", save)
    samples.write_indices_at_once()
    numpy.save(str(index), numpy.arange(3))
    with (tmp_path / "other").open("wb") as other:
        numpy.save(other, numpy.arange(4))
    assert found == [False, True]
    assert {path.name: len(numpy.load(path)) for path in tmp_path.iterdir()} == {
        "index.npy": 3,
        "other": 4,
    }
    (link := tmp_path / "link.npy").symlink_to(index)
    numpy.save(str(link), numpy.arange(5))
    assert link.is_symlink()
    assert len(numpy.load(index)) == 5
    with pytest.raises(TypeError):
        numpy.save(str(index))
    assert {path.name for path in tmp_path.iterdir()} == {"index.npy", "link.npy", "other"}
