# SPDX-License-Identifier: Apache-2.0
"""Names of Megatron's process groups, by the mesh axes that they span."""

from __future__ import annotations

import math
from collections.abc import Sequence

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.placement.mesh import Mesh

_DESCRIBED = {
    "TENSOR_MODEL_PARALLEL": ("tp",),
    "TENSOR_AND_CONTEXT_PARALLEL": ("tp", "cp"),
    "TENSOR_AND_DATA_PARALLEL": ("tp", "dp"),
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": ("tp", "dp", "cp"),
    "CONTEXT_PARALLEL": ("cp",),
    "DATA_PARALLEL": ("dp",),
    "DATA_PARALLEL_GROUP_WITH_CP": ("dp", "cp"),
    "PIPELINE_MODEL_PARALLEL": ("pp",),
    "MODEL_PARALLEL": ("tp", "pp"),
    "EXPERT_MODEL_PARALLEL": ("ep",),
    "EXPERT_TENSOR_PARALLEL": ("etp",),
    "EXPERT_TENSOR_AND_MODEL_PARALLEL": ("etp", "ep"),
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL": ("etp", "ep", "pp"),
    "EXPERT_DATA_PARALLEL": ("edp",),
}
"""``group_desc`` of the groups of megatron/core/parallel_state.py, without its ending."""

_EMBEDDINGS = {"EMBEDDING": "embedding", "POSITION_EMBEDDING": "position-embedding"}
"""Groups of the first and the last pipeline stage."""

_LAYOUTS = (("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp"))


def group_name(description: str, members: Sequence[int], mesh: Mesh) -> str:
    """``tp``, ``dp-cp``, ``embedding``, ``world``: from a group's description; empty if unknown.

    Axes of size 1 are left out. A group over a part of an axis has no name of its own.
    """
    plain = description.removesuffix("_AG").removesuffix("_GLOO")
    words = plain.removesuffix("_GROUP")
    if words in _EMBEDDINGS:
        return _EMBEDDINGS[words]
    if description == "default_pg":
        return "world"
    axes = _DESCRIBED.get(words, ())
    if len(members) != math.prod(mesh.size(axis) for axis in axes):
        return ""
    return "-".join(axis for axis in axes if mesh.size(axis) > 1)


def axes_of(members: Sequence[int], meshes: Sequence[Mesh]) -> str:
    """The axes that a group without a description spans; ``ranks`` if it is not made of axes.

    Args:
        members: global ranks.
        meshes: of all ranks.
    """
    for layout in _LAYOUTS:
        axes = [a for a in layout if len({meshes[rank].at(a) for rank in members}) > 1]
        if axes and len(members) == math.prod(meshes[0].size(axis) for axis in axes):
            return "-".join(axes)
    return "ranks"


def unseen_axes(args: MegatronArguments) -> tuple[str, ...]:
    """Axes over which a run communicates outside of PyTorch's process groups.

    TransformerEngine's user buffers overlap tensor-parallel communication with products. The
    ``flex`` dispatcher has libraries of its own (megatron/core/transformer/moe/fused_a2a.py).
    """
    overlaps = bool(getattr(args, "tp_comm_overlap", False))
    flex = bool(args.num_experts) and args.moe_token_dispatcher_type == "flex"  # noqa: S105
    return ("tp",) * overlaps + ("etp", "ep") * flex
