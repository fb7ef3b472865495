# SPDX-License-Identifier: Apache-2.0
"""Infer the placement of an activation from its shapes.

Megatron divides activations in few ways, and the logical shape (the reference's) shows which:
context parallelism divides the sequence; tensor parallelism then divides one dim: the sequence
again (sequence parallelism), or a hidden, head or vocabulary dim. Where a rank has the sequence as
a whole, as a fork's attention between two all-to-alls, context parallelism divides what tensor
parallelism left of such a dim. Keys and values of fewer groups than tensor-parallel ranks ([...,
groups, channels]) are divided into single groups.
A shape that fits none of these gets the verdict `shape`.
"""

from collections.abc import Sequence

from megatron_ttrace.placement.boxes import length
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.placement.placements import BlockShard, GroupShard, Shard, ZigZag
from megatron_ttrace.placement.plan import Placements, Step, dims_of


class NoPlacementError(ValueError):
    """The local shape cannot be a part of the logical one in this layout."""


def infer_activation(
    local: Sequence[int],
    logical: Sequence[int],
    mesh: Mesh,
    *,
    seq_length: int,
    blocks: int | tuple[int, ...] = 1,
    ends: tuple[int, ...] = (),
) -> Placements:
    """The placement of an activation or its gradient of these shapes.

    The sequence dim is recognised by the logical ``seq_length``. ``blocks`` are stacked in the last
    dim, as of :class:`BlockShard`; 1 if none are. ``ends`` are of packed sequences that context
    parallelism divides one by one, as of :class:`ZigZag`.

    Raises ``NoPlacementError`` with a sentence that says what does not fit.
    """
    if len(local) != len(logical):
        raise NoPlacementError(f"{tuple(local)} does not have as many dims as {tuple(logical)}")
    ratios = []
    for part, size in zip(local, logical, strict=True):
        if (part == 0) != (size == 0) or (part and size % part):
            raise NoPlacementError(f"{tuple(local)} is not an even part of {tuple(logical)}")
        ratios.append(size // part if part else 1)
    steps = []
    cp, tp = mesh.size("cp"), mesh.size("tp")
    dim = _sequence_dim(ratios, logical, cp, seq_length)
    if dim is not None:
        steps.append(Step("cp", ZigZag(dim, ends)))
        ratios[dim] //= cp
    divided = [dim for dim, ratio in enumerate(ratios) if ratio > 1]
    heads = len(logical) - 2
    if dim is None and len(divided) == 1 and ratios[divided[0]] in {cp, cp * tp} - {tp}:
        first = 1 if heads == 1 else 0  # of [sequence, samples, hidden] no samples
        axes = ("cp",) if ratios[divided[0]] == cp else ("tp", "cp")
        if divided[0] > first:
            return tuple(Step(axis, Shard(divided[0])) for axis in axes)
    groups = logical[heads] if divided == [heads] and heads and local[heads] == 1 else tp
    if groups < tp and tp % groups == 0:
        return (*steps, Step("tp", GroupShard(heads, groups)))
    if len(divided) > 1 or any(ratios[dim] != tp for dim in divided):
        raise NoPlacementError(
            f"{tuple(local)} does not match any division of {tuple(logical)} by cp={cp} and tp={tp}"
        )
    for dim in divided:
        last = dim == len(logical) - 1
        stacked = blocks != 1 and last
        steps.append(Step("tp", BlockShard(dim, blocks) if stacked else Shard(dim)))
    return tuple(steps)


def infer_head_rows(
    local: Sequence[int], logical: Sequence[int], heads: int, mesh: Mesh
) -> Placements:
    """The placement of a tensor [tokens * heads, ...], all heads of a token one after the other.

    Its ranks hold all tokens and a part of the heads: tensor parallelism divides them, and context
    parallelism what is left. Raises as :func:`infer_activation`.
    """
    if logical[0] % heads:
        raise NoPlacementError(f"{logical[0]} rows are not a multiple of {heads} heads")
    rule = BlockShard(0, logical[0] // heads)
    placement = tuple(Step(axis, rule) for axis in ("tp", "cp") if mesh.size(axis) > 1)
    try:
        fits = [length(dim) for dim in dims_of(logical, placement, mesh)] == list(local)
    except ValueError:
        fits = False
    if not fits:
        raise NoPlacementError(
            f"{tuple(local)} does not match a division of {heads} heads in {tuple(logical)}"
        )
    return placement


def infer_buffer(
    local: Sequence[int], logical: Sequence[int], mesh: Mesh, *, in_experts: bool
) -> Placements:
    """The placement of a fork's buffer, of which a rank may have its own heads, or experts.

    Unlike a parameter's, nothing marks its dim. Raises as :func:`infer_activation`.
    """
    axis = "ep" if in_experts else "tp"
    sizes = [*zip(local, logical, strict=False)]
    divided = [dim for dim, (part, size) in enumerate(sizes) if part != size]
    is_part = all(sizes[dim][0] * mesh.size(axis) == sizes[dim][1] for dim in divided)
    if len(local) != len(logical) or len(divided) > 1 or not is_part:
        raise NoPlacementError(f"the whole tensor is {local}, in the reference {logical}")
    return tuple(Step(axis, Shard(dim)) for dim in divided)


def _sequence_dim(
    ratios: Sequence[int], logical: Sequence[int], cp: int, seq_length: int
) -> int | None:
    """The dim that context parallelism divides: the sequence, or all tokens of a microbatch.

    A router sees [tokens, hidden], tokens numbered sequence first: the same chunks, each as many
    times longer as there are samples.
    """
    if cp == 1:
        return None
    divided = [dim for dim, ratio in enumerate(ratios) if ratio > 1 and ratio % cp == 0]
    for dim in divided:
        if logical[dim] == seq_length:
            return dim
    return 0 if 0 in divided and logical[0] % seq_length == 0 else None
