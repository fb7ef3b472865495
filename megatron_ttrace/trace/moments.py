# SPDX-License-Identifier: Apache-2.0
"""The few sums that say how a tensor's values are distributed; parts of it add up."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
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

    ``places`` is the sum of each value times its logical indices, of the n-th dim n times, and 0 if
    places mean nothing; ``state`` is a checksum of the random state that they may have been drawn
    from, 0 if unknown.
    """

    n: Count = 0
    sum: float = 0.0
    squares: Total = 0.0
    cubes: float = 0.0
    fourths: Total = 0.0
    places: float = 0.0
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
            places=self.places + other.places,
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


def moments_of(data: torch.Tensor, at: Sequence[int] = ()) -> Moments:
    """The moments of a tensor's elements, in chunks and with one read of the device.

    Of one with NaN or infinity only their number is known. ``at`` has the logical indices of the
    first element, if places are to be summed.
    """
    data = data.detach()
    if not data.numel():
        return Moments()
    data = data if data.dim() else data.reshape(1)
    sums = torch.zeros(5, dtype=torch.float64, device=data.device)
    least, most = sums.new_full((), math.inf), sums.new_full((), -math.inf)
    first = list(at)
    for chunk in data.split(max(1, _CHUNK // data[0].numel())):
        x = chunk.double()
        least, most = torch.minimum(least, x.amin()), torch.maximum(most, x.amax())
        places = sums.new_zeros(())
        for dim, start in enumerate(first):
            along = x.movedim(dim, 0).flatten(1).sum(1) if x.dim() > 1 else x
            index = start + torch.arange(len(along), dtype=torch.float64, device=x.device)
            places += (dim + 1) * torch.dot(along, index)
        if first:
            first[0] += len(x)
        x = x.flatten()
        square = x * x
        sums += torch.stack(
            (x.sum(), square.sum(), torch.dot(square, x), torch.dot(square, square), places)
        )
    found = torch.cat((sums, torch.stack((least, most))))
    if not bool(torch.isfinite(found).all()):
        return Moments(data.numel(), nonfinite=int((~torch.isfinite(data)).sum().item()))
    return dataclasses.replace(Moments(data.numel(), *found.tolist()), checksum=checksum(data))
