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
