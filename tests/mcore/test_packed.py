# SPDX-License-Identifier: Apache-2.0
"""Where packed conversations end, and how they are padded."""

import sys
import types

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ttrace.mcore import packed

LENGTH = 32


@given(st.lists(st.sets(st.integers(1, LENGTH - 1)), min_size=1, max_size=3))
def test_ends(samples):
    """Of all samples one after the other; what fills up the batch's rows is left out."""
    rows = [[0, *sorted(inner), *[LENGTH] * (LENGTH - len(inner))] for inner in samples]
    ends = packed.ends_of(rows)
    assert ends == tuple(
        at * LENGTH + end for at, inner in enumerate(samples) for end in (*sorted(inner), LENGTH)
    )


@pytest.mark.parametrize(("sft", "expected"), [(True, 4), (False, 1)])
def test_whose_data_depends_on_the_layout(sft, expected):
    """That of conversations."""
    assert packed.padded_for(types.SimpleNamespace(sft=sft, context_parallel_size=4)) == expected


def test_padded_as_in_another_layout(monkeypatch):
    """The data set reads its configuration anew for every sample."""

    class Dataset:
        config = types.SimpleNamespace(context_parallel_size=1)

        def __getitem__(self, idx):
            return idx, self.config.context_parallel_size

    module = types.SimpleNamespace(SFTDataset=Dataset)
    monkeypatch.setitem(sys.modules, "megatron.training.datasets.sft_dataset", module)
    packed.pad_for(4)
    assert Dataset()[3] == (3, 4)
