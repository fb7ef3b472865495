# SPDX-License-Identifier: Apache-2.0
"""Meshes of any layout, numbered as Megatron numbers ranks.

Megatron's ``RankGenerator`` (megatron/core/parallel_state.py) orders ranks by ``--order``
``tp-cp-ep-dp-pp``; the first axis varies fastest.
"""

from megatron_ttrace.placement.mesh import Axes, Mesh

DEFAULT_ORDER = "tp-cp-ep-dp-pp"


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
    """The coordinates of ``rank``; the layout must divide the world."""
    etp = tp if etp is None else etp
    dense = {"tp": tp, "cp": cp, "pp": pp, "ep": 1, "dp": world_size // (tp * cp * pp)}
    expert = {"tp": etp, "cp": 1, "pp": pp, "ep": ep, "dp": world_size // (etp * ep * pp)}
    coordinates = (_coordinates(rank, order, sizes) for sizes in (dense, expert))
    return Mesh(rank, world_size, _axes(dense, expert), _axes(*coordinates), vpp)


def _axes(dense: dict[str, int], expert: dict[str, int]) -> Axes:
    """The numbers of attention layers, and of experts."""
    of_experts = {"ep": expert["ep"], "etp": expert["tp"], "edp": expert["dp"]}
    return Axes(tp=dense["tp"], cp=dense["cp"], pp=dense["pp"], dp=dense["dp"], **of_experts)


def _coordinates(rank: int, order: str, sizes: dict[str, int]) -> dict[str, int]:
    """Mixed-radix digits of ``rank``, least significant axis first as ``order`` lists them."""
    digits = {}
    for axis in order.split("-"):
        digits[axis] = rank % sizes[axis]
        rank //= sizes[axis]
    return digits
