# SPDX-License-Identifier: Apache-2.0
"""The Hadamard transform (``fast_hadamard_transform``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def hadamard_transform(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    """``x`` times Sylvester's Hadamard matrix over the last dim, times ``scale``; in float32.

    A last dim that is not a power of two is filled up with zeros, and cut off again.
    """
    size = x.shape[-1]
    whole = 1 << (size - 1).bit_length()
    values = F.pad(x.float(), (0, whole - size))
    half = 1
    while half < whole:
        pairs = values.unflatten(-1, (-1, 2, half))
        first, second = pairs.unbind(-2)
        values = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return (values[..., :size] * scale).to(x.dtype)
