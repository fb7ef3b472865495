# SPDX-License-Identifier: Apache-2.0
"""A counter-based generator: value = f(seed, canonical name, logical index).

Every rank produces only its own slice, and two ranks that hold the same element produce the same
bits. To guarantee that, only exact operations are used: 64-bit integer mixing (the finaliser of
SplitMix64: Steele, Lea, Flood, OOPSLA 2014), a sum of eight 16-bit integers, and one correctly
rounded float64 multiplication. The sum of eight uniform numbers (Irwin-Hall) is normal to within 2
% inside two standard deviations and never exceeds 4.9 of them. Logarithms and cosines are not used:
their last bit differs between the vectorised and the scalar loop of the same processor.
"""

import hashlib
import math
from collections.abc import Callable, Sequence

import torch

_HOST = torch.device("cpu")
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
"""By how much bits are shifted, and the factor that follows."""
_DRAWS = 2
_PIECES = 4 * _DRAWS
_PAIR = 0x0000FFFF0000FFFF
"""The lower 16 bits of both halves."""
_MEAN = _PIECES * 65535 / 2
_STD = math.sqrt(_PIECES * (65536**2 - 1) / 12)
_CHUNK = 1 << 15
"""Elements at a time on a CPU: 256 KB, which a core's cache holds."""
_ROWS = 1 << 22
"""Elements in the rows that are generated at a time: their indices and values need memory."""


def stream_of(seed: int, name: str) -> int:
    """A 63-bit stream number for one tensor."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generate(
    target: torch.Tensor,
    seed: int,
    name: str,
    logical_shape: Sequence[int],
    origin: Sequence[int],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Overwrite ``target``, of a box's shape, with changed values of :func:`normal` in the box.

    Some rows at a time, on any device.
    """
    if not target.numel():
        return
    first, *columns = origin or (0,)
    lines = target if target.dim() else target.view(1)
    shape = logical_shape or (1,)
    rows = max(1, _ROWS * len(lines) // target.numel())
    for at, part in enumerate(lines.split(rows)):
        begins = (first + at * rows, *columns)
        part.copy_(change(normal(seed, name, shape, begins, part.shape, part.device)))


def normal(
    seed: int,
    name: str,
    logical_shape: Sequence[int],
    origin: Sequence[int],
    extent: Sequence[int],
    device: torch.device = _HOST,
) -> torch.Tensor:
    """Standard normal values of the logical tensor ``name`` within a box, the same on any device.

    ``origin`` is the first index of the box, ``extent`` its size, both one number per dim.

    Returns:
        float64 tensor of shape ``extent``.
    """
    stride = 1
    index = torch.zeros((), dtype=torch.int64, device=device)
    for dim in reversed(range(len(extent))):
        steps = torch.arange(extent[dim], dtype=torch.int64, device=device)
        steps = (steps + origin[dim]) * stride
        index = index + steps.view(-1, *([1] * (len(extent) - 1 - dim)))
        stride *= logical_shape[dim]
    flat = index.reshape(-1)
    stream = stream_of(seed, name)
    size = max(1, min(flat.numel(), _CHUNK) if device.type == "cpu" else flat.numel())
    scratch = torch.empty((3, size), dtype=torch.int64, device=device)
    values = torch.empty(flat.shape, dtype=torch.float64, device=device)
    for part, target in zip(flat.split(size), values.split(size), strict=True):
        target.copy_(_sum_of_pieces(part, stream, scratch[:, : part.numel()]))
        target.sub_(_MEAN).mul_(1.0 / _STD)
    return values.view(tuple(extent))


def _sum_of_pieces(index: torch.Tensor, stream: int, scratch: torch.Tensor) -> torch.Tensor:
    """The sum of each index's 16-bit integers; everything is computed within ``scratch``."""
    bits, shifted, pairs = scratch.unbind()
    pairs.zero_()
    for draw in range(_DRAWS):
        torch.mul(index, _signed(_DRAWS * _GOLDEN), out=bits)
        bits.add_(_signed(draw * _GOLDEN + stream))
        for by, factor in _MIX:
            # A logical shift: torch has no unsigned 64-bit arithmetic, and >> copies the sign.
            torch.bitwise_right_shift(bits, by, out=shifted).bitwise_and_((1 << (64 - by)) - 1)
            bits.bitwise_xor_(shifted).mul_(_signed(factor))
        # Two sums at a time, one in each half: eight 16-bit integers need 19 bits.
        pairs.add_(torch.bitwise_and(bits, _PAIR, out=shifted))
        pairs.add_(bits.bitwise_right_shift_(16).bitwise_and_(_PAIR))
    torch.bitwise_and(pairs, 0xFFFFFFFF, out=shifted)
    pairs.bitwise_right_shift_(32).add_(shifted)
    return pairs


def _signed(value: int) -> int:
    """The signed 64-bit integer with the lowest 64 bits of ``value``."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >> 63 else value
