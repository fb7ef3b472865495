# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's front, without Bridge."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ttrace.mcore.fronts import bridge


def calc_params_l2_norm(model: Any, model_config: Any, use_megatron_fsdp: bool = False) -> Any:
    """As Bridge's."""
    return model, model_config, use_megatron_fsdp


def test_kernels_of_the_norm_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are called through a global of the module of Bridge's function, which is found."""
    utils = SimpleNamespace(calc_params_l2_norm=calc_params_l2_norm)
    monkeypatch.setattr(bridge, "_module", {"utils.train_utils": utils}.get)
    front = bridge.Bridge.__new__(bridge.Bridge)
    front._cfg = SimpleNamespace(dist=SimpleNamespace(use_megatron_fsdp=True))
    norm = front.parameters_norm()
    assert inspect.unwrap(norm) is calc_params_l2_norm
    chunk = SimpleNamespace(config="config")
    assert norm([chunk]) == ([chunk], "config", True)
