# SPDX-License-Identifier: Apache-2.0
"""A layer after one step of Adam, as a rank's model with its optimizer."""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace

import pytest
import torch

from megatron_ttrace.capture import state
from megatron_ttrace.mcore.optimizer import Owned
from megatron_ttrace.mcore.parameters import ParameterPlace, place_parameter
from megatron_ttrace.placement.mesh import SINGLE


def stepped(
    monkeypatch: pytest.MonkeyPatch,
    layer: torch.nn.Module,
    mains: Sequence[torch.Tensor],
    *modules: ModuleType,
    **options: float | tuple[float, float],
) -> SimpleNamespace:
    """``mains``: the optimizer's weights, of which flat ones are the beginning of a parameter.

    ``modules`` ask for the optimizer's weights, as ``capture.state`` does.
    """
    adam = torch.optim.Adam(mains, **options)  # type: ignore[arg-type]
    for main in mains:
        main.grad = torch.randn(main.shape)
    adam.step()
    owned = {
        one: Owned(
            *(main, adam, adam.param_groups[0]),
            (0, main.numel()) if main.shape != one.shape else None,
        )
        for one, main in zip(layer.parameters(), mains, strict=True)
    }
    places = [(one, place_parameter(name, one, SINGLE)) for name, one in layer.named_parameters()]
    buffers = [(ParameterPlace("expert_bias", (4,), ()), torch.randn(4))]
    for module in (state, *modules):
        monkeypatch.setattr(module, "owned_by", lambda optimizer: optimizer.owned)
    return SimpleNamespace(
        mesh=SINGLE,
        chunks=[layer],
        optimizer=SimpleNamespace(optimizer=adam, owned=owned, reload_model_params=lambda: None),
        places=lambda: places,
        held=lambda: [(one, place, one.data) for one, place in places],
        buffers=lambda: buffers,
    )
