# SPDX-License-Identifier: Apache-2.0
"""Ids of a rehearsal's batches use all rows of the vocabulary's tables."""

from collections import UserDict

import pytest
import torch

from megatron_ttrace.run.rehearsal import spread_ids


@pytest.mark.parametrize("vocabulary", [1, 2, 7, 128, 257])
def test_ids_are_permuted(vocabulary: int) -> None:
    """Each id once; ignored labels, ids beyond and other entries stay."""
    ids = torch.tensor([-100, *range(vocabulary), vocabulary])
    batch = {"tokens": ids, "labels": ids, "loss_mask": ids, "text": "abc"}
    spread = spread_ids(batch, vocabulary)
    assert sorted(spread["tokens"][1:-1].tolist()) == [*range(vocabulary)]
    assert torch.equal(spread["tokens"], spread["labels"])
    assert (spread["tokens"][0], spread["tokens"][-1]) == (-100, vocabulary)
    assert spread["loss_mask"] is ids
    assert spread["text"] == "abc"
    assert spread_ids(None, vocabulary) is None


def test_a_batch_keeps_its_type() -> None:
    """The script may call methods that a dict does not have."""
    batch = UserDict(tokens=torch.arange(4))
    spread = spread_ids(batch, 4)
    assert type(spread) is UserDict
    assert sorted(spread["tokens"].tolist()) == [0, 1, 2, 3]
    assert batch["tokens"].tolist() == [0, 1, 2, 3]
