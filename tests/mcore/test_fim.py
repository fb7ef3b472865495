# SPDX-License-Identifier: Apache-2.0
"""Samples that are rearranged at random do not depend on what was read before them."""

import sys
import types

import numpy

from megatron_ttrace.mcore import fim


class Dataset:
    """As Megatron's: one generator for all samples."""

    def __init__(self):
        self.config = types.SimpleNamespace(random_seed=5)
        self.np_rng = numpy.random.RandomState(5)

    def _query_document_sample_shuffle_indices(self, idx):
        return idx, int(self.np_rng.randint(1 << 30))


def test_the_order_of_reading_is_without_effect(monkeypatch):
    """Every sample has its own random numbers; asking twice changes nothing."""
    module = types.SimpleNamespace(GPTFIMDataset=Dataset)
    monkeypatch.setitem(sys.modules, "megatron.training.datasets.fim_dataset", module)
    original = Dataset._query_document_sample_shuffle_indices
    monkeypatch.setattr(Dataset, "_query_document_sample_shuffle_indices", original)
    fim.rearrange_by_sample()
    fim.rearrange_by_sample()
    found = []
    for order in ((0, 1, 2, 3), (3, 1), (2, 0)):
        dataset = Dataset()
        found += [dataset._query_document_sample_shuffle_indices(idx) for idx in order]
    assert len(set(found)) == 4
