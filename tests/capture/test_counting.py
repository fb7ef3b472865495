# SPDX-License-Identifier: Apache-2.0
"""A statistic is followed through the collectives that its function calls, however it does."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ttrace.capture import counting
from megatron_ttrace.capture.counting import Tally
from megatron_ttrace.capture.flow import Flow, Memory, Parts
from megatron_ttrace.mcore.parameters import place_parameter
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.counted import Statistic

MODEL, WORLD = ((0, 1, 1),), ((0, 3, 1),)


@pytest.mark.parametrize(
    "call",
    [
        lambda module, total: module.all_reduce(total, dist.ReduceOp.SUM, "model"),
        lambda module, total: module.all_reduce(total, dist.ReduceOp.SUM, "model", True),
        lambda module, total: module.all_reduce(total, group="model", async_op=True),
        lambda module, total: module.all_reduce(async_op=True, tensor=total, group="model"),
    ],
)
def test_a_collective_gets_its_arguments(monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    """As the function gave them, by position or by name."""
    given: list[Any] = []

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> None:
        given.append((group, async_op))

    def norm() -> None:
        call(dist, torch.zeros(1))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    call(dist, torch.zeros(1))
    monkeypatch.setattr(counting, "group_ranks", {"model": MODEL, None: WORLD}.get)
    flow = Flow(Memory(Parts(SINGLE)), Counter())
    tally = Tally([], [], None, SINGLE, lambda work: work())
    with tally._followed(flow, norm), flow:
        norm()
    assert given[0] == given[1]
    assert [made.group for made in flow.made] == [MODEL]


def test_copies_in_several_chunks_are_parts_of_their_own() -> None:
    layers = [torch.nn.Linear(2, 2, bias=False) for _ in range(3)]
    places = [(one.weight, place_parameter("weight", one.weight, SINGLE)) for one in layers]
    held = Tally([*layers], places, None, SINGLE, lambda work: work()).counted(1)
    assert [held.parts[n].name for n in held.held] == ["weight", "weight#1", "weight#2"]


def test_what_is_clipped_may_be_read_once() -> None:
    """A fork may pass a generator: it reaches Megatron's function whole."""
    layer = torch.nn.Linear(2, 2)
    places = [(one, place_parameter(name, one, SINGLE)) for name, one in layer.named_parameters()]
    for one in layer.parameters():
        one.grad = torch.ones_like(one)
    given: list[Any] = []
    tally = Tally([layer], places, None, SINGLE, lambda work: work())
    tally._clip(lambda them, *_: given.extend(them), layer.parameters(), 1.0, 2.0)
    assert given == [*layer.parameters()]
    (clipped,) = (c for c in tally.counted(1).countings if c.statistic is Statistic.CLIPPED)
    assert (clipped.value, len(clipped.parts)) == (2.0, 2)
