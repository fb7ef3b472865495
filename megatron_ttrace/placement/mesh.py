# SPDX-License-Identifier: Apache-2.0
"""The process mesh as one rank sees it.

The axes of attention layers are tp, cp, dp, pp with dp = world / (tp cp pp); those of experts are
etp, ep, edp, pp with edp = world / (etp ep pp).
"""

import dataclasses
from typing import NamedTuple


class Axes(NamedTuple):
    """A number for each axis. A file holds them in this order."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int
    dp: int
    edp: int


AXES = Axes._fields
DENSE = ("tp", "cp", "dp", "pp")
EXPERT = ("etp", "ep", "edp", "pp")
"""The two ways in which Megatron numbers the same ranks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """Sizes of the axes, and this rank's coordinate on each."""

    rank: int
    world_size: int
    sizes: Axes
    coordinates: Axes
    vpp: int = 1

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return int(getattr(self.sizes, axis))

    def at(self, axis: str) -> int:
        """This rank's coordinate on ``axis``."""
        return int(getattr(self.coordinates, axis))

    def describe(self) -> dict[str, int]:
        """Axis sizes larger than one, with the world size, for reports.

        Expert axes are left out where experts are laid out like everything else.
        """
        plain = self.size("ep") == 1 and self.size("etp") == self.size("tp")
        sizes = {**self.sizes._asdict(), "vpp": self.vpp}
        left_out = ("etp", "edp") if plain else ()
        shown = {axis: n for axis, n in sizes.items() if n > 1 and axis not in left_out}
        return {"world_size": self.world_size, **shown}


SINGLE = Mesh(0, 1, Axes(*[1] * len(AXES)), Axes(*[0] * len(AXES)))
"""The reference's mesh: one device."""
