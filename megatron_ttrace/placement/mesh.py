# SPDX-License-Identifier: Apache-2.0
"""The process mesh as one rank sees it, and how Megatron numbers ranks.

Megatron's ``RankGenerator`` (megatron/core/parallel_state.py) orders ranks by ``--order``
``tp-cp-ep-dp-pp`` (first varies fastest). Attention-side coordinates use tp, cp, dp, pp with
dp = world / (tp cp pp); expert-side ones use etp, ep, edp, pp with edp = world / (etp ep pp).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


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
        shown = (axis for axis in sizes if not (plain and axis in ("etp", "edp")))
        found = {axis: sizes[axis] for axis in shown if sizes[axis] > 1}
        return {"world_size": self.world_size, **found}


def mesh_of(
    rank: int,
    world_size: int,
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    etp: int | None = None,
    vpp: int = 1,
    order: str = DEFAULT_ORDER,
) -> Mesh:
    """The coordinates of ``rank``.

    Raises:
        ValueError: when the world size is not a multiple of the layout.
    """
    etp = tp if etp is None else etp
    for sizes in ((tp, cp, pp), (etp, ep, pp)):
        if world_size % (sizes[0] * sizes[1] * sizes[2]):
            raise ValueError(
                f"world size {world_size} is not a multiple of the layout tp={tp} cp={cp} pp={pp} "
                f"ep={ep} etp={etp}"
            )
    dense = {"tp": tp, "cp": cp, "pp": pp, "ep": 1, "dp": world_size // (tp * cp * pp)}
    expert = {"tp": etp, "cp": 1, "pp": pp, "ep": ep, "dp": world_size // (etp * ep * pp)}
    here = _coordinates(rank, order, dense)
    expert_here = _coordinates(rank, order, expert)
    return Mesh(
        rank=rank,
        world_size=world_size,
        sizes=Axes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dense["dp"], edp=expert["dp"]),
        coordinates=Axes(
            tp=here["tp"],
            cp=here["cp"],
            pp=here["pp"],
            ep=expert_here["ep"],
            etp=expert_here["tp"],
            dp=here["dp"],
            edp=expert_here["dp"],
        ),
        vpp=vpp,
    )


def _coordinates(rank: int, order: str, sizes: dict[str, int]) -> dict[str, int]:
    """Mixed-radix digits of ``rank``, least significant axis first as ``order`` lists them.

    An axis that ``order`` leaves out must be of size one, as in Megatron.
    """
    axes = order.lower().split("-")
    digits = dict.fromkeys(sizes, 0)
    for axis in axes:
        digits[axis] = rank % sizes[axis]
        rank //= sizes[axis]
    for axis, size in sizes.items():
        if axis not in axes and size > 1:
            raise ValueError(f"the order {order} leaves out {axis}, which has {size} ranks")
    return digits


SINGLE = mesh_of(0, 1)
"""The reference's mesh: one device."""
