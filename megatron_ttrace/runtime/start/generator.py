# SPDX-License-Identifier: Apache-2.0
"""A counter-based generator: value = f(seed, canonical name, logical index).

Every rank produces only its own slice, and two ranks that hold the same element produce the same
bits. To guarantee that, only exact operations are used: 64-bit integer mixing (the finaliser of
SplitMix64: Steele, Lea, Flood, OOPSLA 2014), a sum of eight 16-bit integers, and one correctly
rounded float64 multiplication. The sum of eight uniform numbers (Irwin-Hall) is normal to within 2
% inside two standard deviations and never exceeds 4.9 of them. Logarithms and cosines are not used:
their last bit differs between the vectorised and the scalar loop of the same processor.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB
_PIECES = 8
_MEAN = _PIECES * 65535 / 2
_STD = math.sqrt(_PIECES * (65536**2 - 1) / 12)
_CHUNK = 1 << 20


def stream_of(seed: int, name: str) -> int:
    """A 63-bit stream number for one tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def normal(
    seed: int,
    name: str,
    logical_shape: Sequence[int],
    origin: Sequence[int],
    extent: Sequence[int],
) -> torch.Tensor:
    """Standard normal values of the logical tensor ``name`` within a box.

    Args:
        seed: of the run.
        name: canonical name of the tensor.
        logical_shape: shape of the whole tensor.
        origin: first index of the box, one per dim.
        extent: size of the box, one per dim.

    Returns:
        float64 tensor of shape ``extent`` on the CPU.
    """
    stride = 1
    index = torch.zeros((), dtype=torch.int64)
    for dim in reversed(range(len(extent))):
        steps = (torch.arange(extent[dim], dtype=torch.int64) + origin[dim]) * stride
        index = index + steps.view(-1, *([1] * (len(extent) - 1 - dim)))
        stride *= logical_shape[dim]
    flat = index.reshape(-1)
    stream = stream_of(seed, name)
    parts = [
        _sum_of_pieces(flat[start : start + _CHUNK], stream)
        for start in range(0, flat.numel(), _CHUNK)
    ]
    total = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
    return ((total.double() - _MEAN) * (1.0 / _STD)).view(tuple(extent))


def _sum_of_pieces(index: torch.Tensor, stream: int) -> torch.Tensor:
    total = torch.zeros_like(index)
    for draw in range(_PIECES // 4):
        bits = _mix((index * (_PIECES // 4) + draw) * _GOLDEN + stream)
        for shift in range(0, 64, 16):
            total += (bits >> shift) & 0xFFFF
    return total


def _mix(bits: torch.Tensor) -> torch.Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * _MIX_1
    bits = (bits ^ _shift_right(bits, 27)) * _MIX_2
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: torch.Tensor, by: int) -> torch.Tensor:
    """A logical shift: torch has no unsigned 64-bit arithmetic, and ``>>`` copies the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
