# SPDX-License-Identifier: Apache-2.0
"""A model of Hugging Face against the checkpoint of Megatron's that it was converted to, or from.

One tensor of Megatron's, and what it was made of, is in memory at a time.
"""

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from megatron_ttrace.mcore.checkpoints.stored import (
    Checkpoint,
    Format,
    Stored,
    open_checkpoint,
    safetensors_of,
    with_blocks_stacked,
)
from megatron_ttrace.saved import checkpoints
from megatron_ttrace.saved.checkpoints import Comparison, Same, Tensor
from megatron_ttrace.saved.huggingface import causes, families
from megatron_ttrace.saved.huggingface.causes import Cause, Diagnosis
from megatron_ttrace.saved.huggingface.families import HEAD, Order, Part
from megatron_ttrace.saved.huggingface.modules import layer_of
from megatron_ttrace.saved.huggingface.weights import Pair, Table
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.states import Item, State
from megatron_ttrace.trace.views import same_bits

_DERIVED = "rotary_emb.inv_freq"
"""Buffers that follow from the config; old files have them."""
_LATER, _PREDICTED = "mtp.", "num_nextn_predict_layers"
"""Layers for multi-token prediction: by this name, or so many in files after the others."""
_CONFIG = "config.json"
_FOLLOWS = "{} is not read: it follows from other values"


@dataclasses.dataclass(frozen=True)
class Files:
    """A model's directory; its tensors, by name, are read when they are asked for."""

    folder: Path
    config: families.Config
    family: families.Family
    tensors: Mapping[str, Stored]


def is_model(folder: Path) -> bool:
    """Whether a directory holds a model's config and safetensors."""
    return (folder / _CONFIG).is_file() and next(folder.glob("*.safetensors"), None) is not None


def open_files(folder: Path) -> Files:
    """A model's directory.

    Raises:
        TTraceError: when the family is not supported, or a file is missing or damaged.
    """
    config = families.read_config(folder / _CONFIG)
    family = families.family_of(config, weights_only=True)
    return Files(folder, config, family, safetensors_of(folder))


def compare_any(a: Path, b: Path, *, weights_only: bool = False) -> Comparison:
    """Compare two checkpoints of Megatron's, or one with a model of Hugging Face.

    Raises:
        TTraceError: when there is none, or a file is missing or damaged.
    """
    models = [is_model(folder) for folder in (a, b)]
    if models.count(True) == 1:
        checkpoint = open_checkpoint(a if models[1] else b)
        if checkpoint.format is not Format.SAFETENSORS:
            files = open_files(a if models[0] else b)
            return compare(files, checkpoint, swapped=models[1])
    sides = map(open_checkpoint, (a, b))
    if not all(models):
        return checkpoints.compare(*sides, weights_only=weights_only)
    read = [_read_by(folder, side) for folder, side in zip((a, b), sides, strict=True)]
    left = sorted({name for _, names in read for name in names})
    compared = checkpoints.compare(*(side for side, _ in read), weights_only=weights_only)
    return dataclasses.replace(compared, notices=(*compared.notices, *map(_FOLLOWS.format, left)))


