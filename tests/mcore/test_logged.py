# SPDX-License-Identifier: Apache-2.0
"""What Megatron logs of a step."""

import math
from types import SimpleNamespace

import megatron.training
import pytest
import torch

from megatron_ttrace.mcore import logged


@pytest.mark.parametrize(
    ("metric", "dtype", "rounded"),
    [
        ("z_loss", None, True),
        ("z_loss", "fp32", False),
        ("z_loss", "fp64", False),
        ("load_balancing_loss", None, False),
        ("learning-rate", None, False),
    ],
)
def test_what_is_rounded(monkeypatch, metric, dtype, rounded):
    """Only the z loss has the dtype of the logits, which is the model's by default."""
    args = SimpleNamespace(moe_router_dtype=dtype)
    monkeypatch.setattr(megatron.training, "get_args", lambda: args)
    assert logged.is_rounded(metric) is rounded


def test_what_is_left_over(monkeypatch):
    """Sums without a step: given numbers, shares of choices, undefined ones are left out."""
    numbers = {
        "learning-rate": 1e-3,
        "z_loss": torch.tensor(0.0),
        "mtp_1_acceptance_rate": 0.5,
        "mean": math.nan,
    }
    monkeypatch.setattr(logged, "_logged", lambda *args: numbers)
    assert logged.left_over([], None) == {"z_loss": 0.0}


def test_where_it_is_logged(monkeypatch):
    """The call, in whichever file of Megatron it is."""
    monkeypatch.setattr(logged, "PLACES", {})
    writer = logged._Writer()
    writer.add_scalar("z_loss", 1.0, 1)
    writer.add_scalar("z_loss vs samples", 1.0, 1)
    assert list(logged.PLACES) == ["z_loss"]
    assert logged.PLACES["z_loss"].endswith("(test_where_it_is_logged)")


def test_a_writer_as_tensorboard_s(monkeypatch):
    """A fork may name the arguments, and write more than scalars."""
    monkeypatch.setattr(logged, "PLACES", {})
    writer = logged._Writer()
    writer.add_scalar("mine", 1.0, global_step=1)
    writer.add_scalar(tag="yours", scalar_value=torch.tensor(2.0))
    writer.add_histogram("all", torch.ones(2), global_step=1)
    writer.flush()
    assert writer.values == {"mine": 1.0, "yours": torch.tensor(2.0)}
