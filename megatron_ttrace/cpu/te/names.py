# SPDX-License-Identifier: Apache-2.0
"""Classes of TransformerEngine of which Megatron needs the name only.

No tensor of these classes is ever made: parameters stay unrounded and FP8 operands live for the
time of one product. Two classes of the operation fuser are named in annotations that Python
evaluates when Megatron's wrappers are defined; ``cpu/arguments.py`` keeps runs from using them.
"""

from enum import Enum
from typing import Any

import torch

from megatron_ttrace.trace.errors import TTraceError


class UserBufferQuantizationMode(Enum):
    """Whether buffers hold FP8 or unrounded tensors; rounding is emulated, so it makes none."""

    NONE = "none"
    FP8 = "fp8"


class DType(Enum):
    """Dtypes that PyTorch does not have, or not with these names."""

    kFloat4E2M1 = "float4_e2m1"  # noqa: N815
    kFloat8E4M3 = "float8_e4m3"  # noqa: N815
    kFloat8E5M2 = "float8_e5m2"  # noqa: N815


class QuantizedTensor(torch.Tensor):
    """A tensor stored in fewer bits, or what makes, holds or gathers one."""


Float8Tensor = Float8BlockwiseQTensor = MXFP8Tensor = QuantizedTensor
MXFP8TensorStorage = NVFP4TensorStorage = MXFP8Quantizer = QuantizedTensor
_NVFP4AllGatherAsyncHandle = QuantizedTensor


class FusibleOperation:
    """One operation of the fuser.

    Raises:
        TTraceError: when one is to be made.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise TTraceError("TransformerEngine's operation fuser is not emulated on a CPU")


class Sequential(FusibleOperation):
    """A chain of operations."""
