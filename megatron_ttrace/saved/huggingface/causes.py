# SPDX-License-Identifier: Apache-2.0
"""What a conversion did to a tensor. A cause is named only if it gives all of the tensor's values.

Orders of rows, columns and heads are read off: whole blocks of the right tensor are looked up in
the wrong one, and the answer is the permutation that gives the wrong tensor bit by bit.
"""

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Iterator
from enum import StrEnum

import torch

from megatron_ttrace.saved.huggingface.families import Order
from megatron_ttrace.saved.huggingface.weights import Sizes
from megatron_ttrace.trace.views import same_bits


class Cause(StrEnum):
    """What was done to a tensor."""

    ROUNDED = "rounded to another dtype on the way"
    CONSTANT = "one value everywhere, as if never loaded"
    TRANSPOSED = "transposed"
    SHIFTED = "1 was added or subtracted, as for --apply-layernorm-1p"
    QKV = "q, k and v in another order"
    GROUPS = "heads of k and v in another order"
    HEADS = "heads of q in another order"
    ROTARY = "rows of each head in the order of the other kind of rotary embedding"
    GATE_UP = "gate and up projection exchanged"
    MIXED = "rows of gate and up projection mixed"
    ROWS = "rows in another order"
    COLUMNS = "columns in another order"
    EXPERT = "the weights of another expert"
    LAYER = "the weights of another layer"
    TENSOR = "the weights of another tensor"
    CUT = "rows of the vocabulary are missing"
    PADDED = "padded rows are not zero"


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """A cause, and details of it in words."""

    cause: Cause
    note: str = ""


def of_values(
    original: torch.Tensor,
    right: torch.Tensor,
    wrong: torch.Tensor,
    order: Order,
    parts: int,
    sizes: Sizes,
) -> Diagnosis | None:
    """Why a tensor has other values, from these values alone.

    It should have ``original``, in transformers' dtype, which in that of Megatron is ``right``; it
    has ``wrong``, perhaps in another shape. Its rows are in this ``order``, of so many ``parts``.
    """
    if right.ndim == 2 and wrong.shape == right.T.shape and same_bits(wrong, right.T):
        return Diagnosis(Cause.TRANSPOSED)
    if wrong.shape != right.shape:
        return None
    for test in (_rounded, _constant, _shifted):
        if diagnosis := test(original, right, wrong):
            return diagnosis
    if order is Order.GROUPS and (diagnosis := _heads(right, wrong, sizes)):
        return diagnosis
    halves = order is Order.ALTERNATING or (order is Order.STACKED and parts == 2)
    if halves and permutation(right, wrong, len(right) // 2):
        return Diagnosis(Cause.GATE_UP)
    if rows := permutation(right, wrong):
        half = len(rows) // 2
        mixed = halves and any((row < half) is not (n < half) for n, row in enumerate(rows))
        return Diagnosis(Cause.MIXED if mixed else Cause.ROWS, _moved(rows))
    if right.ndim == 2 and (columns := permutation(right.T, wrong.T)):
        return Diagnosis(Cause.COLUMNS, _moved(columns))
    return None


def _rounded(original: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> Diagnosis | None:
    for dtype in (torch.bfloat16, torch.float16):
        if same_bits(original.to(dtype).to(wrong.dtype), wrong):
            return Diagnosis(Cause.ROUNDED, f"through {str(dtype).removeprefix('torch.')}")
    if original.dtype is torch.float32:
        cut = (original.contiguous().view(torch.int32) & -65536).view(torch.float32)
        if same_bits(cut.to(wrong.dtype), wrong):
            return Diagnosis(Cause.ROUNDED, "bits were cut off instead of rounded")
    return None


def _constant(original: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> Diagnosis | None:
    value = wrong.flatten()[:1]
    if (
        value.numel()
        and bool((wrong == value).all())
        and not bool((right == right.flatten()[0]).all())
    ):
        return Diagnosis(Cause.CONSTANT, f"all are {value.item():g}")
    return None


def _shifted(original: torch.Tensor, right: torch.Tensor, wrong: torch.Tensor) -> Diagnosis | None:
    if right.ndim == 1:
        for sign, words in ((1, "added"), (-1, "subtracted")):
            wide = (original.float() + sign).to(wrong.dtype)
            if same_bits(wide, wrong) or same_bits(right + sign, wrong):
                return Diagnosis(Cause.SHIFTED, f"1 was {words}")
    return None


def _heads(right: torch.Tensor, wrong: torch.Tensor, sizes: Sizes) -> Diagnosis | None:
    head, shared = sizes.head, sizes.heads // sizes.groups
    roles = (["q"] * shared + ["k", "v"]) * sizes.groups
    if heads := permutation(right, wrong, head):
        if any(roles[n] != roles[source] for n, source in enumerate(heads)):
            return Diagnosis(Cause.QKV)
        moved = {roles[n] for n, source in enumerate(heads) if n != source}
        return Diagnosis(Cause.HEADS if moved == {"q"} else Cause.GROUPS)
    turned = torch.tensor([role != "v" for role in roles])
    blocks = right.reshape(len(roles), head, -1)
    for order in (torch.arange(head).view(2, -1).T, torch.arange(head).view(-1, 2).T):
        rotated = torch.where(turned[:, None, None], blocks[:, order.flatten()], blocks)
        if same_bits(rotated.reshape(wrong.shape), wrong):
            return Diagnosis(Cause.ROTARY)
    return None


def permutation(right: torch.Tensor, wrong: torch.Tensor, size: int = 1) -> list[int] | None:
    """The blocks of ``size`` rows of ``right`` that are the blocks of ``wrong``, each of them once.

    Both have the same shape and dtype.

    Returns:
        The permutation; of equal blocks each stays where it is if it can. ``None`` without one.
    """
    if not size or not right.numel() or len(right) % size:
        return None
    blocks = [list(_bytes(data.reshape(len(data) // size, -1))) for data in (right, wrong)]
    free: defaultdict[bytes, dict[int, None]] = defaultdict(dict)
    for number, block in enumerate(blocks[0]):
        free[block][number] = None
    order = [number if number in free[block] else -1 for number, block in enumerate(blocks[1])]
    for number, block in enumerate(blocks[1]):
        if order[number] >= 0:
            del free[block][number]
    for number, block in enumerate(blocks[1]):
        if order[number] < 0:
            if not free[block]:
                return None
            order[number], _ = free[block].popitem()
    return order


def _bytes(blocks: torch.Tensor) -> Iterator[bytes]:
    raw = blocks.contiguous().view(torch.uint8)
    return (hashlib.blake2b(row.numpy(), digest_size=16).digest() for row in raw)


def _moved(order: list[int]) -> str:
    moved = [n for n, source in enumerate(order) if n != source]
    return f"{len(moved)} of {len(order)} moved"
