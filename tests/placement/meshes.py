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
    dense_at = _coordinates(rank, order, dense)
    expert_at = _coordinates(rank, order, expert)
    return Mesh(
        rank=rank,
        world_size=world_size,
        sizes=Axes(tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, dp=dense["dp"], edp=expert["dp"]),
        coordinates=Axes(
            tp=dense_at["tp"],
            cp=dense_at["cp"],
            pp=dense_at["pp"],
            ep=expert_at["ep"],
            etp=expert_at["tp"],
            dp=dense_at["dp"],
            edp=expert_at["dp"],
        ),
        vpp=vpp,
    )


def _coordinates(rank: int, order: str, sizes: dict[str, int]) -> dict[str, int]:
    """Mixed-radix digits of ``rank``, least significant axis first as ``order`` lists them."""
    digits = {}
    for axis in order.split("-"):
        digits[axis] = rank % sizes[axis]
        rank //= sizes[axis]
    return digits