def _read_by(folder: Path, files: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """What a model reads of its files, and the names of the rest: exports need not have that."""
    is_tied = families.read_config(folder / _CONFIG).get("tie_word_embeddings") is True
    ends = (_DERIVED, *(("lm_head.weight",) if is_tied else ()))
    tensors = {item: s for item, s in files.tensors.items() if not item.name.endswith(ends)}
    left = [item.name for item in files.tensors if item not in tensors]
    return dataclasses.replace(files, tensors=tensors), left


def compare(files: Files, checkpoint: Checkpoint, *, swapped: bool = False) -> Comparison:
    """Compare every weight of a model with those of Megatron's checkpoint, bit by bit.

    ``swapped``: the checkpoint is A, the original, and the model was made of it.

    Raises:
        TTraceError: when a file is damaged, or the files do not fit their config.
    """
    return _Conversion(files, with_blocks_stacked(checkpoint), swapped).comparison()


class _Conversion:
    def __init__(self, files: Files, checkpoint: Checkpoint, swapped: bool) -> None:
        self._hf, self._megatron, self._swapped = files, checkpoint, swapped
        self._only_hf, self._only_megatron = Same.ONLY_A, Same.ONLY_B
        if swapped:
            self._only_hf, self._only_megatron = Same.ONLY_B, Same.ONLY_A
        self._table = Table.of(
            files.family,
            files.config,
            lambda name: checkpoint.find(Item(State.WEIGHT, name)) is not None,
            files.tensors.__contains__,
        )
        self._notices: list[str] = []
        self._by_sketch: dict[tuple[torch.Size, torch.dtype], dict[bytes, list[Pair]]] = {}

    def comparison(self) -> Comparison:
        """The answer."""
        tensors = (*self._pairs(), *self._rest())
        if any(item.state is not State.WEIGHT for item in self._megatron.tensors):
            self._notices.append(
                "files of Hugging Face hold weights only: nothing else was compared"
            )
        return Comparison(tensors, notices=tuple(self._notices), weights_only=True)

    def _pairs(self) -> Iterator[Tensor]:
        for pair in self._table.pairs:
            names = _names(pair.parts)
            if absent := [part.name for part in pair.parts if part.name not in self._hf.tensors]:
                note = f"without {', '.join(absent)}"
                yield Tensor(pair.megatron, self._only_megatron, note=note, parts=names)
            else:
                yield dataclasses.replace(self._pair(pair), parts=names)

    def _pair(self, pair: Pair) -> Tensor:
        original, wrong = self._original(pair), self._stored(pair).read()
        right = original.to(wrong.dtype)
        notes = []
        if original.dtype != wrong.dtype:
            names = [str(data.dtype).removeprefix("torch.") for data in (original, wrong)]
            notes.append("{} in Hugging Face, {} in Megatron".format(*names))
        diagnosis = None
        if pair.rule.padded and wrong.shape[1:] == right.shape[1:] and len(wrong) != len(right):
            notes.append(f"Megatron has {len(wrong)} rows for a vocabulary of {len(right)}")
            rows = min(len(wrong), len(right))
            diagnosis = self._padding(pair, wrong[rows - 1 :])
            original, right, wrong = original[:rows], right[:rows], wrong[:rows]
        error: float | None = 0.0
        if wrong.shape != right.shape:
            notes.append(f"{list(right.shape)} in Hugging Face, {list(wrong.shape)} in Megatron")
            same, error = Same.SHAPE, None
        elif not same_bits(right, wrong):
            same, error = Same.DIFFERENT, _error(right, wrong)
        elif diagnosis:
            same = Same.SHAPE if diagnosis.cause is Cause.CUT else Same.DIFFERENT
        else:
            exact = same_bits(right.to(original.dtype), original)
            return Tensor(
                pair.megatron, Same.SAME if exact else Same.ROUNDED, 0.0, "; ".join(notes)
            )
        if error != 0.0:
            parts, sizes = len(pair.parts), self._table.sizes
            values = original, right, wrong
            if self._swapped:
                values = wrong, wrong.to(original.dtype), original
            diagnosis = causes.of_values(*values, pair.rule.order, parts, sizes)
            diagnosis = diagnosis or self._elsewhere(pair, wrong)
        if diagnosis and diagnosis.note:
            notes.append(diagnosis.note)
        elif diagnosis is None and error is not None:
            notes.append(_where(right, wrong))
        cause = diagnosis.cause if diagnosis else None
        return Tensor(pair.megatron, same, error, "; ".join(notes), cause=cause)

    def _padding(self, pair: Pair, rows: torch.Tensor) -> Diagnosis | None:
        """What is wrong with the rows that only one has, of which Megatron's softmax has its own.

        Some converters append zeros, Megatron-LM's (tools/checkpoint) repeats the last row. A
        checkpoint that is itself the original may have trained them. ``rows`` are the last one of
        the vocabulary, and Megatron's after it.
        """
        if len(rows) == 1:
            return Diagnosis(Cause.CUT)
        is_head = pair.rule is HEAD or self._table.sizes.tied
        if self._swapped or not is_head:
            return None
        if rows[1:].any() and not same_bits(rows[1:], rows[:1].expand_as(rows[1:])):
            return Diagnosis(Cause.PADDED)
        return None

    def _elsewhere(self, pair: Pair, wrong: torch.Tensor) -> Diagnosis | None:
        """Another tensor whose values these are; those in the same layer come first."""
        places: dict[Cause, list[Pair]] = {}
        for other in self._sketches(wrong.shape, wrong.dtype).get(
            _sketch(wrong, self._lead(pair)), ()
        ):
            if other is not pair and same_bits(self._original(other).to(wrong.dtype), wrong):
                places.setdefault(_relation(pair, other), []).append(other)
        # Equal tensors may be in many places, of which the files do not say which was taken.
        if len(places) != 1:
            return None
        ((cause, sources),) = places.items()
        more = f" and {len(sources) - 1} equal ones" if len(sources) > 1 else ""
        return Diagnosis(cause, f"those of {', '.join(_names(sources[0].parts))}{more}")

    def _sketches(self, shape: torch.Size, dtype: torch.dtype) -> Mapping[bytes, list[Pair]]:
        """The pairs of a shape by their first row, or by the first rows if they have no columns."""
        if (shape, dtype) in self._by_sketch:
            return self._by_sketch[shape, dtype]
        sketches: defaultdict[bytes, list[Pair]] = defaultdict(list)
        for pair in self._table.pairs:
            is_complete = all(part.name in self._hf.tensors for part in pair.parts)
            if is_complete and self._shape(pair) == tuple(shape):
                first = self._oriented(pair.parts[0], self._lead(pair)).to(dtype)
                sketches[_sketch(first, self._lead(pair))].append(pair)
        self._by_sketch[shape, dtype] = sketches
        return sketches

    def _lead(self, pair: Pair) -> int:
        """A number of rows that begin both Megatron's tensor and the first part of it."""
        if len(self._shape(pair)) > 1 or pair.rule.order is Order.ALTERNATING:
            return 1
        if pair.rule.order is Order.GROUPS:
            return self._table.sizes.head
        return self._shape(pair)[0] // len(pair.parts)

    def _shape(self, pair: Pair) -> tuple[int, ...]:
        shapes = [self._part(part).shape[:: -1 if part.transposed else 1] for part in pair.parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def _original(self, pair: Pair) -> torch.Tensor:
        try:
            return self._table.join(pair, [self._part(part).read() for part in pair.parts])
        except RuntimeError as error:
            names = ", ".join(_names(pair.parts))
            raise TTraceError(f"{self._hf.folder}: {names} do not fit each other") from error

    def _oriented(self, part: Part, rows: int) -> torch.Tensor:
        stored = self._part(part)
        if part.transposed:
            return stored.read().T[:rows]
        return stored.rows(0, min(rows, stored.shape[0])).read()

    def _part(self, part: Part) -> Stored:
        stored = self._hf.tensors[part.name]
        if part.expert is None:
            return stored
        if (of_expert := stored.at(part.expert)) is None:
            raise TTraceError(f"{self._hf.folder}: {part.name} has no expert {part.expert}")
        return of_expert

    def _stored(self, pair: Pair) -> Stored:
        match = self._megatron.find(Item(State.WEIGHT, pair.megatron))
        assert match is not None  # the table holds what is found
        return match[1]

    def _rest(self) -> Iterator[Tensor]:
        """What has no counterpart."""
        for pair in self._table.missing:
            names = _names(pair.parts)
            if any(name in self._hf.tensors for name in names):
                yield Tensor(", ".join(names), self._only_hf)
            else:
                self._notices.append(f"config.json asks for {', '.join(names)}, which neither has")
        pairs = (*self._table.pairs, *self._table.missing)
        compared = {part.name for pair in pairs for part in pair.parts}
        layers, predicted = self._table.sizes.layers, self._hf.config.get(_PREDICTED) or 0
        later = 0
        for name in sorted(self._hf.tensors.keys() - compared):
            number = layer_of(name)
            is_later = number is not None and layers <= number < layers + predicted
            if is_later or name.startswith(_LATER):
                later += 1
            elif name.endswith(_DERIVED) or (name == HEAD.hf[0][0].name and self._table.sizes.tied):
                self._notices.append(_FOLLOWS.format(name))
            else:
                yield Tensor(name, self._only_hf)
        counts: Counter[Item] = Counter()
        for pair in self._table.pairs:
            if match := self._megatron.find(Item(State.WEIGHT, pair.megatron)):
                counts[match[0]] += math.prod(match[1].shape)
        for item, stored in self._megatron.tensors.items():
            missing = math.prod(stored.shape) - counts[item]
            if item.state is State.WEIGHT and missing > 0 and item.name.startswith(_LATER):
                later += 1
            elif item.state is State.WEIGHT and missing > 0:
                note = f"{missing} of {math.prod(stored.shape)} elements" if item in counts else ""
                yield Tensor(item.name, self._only_megatron, note=note)
        if later:
            note = f"{later} tensors"
            yield Tensor("multi-token prediction", Same.NOT_COMPARED, note=note)


def _names(parts: tuple[Part, ...]) -> tuple[str, ...]:
    return tuple(
        part.name if part.expert is None else f"{part.name}[{part.expert}]" for part in parts
    )


def _relation(pair: Pair, other: Pair) -> Cause:
    if other.rule is pair.rule and other.layer == pair.layer:
        return Cause.EXPERT
    if other.rule is pair.rule and other.expert == pair.expert:
        return Cause.LAYER
    return Cause.TENSOR


def _sketch(data: torch.Tensor, rows: int) -> bytes:
    return data[:rows].contiguous().view(torch.uint8).numpy().tobytes()


def _error(right: torch.Tensor, wrong: torch.Tensor) -> float:
    error = float((wrong.double() - right.double()).norm() / right.double().norm())
    return error if math.isfinite(error) else math.inf


def _where(right: torch.Tensor, wrong: torch.Tensor) -> str:
    rows = [
        n for n, differs in enumerate((right != wrong).reshape(len(right), -1).any(1)) if differs
    ]
    return f"{len(rows)} of {len(right)} rows, from {rows[0]} to {rows[-1]}" if rows else ""
