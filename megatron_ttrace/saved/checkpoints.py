# SPDX-License-Identifier: Apache-2.0
"""Two checkpoints against each other: which logical tensors and numbers are the same.

One tensor of each is in memory at a time, of a stack of layers one layer.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

import torch

from megatron_ttrace.mcore.checkpoints.numbers import alike
from megatron_ttrace.mcore.checkpoints.stored import Checkpoint, Format, Stored
from megatron_ttrace.saved.huggingface.causes import Cause
from megatron_ttrace.saved.recorded import VOCABULARY, differing, same
from megatron_ttrace.trace.codec import Record, Size
from megatron_ttrace.trace.errors import ExitCode
from megatron_ttrace.trace.states import Item, State

_STACK = re.compile(r"\blayers\.(?!\d)")
_GROUP = re.compile(r"param_groups\[[^\]]*\]")
_NAMED = 8


class Same(StrEnum):
    """Whether a tensor is the same in both checkpoints."""

    SAME = "same"
    ROUNDED = "same after rounding"
    DIFFERENT = "different"
    SHAPE = "other shape"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    NOT_COMPARED = "not compared"

    @property
    def is_same(self) -> bool:
        """Whether it is, up to the dtype in which it is stored."""
        return self in (Same.SAME, Same.ROUNDED)


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor(Record):
    """What was found out about a tensor, or about all that only one checkpoint has of a state.

    Attributes:
        name: of its parameter, in A if it has another one in B.
        rel_err: ``||b - a|| / ||a||``, 0 where it is the same, ``None`` where it was not measured.
        note: its shapes, dtypes or layers, where they differ.
        state: what of the parameter it is.
        parts: the tensors of a model of Hugging Face that were put together to it.
        cause: what the conversion of such a model did, if that explains every value.
    """

    name: str
    same: Same
    rel_err: Size | None = None
    note: str = ""
    state: str = State.WEIGHT.value
    parts: tuple[str, ...] = ()
    cause: Cause | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Number(Record):
    """A number that differs, as text; ``None`` where there is none."""

    name: str
    a: str | None
    b: str | None


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two checkpoints.

    Attributes:
        notices: what was left out, and why it is not a difference.
        weights_only: whether nothing else was compared.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[Number, ...] = ()
    notices: tuple[str, ...] = ()
    weights_only: bool = False

    @property
    def code(self) -> ExitCode:
        """Diverged if anything differs; could not check if something has not been compared."""
        if self.numbers or any(
            not tensor.same.is_same and tensor.same is not Same.NOT_COMPARED
            for tensor in self.tensors
        ):
            return ExitCode.DIVERGED
        complete = all(tensor.same.is_same for tensor in self.tensors)
        return ExitCode.EQUIVALENT if complete else ExitCode.COULD_NOT_CHECK


def compare(a: Checkpoint, b: Checkpoint, *, weights_only: bool = False) -> Comparison:
    """Compare everything that two checkpoints hold, in the order of A's tensors.

    A checkpoint in a format for weights alone is compared in its weights.

    Raises:
        TTraceError: when a file is missing or damaged.
    """
    formats = {a.format, b.format}
    notices = []
    if Format.SAFETENSORS in formats and not weights_only:
        weights_only = True
        if len(formats) > 1:
            notices.append("safetensors hold weights only: nothing else was compared")
    if weights_only:
        tensors = tuple(_tensors(_weights(a), _weights(b)))
        return Comparison(tensors, notices=tuple(notices), weights_only=True)
    numbers, groups = _numbers(a, b)
    notices += groups
    return Comparison((*_tensors(a, b), *_buckets(a, b)), tuple(numbers), tuple(notices))


def _weights(checkpoint: Checkpoint) -> Checkpoint:
    tensors = {i: s for i, s in checkpoint.tensors.items() if i.state is State.WEIGHT}
    return dataclasses.replace(checkpoint, tensors=tensors, unread={})


def _tensors(a: Checkpoint, b: Checkpoint) -> Iterator[Tensor]:
    covered: tuple[Counter[Item], Counter[Item]] = Counter(), Counter()
    pairs = []
    order = list(State)
    for item in a.tensors:
        if match := b.find(item):
            pairs.append((item, (item, a.tensors[item]), match))
    for item in b.tensors:
        if item not in a.tensors and (match := a.find(item)):
            pairs.append((item, match, (item, b.tensors[item])))
    for item, ours, theirs in sorted(pairs, key=lambda pair: order.index(pair[0].state)):
        for count, (holder, part) in zip(covered, (ours, theirs), strict=True):
            count[holder] += math.prod(part.shape)
        compared = _compared(item, ours[1], theirs[1])
        if item.state is State.MAIN and compared.same is Same.DIFFERENT:
            compared = _with_cause(compared, a, b)
        yield compared
    both = {_of_state(item) for item in a.tensors} & {_of_state(item) for item in b.tensors}
    for mine, other, count, only in (
        (a, b, covered[0], Same.ONLY_A),
        (b, a, covered[1], Same.ONLY_B),
    ):
        lacking: Counter[str] = Counter()
        for item, stored in mine.tensors.items():
            if _of_state(item) not in both:
                lacking[_of_state(item)] += 1
            elif item not in count:
                yield Tensor(item.name, only, state=_of_state(item))
            elif (missing := math.prod(stored.shape) - count[item]) > 0:
                note = f"{missing} of {math.prod(stored.shape)} elements"
                yield Tensor(item.name, only, note=note, state=_of_state(item))
        # States in buckets of another layout are there, but cannot be compared (``_buckets``).
        if lacking and (not other.unread or _shapes(a) == _shapes(b)):
            note = f"{lacking.total()} tensors"
            yield Tensor("all parameters", only, note=note, state=", ".join(lacking))


def _with_cause(main: Tensor, a: Checkpoint, b: Checkpoint) -> Tensor:
    """Main weights that differ, with the side where they are not those of the weights."""
    wrong = [
        side
        for side, checkpoint in (("A", a), ("B", b))
        if not _rounds_to_weight(checkpoint, main.name)
    ]
    if len(wrong) != 1:
        return main
    note = f"in {wrong[0]} they do not round to the weights"
    return dataclasses.replace(main, note=f"{main.note}; {note}" if main.note else note)


def _rounds_to_weight(checkpoint: Checkpoint, name: str) -> bool:
    states = [checkpoint.find(Item(state, name)) for state in (State.MAIN, State.WEIGHT)]
    main, weight = (stored and stored[1] for stored in states)
    if main is None or weight is None or main.shape != weight.shape:
        return True
    return all(
        same(x.read().to((values := y.read()).dtype), values) for x, y in _parts(name, main, weight)
    )


def _parts(name: str, a: Stored, b: Stored) -> list[tuple[Stored, Stored]]:
    """Both tensors, or the layers of both if they are stacks of layers."""
    if not (_STACK.search(name) and a.shape):
        return [(a, b)]
    return [(x, y) for n in range(a.shape[0]) if (x := a.at(n)) and (y := b.at(n))]


def _of_state(item: Item) -> str:
    return item.slot or item.state.value


def _compared(item: Item, a: Stored, b: Stored) -> Tensor:
    state = _of_state(item)
    notes = []
    if a.shape != b.shape:
        shapes = f"{list(a.shape)} and {list(b.shape)}"
        padded = item.name.endswith(VOCABULARY) and a.shape[1:] == b.shape[1:]
        if not padded:
            return Tensor(item.name, Same.SHAPE, note=shapes, state=state)
        notes.append(f"{shapes}: padded rows that only one has are not compared")
    parts = _parts(item.name, a, b)
    wrong, squares = [], torch.zeros(2, dtype=torch.float64)
    rounded = ""
    for number, (x, y) in enumerate(parts):
        ours, theirs, rounded = _same_dtype(x.read(), y.read())
        rows = slice(min(len(ours), len(theirs))) if notes else ...
        difference = _squares(ours[rows], theirs[rows])
        squares += difference
        if difference[0]:
            wrong.append(number)
    if rounded:
        notes.append(rounded)
    if wrong and len(parts) > 1:
        shown = ", ".join(map(str, wrong[:_NAMED])) + (", ..." if len(wrong) > _NAMED else "")
        notes.append(f"layers {shown} of {len(parts)}")
    return _measured(item.name, state, squares, bool(rounded), notes)


def _measured(
    name: str, state: str, squares: torch.Tensor, rounded: bool, notes: list[str]
) -> Tensor:
    """What the sums of :func:`_squares` say about a tensor, in one dtype if it was ``rounded``."""
    note = "; ".join(notes)
    if not squares[0]:
        return Tensor(name, Same.ROUNDED if rounded else Same.SAME, 0.0, note, state)
    error = float((squares[0] / squares[1]).sqrt())
    error = error if math.isfinite(error) else math.inf
    return Tensor(name, Same.DIFFERENT, error, note, state)


def _same_dtype(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, str]:
    """Both in one dtype, of two floating ones the narrower; and their dtypes if these differ."""
    if ours.dtype == theirs.dtype:
        return ours, theirs, ""
    names = sorted(str(data.dtype).removeprefix("torch.") for data in (ours, theirs))
    floating = [data.dtype for data in (ours, theirs) if data.is_floating_point()]
    # Integers do not round: in a narrower dtype they would wrap.
    common = max(floating, key=lambda dtype: torch.finfo(dtype).eps, default=torch.int64)
    return ours.to(common), theirs.to(common), " and ".join(names)


def _squares(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """The sum of squares of the difference, 0 only if all bits agree, and that of ours."""
    if not differing(ours, theirs).any():
        return torch.stack([torch.zeros((), dtype=torch.float64), ours.double().square().sum()])
    x, y = ours.double(), theirs.double()
    # A difference may be too small to have a square.
    apart = (y - x).square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.stack([apart, x.square().sum()])


def _buckets(a: Checkpoint, b: Checkpoint) -> Iterator[Tensor]:
    """States of the distributed optimizer that are stored as it has them in memory.

    Where parameters are in a bucket depends on the layout, and is not stored.
    """
    shapes = [_shapes(checkpoint) for checkpoint in (a, b)]
    if shapes[0] != shapes[1]:
        lacking = [not any(i.state is not State.WEIGHT for i in side.tensors) for side in (a, b)]
        same = Same.NOT_COMPARED
        note = (
            "buckets of the distributed optimizer (dp_reshardable) can only be compared with those "
            "of the same layout: save with --dist-ckpt-optim-fully-reshardable, or compare "
            "--weights-only"
        )
        for shape, lacks, only in zip(shapes, lacking, (Same.ONLY_B, Same.ONLY_A), strict=True):
            if not shape and lacks:
                same, note = only, ""
        yield Tensor("all parameters", same, note=note, state="optimizer state")
        return
    for key, stored in a.unread.items():
        yield _bucket(key, stored, b.unread[key])


def _shapes(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {key: bucket.shape for key, bucket in checkpoint.unread.items()}


def _bucket(key: str, a: Stored, b: Stored) -> Tensor:
    state = key.rpartition(".")[2]
    ours, theirs, rounded = _same_dtype(a.read(), b.read())
    free = _between_parameters(a) & _between_parameters(b)
    notes = [rounded] if rounded else []
    if skipped := int((differing(ours, theirs) & free).sum()):
        notes.append(f"{skipped} elements between parameters are not compared")
        ours = torch.where(free, 0, ours)
        theirs = torch.where(free, 0, theirs)
    return _measured(key, state, _squares(ours, theirs), bool(rounded), notes)


def _between_parameters(bucket: Stored) -> torch.Tensor:
    mask = torch.zeros(bucket.shape, dtype=torch.bool)
    for start, end in bucket.padding:
        mask[start:end] = True
    return mask


def _numbers(a: Checkpoint, b: Checkpoint) -> tuple[list[Number], list[str]]:
    """Those that differ, and notices of parameter groups that only one checkpoint lists.

    Megatron stores the groups of the first rank, and other pipeline stages may have others.
    """
    numbers, groups = [], set()
    for name in {**a.numbers, **b.numbers}:
        ours, theirs = a.numbers.get(name), b.numbers.get(name)
        if alike(ours, theirs):
            continue
        if ours is None or theirs is None:
            other = b if theirs is None else a
            group = _GROUP.match(name)
            if group and not any(key.startswith(group[0]) for key in other.numbers):
                groups.add(f"only {'A' if theirs is None else 'B'} lists {group[0]}")
                continue
        numbers.append(
            Number(name, *(None if value is None else str(value) for value in (ours, theirs)))
        )
    return numbers, sorted(groups)
