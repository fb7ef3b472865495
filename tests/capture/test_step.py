# SPDX-License-Identifier: Apache-2.0
"""What a step returns is captured, whatever form it has; buffers have places in the whole model."""

import functools
from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import nn

from megatron_ttrace.capture.initial import initial_values
from megatron_ttrace.capture.step import StepTap, TracedModel, place_buffer
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.placement.plan import describe
from megatron_ttrace.trace.records import STEP_LEVEL, Kind
from tests.placement.meshes import mesh_of


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, torch.Tensor] = {}

    def placed(self, place: Any, data: torch.Tensor, shape: Any, placement: Any) -> None:
        """Of the step's losses."""
        assert place == (STEP_LEVEL, Kind.LOSS, place[2], 0)
        assert (tuple(shape), placement) == (tuple(data.shape), ())
        self.given[place[2]] = data

    def replace(self, place: Any, data: torch.Tensor) -> None:
        """Nothing."""


def test_losses() -> None:
    """A loss per domain, one of one element, Python's numbers; what is no number is left out."""
    model = torch.nn.Linear(1, 1)
    traced = TracedModel([model], [canonical_names(model)], None, SINGLE)
    sink, errors = Sink(), list[BaseException]()
    tap = StepTap(traced, sink, [0], errors.append, lambda: None)  # type: ignore[arg-type]
    domains = torch.tensor([1.0, 2.0, 3.0])
    losses = {"domains": domains, "lm loss": torch.ones(1), "tokens": 512, "none": None, "at": "x"}
    tap._attempt(tap._losses, (losses, 0))
    assert not errors
    assert sink.given.keys() == {"domains", "lm loss", "tokens"}
    assert torch.equal(sink.given["domains"], domains)
    assert sink.given["lm loss"].shape == ()
    assert sink.given["tokens"].dtype == torch.float32


class Model(nn.Module):
    """Rotary angles that were cached for a group, and a buffer of another kind."""

    def __init__(self, group):
        super().__init__()
        self.rotary = nn.Module()
        self.rotary.cp_group = group
        self.rotary.register_buffer("cos_cached", torch.zeros(8, 1, 1, 4))
        self.rotary.register_buffer("inv_freq", torch.zeros(4))


@pytest.mark.parametrize(
    ("cp", "group", "leaf", "shape", "placement"),
    [
        (1, "group", "cos_cached", (8, 1, 1, 4), "Replicate"),
        (2, "group", "cos_cached", (16, 1, 1, 4), "cp:ZigZag(0)"),
        (2, None, "cos_cached", (8, 1, 1, 4), "Replicate"),
        (2, "group", "inv_freq", (4,), "Replicate"),
    ],
)
def test_cached_angles_are_divided_with_the_sequence(cp, group, leaf, shape, placement):
    """By context parallelism only, and no other buffer."""
    names = canonical_names(Model(group))
    name = f"rotary.{leaf}"
    found = place_buffer(name, names.buffers[name].shape, names, mesh_of(0, cp, cp=cp))
    assert (found.logical_shape, describe(found.placement)) == (shape, placement)


def test_start_of_buffers():
    """Their initial values are taken like parameters', except for tables of positions."""
    model = Model("group")
    model.register_buffer("calls", torch.tensor(0))
    mesh = mesh_of(0, 2, cp=2)
    traced = TracedModel([model], [canonical_names(model)], None, mesh)
    taken = initial_values(traced, Namespace())
    assert [(one.name, one.logical_shape, one.moments.n) for one in taken] == [
        ("rotary.inv_freq", (4,), 4)
    ]


def test_a_step_of_the_jobs_own() -> None:
    """What the job has put in the place of its optimizer's is there again afterwards."""
    steps: list[int] = []

    def step() -> None:
        steps.append(1)

    model, optimizer = torch.nn.Linear(1, 1), Namespace(step=step)
    traced = TracedModel([model], [canonical_names(model)], optimizer, SINGLE)
    tap = StepTap(traced, Sink(), [0], lambda error: None, lambda: None)  # type: ignore[arg-type]
    tap.run(lambda: optimizer.step())
    assert (steps, optimizer.step) == ([1], step)


@pytest.mark.parametrize("later", [False, True])
def test_a_step_is_not_helped(later: bool) -> None:
    """Parameters are gathered for the check when the step has ended, not for what it does last.

    Unless the model gets none of the update before.
    """
    order: list[str] = []
    config = Namespace(reuse_grad_buf_for_mxfp8_param_ag=later, overlap_param_gather=True)
    model = torch.nn.Linear(1, 1)
    optimizer = Namespace(config=config, step=lambda: order.append("updated"))
    traced = TracedModel([model], [canonical_names(model)], optimizer, SINGLE)
    gather = functools.partial(order.append, "gathered")
    tap = StepTap(traced, Sink(), [0], lambda error: None, gather)  # type: ignore[arg-type]
    tap.run(lambda: (optimizer.step(), order.append("used")))
    assert order == ["updated", *(("gathered", "used") if later else ("used", "gathered"))]


@pytest.mark.parametrize("is_updated", [True, False])
def test_an_update_too_small_for_the_model(is_updated: bool) -> None:
    """Elements that the step does not overwrite have moved, unless it was skipped."""
    model = nn.Linear(2, 2, bias=False).bfloat16()
    weight, before = model.weight, model.weight.detach().clone()
    main = nn.Parameter(before.float())
    optimizer = Namespace(
        optimizer=torch.optim.SGD([main]),
        float16_groups=[[weight]],
        fp32_from_float16_groups=[[main]],
        fp32_from_fp32_groups=[[]],
    )

    def step() -> tuple[bool, None, None]:
        weight.data[0].copy_(main.data[0] if is_updated else weight.data[0])
        return is_updated, None, None

    optimizer.step, moved = step, list[torch.Tensor]()
    sink = Namespace(
        placed=lambda place, data, *_: moved.append(data) if place[1] is Kind.PARAM_DELTA else None,
        replace=lambda *_: None,
    )
    traced = TracedModel([model], [canonical_names(model)], optimizer, SINGLE)
    tap = StepTap(traced, sink, [0], lambda error: None, lambda: None)  # type: ignore[arg-type]
    tap.run(lambda: optimizer.step())
    assert (moved[0] != 0).tolist() == [[False] * 2, [is_updated] * 2]
    assert torch.equal(weight[1], before[1]) is not is_updated
