# SPDX-License-Identifier: Apache-2.0
"""What a step returns is captured, whatever form it has."""

from typing import Any

import torch

from megatron_ttrace.capture.step import StepTap, TracedModel
from megatron_ttrace.mcore.names import canonical_names
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.trace.records import STEP_LEVEL, Kind


class Sink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.given: dict[str, torch.Tensor] = {}

    def placed(self, place: Any, data: torch.Tensor, shape: Any, placement: Any) -> None:
        """Of the step's losses."""
        assert place == (STEP_LEVEL, Kind.LOSS, place[2], 0)
        assert (tuple(shape), placement) == (tuple(data.shape), ())
        self.given[place[2]] = data


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
