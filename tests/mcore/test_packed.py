# SPDX-License-Identifier: Apache-2.0
"""How packed conversations are padded."""

import sys
import types

import pytest

from megatron_ttrace.mcore import packed


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
