# SPDX-License-Identifier: Apache-2.0
"""FP8 recipes: which format, and which part of a tensor shares a scale.

The classes carry the interface's field names. They name ``transformer_engine.common.recipe`` as
their module, because that is where a checkpoint that holds one expects to find it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

MODULE = "transformer_engine.common.recipe"

#: Options of recipes, and the variables that are their defaults.
_NOT_IMPLEMENTED = {
    "backward_override": "NVTE_BACKWARD_OVERRIDE",
    "use_power_2_scales": "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES",
    "use_f32_scales": "NVTE_FP8_BLOCK_SCALING_FP32_SCALES",
}


class Format(Enum):
    """FP8 formats of the forward and of the backward pass."""

    E4M3 = "e4m3"
    E5M2 = "e5m2"
    HYBRID = "hybrid"


@dataclass(kw_only=True)
class Recipe:
    """Base class; asks by name which recipe this is."""

    fp8_format: Format = Format.HYBRID
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def __post_init__(self) -> None:
        """Refuse options that change numbers and are not implemented, as variables too."""
        for option, variable in _NOT_IMPLEMENTED.items():
            asked = getattr(self, option, None) or os.environ.get(variable, "0") != "0"
            if asked and hasattr(self, option):
                raise NotImplementedError(f"{option} ({variable}) is not implemented on a CPU")

    @classmethod
    def delayed(cls) -> bool:
        """Whether scales come from earlier iterations."""
        return issubclass(cls, DelayedScaling)

    @classmethod
    def mxfp8(cls) -> bool:
        """Whether blocks of 32 have scales that are powers of two."""
        return issubclass(cls, MXFP8BlockScaling)

    @classmethod
    def nvfp4(cls) -> bool:
        """Whether this is the four-bit recipe, which is not implemented."""
        return issubclass(cls, NVFP4BlockScaling)


@dataclass(kw_only=True)
class DelayedScaling(Recipe):
    """One scale a tensor, from the largest values of earlier iterations."""

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    reduce_amax: bool = True
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    # Megatron passes what it passes to modules.
    params_dtype: Any = None
    device: Any = None


@dataclass(kw_only=True)
class Float8CurrentScaling(Recipe):
    """One scale a tensor, from its own largest value."""

    use_power_2_scales: bool = False


@dataclass(kw_only=True)
class Float8BlockScaling(Recipe):
    """One power of two for 128 neighbours of an activation, or for 128 x 128 of a weight."""

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3


@dataclass(kw_only=True)
class MXFP8BlockScaling(Recipe):
    """One power of two for 32 neighbours."""

    margin: int = 0
    fp8_format: Format = Format.E4M3


class NVFP4BlockScaling(Recipe):
    """Only the name: four-bit training is not implemented on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("NVFP4 is not implemented on a CPU")


class CustomRecipe(Recipe):
    """Only the name: a recipe of the user's makes quantizers of TransformerEngine's."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("custom FP8 recipes are not implemented on a CPU")


for _class in (Format, Recipe, *Recipe.__subclasses__()):
    _class.__module__ = MODULE
