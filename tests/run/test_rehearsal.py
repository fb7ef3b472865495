# SPDX-License-Identifier: Apache-2.0
"""Ids of a rehearsal's batches use all rows of the vocabulary's tables."""

from collections import UserDict
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from megatron_ttrace.mcore import quiet
from megatron_ttrace.run import low_precision, rehearsal
from megatron_ttrace.run.rehearsal import Rehearsal, spread_ids


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


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
@pytest.mark.parametrize("vocabulary", [256, 152_064])
def test_ids_of_few_bits(dtype: torch.dtype, vocabulary: int) -> None:
    """No two ids become one; what their type has no room for stays."""
    holds = torch.iinfo(dtype).max >= vocabulary - 1
    ids = torch.arange(vocabulary if holds else 100).to(dtype)
    spread = spread_ids({"tokens": ids}, vocabulary)["tokens"]
    assert spread.dtype == dtype
    assert torch.equal(spread, ids) is not holds
    assert len(spread.unique()) == len(ids)


@pytest.mark.parametrize("label", [1, 0.5, True])
def test_labels_of_whole_samples(label: float) -> None:
    """They are classes or scores, not ids."""
    labels = torch.tensor([label, label])
    spread = spread_ids({"tokens": torch.ones(2, 4, dtype=torch.int64), "labels": labels}, 128)
    assert spread["labels"] is labels
    assert spread["tokens"].tolist() == [[80] * 4] * 2


@pytest.mark.parametrize("trains", [True, False])
def test_a_model_in_evaluation_mode(trains: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that only trains it has an effect, such as balancing losses: the report says so."""
    monkeypatch.setattr(rehearsal, "StepTap", lambda *_: Mock(left_out=False, draws=True))
    monkeypatch.setattr(quiet, "drawn_from", Mock())
    made = object.__new__(Rehearsal)
    made.remarks, made.model = {}, Mock(chunks=[torch.nn.Linear(1, 1).train(trains)])
    made._kept = made._copies = made._ranks = Mock()
    made._scheduler = SimpleNamespace(num_steps=0)
    made.trace(Mock(), Mock(), [], 1)
    assert ("in evaluation mode" in str(made.remarks)) is not trains


def test_nothing_is_dumped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all state is as before."""
    for owner, names in (
        (quiet, ("one_attempt", "random_states_kept", "metrics_kept")),
        (low_precision, ("equal_scales",)),
        (Rehearsal, ("_room",)),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, lambda *_: nullcontext())
    args = SimpleNamespace(save_wgrads_interval=1, overlap_param_gather=False)
    rehearsal = object.__new__(Rehearsal)
    rehearsal._args, rehearsal._settings = args, SimpleNamespace(init="megatron")
    rehearsal.remarks = {}
    rehearsal.model = Mock(chunks=[], optimizer=SimpleNamespace())
    rehearsal._plain = rehearsal._ranks = Mock()
    monkeypatch.setattr(rehearsal, "plain", Mock())
    with ExitStack() as kept:
        rehearsal._keep(kept, restore=False)
        assert args.save_wgrads_interval is None
    assert args.save_wgrads_interval == 1
