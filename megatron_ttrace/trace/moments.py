# SPDX-License-Identifier: Apache-2.0
"""The few sums that say how a tensor's values are distributed; parts of it add up."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any

import torch

from megatron_ttrace.trace import codec
from megatron_ttrace.trace.checksum import checksum, joined
from megatron_ttrace.trace.codec import Bounds, Count, Word

_CHUNK = 1 << 16

Total = Annotated[float, Bounds(0.0, nan=True)]
"""A sum of squares, or a largest difference."""


@dataclasses.dataclass(frozen=True, slots=True)
class Moments:
    """Sums over values, in float64; ``checksum`` is of their bits.

    ``state`` is a checksum of the random state that they may have been drawn from, 0 if unknown.
    """

    n: Count = 0
    sum: float = 0.0
    squares: Total = 0.0
    cubes: float = 0.0
    fourths: Total = 0.0
    least: float = math.inf
    most: float = -math.inf
    nonfinite: Count = 0
    checksum: Word = 0
    state: Word = 0

    @classmethod
    def of(cls, values: Any) -> Moments:
        """The inverse of ``dataclasses.astuple``, also as JSON. Raises ``CodecError``."""
        return codec.decode_list(cls, values)

    def __add__(self, other: Moments) -> Moments:
        return Moments(
            n=self.n + other.n,
            sum=self.sum + other.sum,
            squares=self.squares + other.squares,
            cubes=self.cubes + other.cubes,
            fourths=self.fourths + other.fourths,
            least=min(self.least, other.least),
            most=max(self.most, other.most),
            nonfinite=self.nonfinite + other.nonfinite,
            checksum=joined(self.checksum, other.checksum),
            state=self.state or other.state,
        )

    @property
    def is_constant(self) -> bool:
        """Whether all values are one value."""
        return self.least == self.most

    @property
    def mean(self) -> float:
        """Of the values."""
        return self.sum / self.n

    @property
    def scatter(self) -> float:
        """Sum of squared deviations from the mean."""
        return 0.0 if self.is_constant else max(self.squares - self.sum * self.mean, 0.0)

    @property
    def std(self) -> float:
        """Standard deviation, unbiased in the square."""
        return math.sqrt(self.scatter / (self.n - 1)) if self.n > 1 else 0.0

    @property
    def kurtosis(self) -> float:
        """Fourth central moment over the squared second one: 3 for a normal distribution."""
        m = self.mean
        fourth = self.fourths - 4 * m * self.cubes + 6 * m**2 * self.squares - 3 * self.n * m**4
        return fourth * self.n / self.scatter**2 if self.scatter else 0.0


def moments_of(data: torch.Tensor) -> Moments:
    """The moments of a tensor's elements, in chunks and with one read of the device.

    Of one with NaN or infinity only their number is known.
    """
    flat = data.detach().reshape(-1)
    if not flat.numel():
        return Moments()
    powers = torch.zeros(4, dtype=torch.float64, device=flat.device)
    least, most = powers.new_full((), math.inf), powers.new_full((), -math.inf)
    for chunk in flat.split(_CHUNK):
        x = chunk.double()
        least, most = torch.minimum(least, x.amin()), torch.maximum(most, x.amax())
        square = x * x
        powers += torch.stack(
            (x.sum(), square.sum(), torch.dot(square, x), torch.dot(square, square))
        )
    found = torch.cat((powers, torch.stack((least, most))))
    if not bool(torch.isfinite(found).all()):
        return Moments(flat.numel(), nonfinite=int((~torch.isfinite(flat)).sum().item()))
    one, two, three, four, low, high = found.tolist()
    return Moments(
        n=flat.numel(),
        sum=one,
        squares=two,
        cubes=three,
        fourths=four,
        least=low,
        most=high,
        nonfinite=0,
        checksum=checksum(data),
    )
