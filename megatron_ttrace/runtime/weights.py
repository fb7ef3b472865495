# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints against each other: which logical weights are the same, and which are not.

Chunks are compared where they overlap, so neither layout matters, and no whole tensor is in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import torch

from megatron_ttrace.compare.tolerance import epsilon
from megatron_ttrace.errors import TTraceError
from megatron_ttrace.mcore.checkpoints.stored import Chunk, Stored
from megatron_ttrace.trace.codec import Record, Size

_LAYER = re.compile(r"(?<=layers\.)(\d+)\.")
_VOCABULARY = ("word_embeddings.weight", "output_layer.weight")


class Same(StrEnum):
    """Whether a weight is the same in both checkpoints."""

    SAME = "same"
    ROUNDED = "same after rounding"
    DIFFERENT = "different"
    SHAPE = "other shape"
    ONLY_A = "only in A"
    ONLY_B = "only in B"

    @property
    def is_same(self) -> bool:
        """Whether it is, up to the dtype in which it is stored."""
        return self in (Same.SAME, Same.ROUNDED)


@dataclasses.dataclass(frozen=True, slots=True)
class Weight(Record):
    """What was found out about a weight.

    Attributes:
        name: of the weight, in A if it has another one in B.
        same: whether it is the same.
        rel_err: ``||b - a|| / ||a||``, 0 where it is the same, ``None`` where it was not measured.
        note: its shapes or dtypes, where they differ.
    """

    name: str
    same: Same
    rel_err: Size | None = None
    note: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """A stored weight, or a layer of one in which all layers are stacked along the first dim."""

    stored: Stored
    layer: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape if self.layer is None else self.stored.shape[1:]

    def chunks(self) -> Iterator[tuple[Chunk, tuple[int, ...], tuple[int, ...]]]:
        """Chunks, with the offsets and sizes of what they hold of this part."""
        for chunk in self.stored.chunks:
            first = 0 if self.layer is None else 1
            inside = self.layer is None or (
                chunk.offsets[0] <= self.layer < chunk.offsets[0] + chunk.sizes[0]
            )
            if inside:
                yield chunk, chunk.offsets[first:], chunk.sizes[first:]

    def data(self, chunk: Chunk) -> torch.Tensor:
        found = _read(chunk)
        return found if self.layer is None else found[self.layer - chunk.offsets[0]]


@functools.lru_cache(maxsize=4)
def _read(chunk: Chunk) -> torch.Tensor:
    return chunk.read()


def compare(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> Iterator[Weight]:
    """Compare all weights of two checkpoints, in the order of A's names.

    A layer that is stored on its own is compared with its part of a stack of layers.

    Raises:
        TTraceError: when a file is missing or damaged, or does not hold all of a weight.
    """
    left = dict.fromkeys(b)
    for name, stored in a.items():
        if name in b:
            left.pop(name, None)
            yield _compared(name, _Part(stored), _Part(b[name]))
        elif part := _in_stack(name, stored, b):
            left.pop(_LAYER.sub("", name), None)
            yield _compared(name, _Part(stored), part)
        elif _unstacked(name, stored, b):
            for layer in range(stored.shape[0]):
                there = _of_layer(name, layer)
                left.pop(there, None)
                yield _compared(there, _Part(stored, layer), _Part(b[there]))
        else:
            yield Weight(name, Same.ONLY_A)
    for name in left:
        yield Weight(name, Same.ONLY_B)


def _in_stack(name: str, stored: Stored, others: Mapping[str, Stored]) -> _Part | None:
    match = _LAYER.search(name)
    stack = others.get(_LAYER.sub("", name)) if match else None
    if match is None or stack is None or stack.shape[1:] != stored.shape:
        return None
    return _Part(stack, int(match[1])) if int(match[1]) < stack.shape[0] else None


def _unstacked(name: str, stored: Stored, others: Mapping[str, Stored]) -> bool:
    """Whether the other checkpoint has each layer of this stack on its own."""
    return bool(stored.shape) and all(
        (one := others.get(_of_layer(name, layer))) is not None and one.shape == stored.shape[1:]
        for layer in range(stored.shape[0])
    )


def _of_layer(name: str, layer: int) -> str:
    return name.replace("layers.", f"layers.{layer}.", 1)


def _compared(name: str, a: _Part, b: _Part) -> Weight:
    shape, note = a.shape, ""
    if a.shape != b.shape:
        note = f"{list(a.shape)} and {list(b.shape)}"
        padded = name.endswith(_VOCABULARY) and a.shape[1:] == b.shape[1:]
        if not padded:
            return Weight(name, Same.SHAPE, note=note)
        shape = (min(a.shape[0], b.shape[0]), *a.shape[1:])
        note = f"{note}: padded rows that only one has are not compared"
    equal, diff, size, count = True, 0.0, 0.0, 0
    dtypes: set[torch.dtype] = set()
    for ours, theirs in _overlaps(a, b, shape):
        count += ours.numel()
        dtypes |= {ours.dtype, theirs.dtype}
        narrow = max((ours.dtype, theirs.dtype), key=epsilon)
        x, y = ours.to(narrow), theirs.to(narrow)
        if bool(((x == y) | (x.isnan() & y.isnan())).all()):
            size += float(x.double().square().sum())
            continue
        equal = False
        x, y = x.double(), y.double()
        diff += float((y - x).square().sum())
        size += float(x.square().sum())
    if count != math.prod(shape):
        raise TTraceError(f"{name}: the chunks of a checkpoint hold {count} of {shape} elements")
    if len(dtypes) > 1:
        told = " and ".join(sorted(str(one).removeprefix("torch.") for one in dtypes))
        note = "; ".join(filter(None, (note, told)))
    if not equal:
        error = math.sqrt(diff / size) if size and math.isfinite(diff / size) else math.inf
        return Weight(name, Same.DIFFERENT, error, note)
    return Weight(name, Same.SAME if len(dtypes) < 2 else Same.ROUNDED, 0.0, note)


def _overlaps(
    a: _Part, b: _Part, shape: tuple[int, ...]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What both checkpoints hold of the same elements, piece by piece."""
    for ours, a_offsets, a_sizes in a.chunks():
        for theirs, b_offsets, b_sizes in b.chunks():
            starts = [max(pair) for pair in zip(a_offsets, b_offsets, strict=True)]
            a_ends = (start + size for start, size in zip(a_offsets, a_sizes, strict=True))
            b_ends = (start + size for start, size in zip(b_offsets, b_sizes, strict=True))
            ends = [min(three) for three in zip(a_ends, b_ends, shape, strict=True)]
            if any(start >= end for start, end in zip(starts, ends, strict=True)):
                continue
            yield (
                _cut(a.data(ours), a_offsets, starts, ends),
                _cut(b.data(theirs), b_offsets, starts, ends),
            )


def _cut(
    data: torch.Tensor, offsets: tuple[int, ...], starts: list[int], ends: list[int]
) -> torch.Tensor:
    for dim, (offset, start, end) in enumerate(zip(offsets, starts, ends, strict=True)):
        data = data.narrow(dim, start - offset, end - start)
    return data
