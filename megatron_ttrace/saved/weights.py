# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints against each other: which logical weights are the same, and which are not.

One weight of each is in memory at a time. Layers stacked in one tensor are read one by one.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum

import torch

from megatron_ttrace.compare.tolerance import epsilon
from megatron_ttrace.mcore.checkpoints.stored import Stored
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

    def read(self) -> torch.Tensor:
        stored = self.stored if self.layer is None else self.stored.at(self.layer)
        assert stored is not None
        return stored.read()


def compare(a: Mapping[str, Stored], b: Mapping[str, Stored]) -> Iterator[Weight]:
    """Compare all weights of two checkpoints, in the order of A's names.

    A layer that is stored on its own is compared with its part of a stack of layers.

    Raises:
        TTraceError: when a file is missing or damaged.
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
    notes = []
    if a.shape != b.shape:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        padded = name.endswith(_VOCABULARY) and a.shape[1:] == b.shape[1:]
        if not padded:
            return Weight(name, Same.SHAPE, note=shapes)
        notes.append(f"{shapes}: padded rows that only one has are not compared")
    ours, theirs = a.read(), b.read()
    if notes:
        rows = min(len(ours), len(theirs))
        ours, theirs = ours[:rows], theirs[:rows]
    rounded = ours.dtype != theirs.dtype
    if rounded:
        dtypes = sorted(str(one.dtype).removeprefix("torch.") for one in (ours, theirs))
        notes.append(" and ".join(dtypes))
        narrow = max((ours.dtype, theirs.dtype), key=epsilon)
        ours, theirs = ours.to(narrow), theirs.to(narrow)
    note = "; ".join(notes)
    if bool(((ours == theirs) | (ours.isnan() & theirs.isnan())).all()):
        return Weight(name, Same.ROUNDED if rounded else Same.SAME, 0.0, note)
    x, y = ours.double(), theirs.double()
    error = float((y - x).norm() / x.norm())
    return Weight(name, Same.DIFFERENT, error if math.isfinite(error) else math.inf, note)
