# SPDX-License-Identifier: Apache-2.0
"""Megatron-Bridge's batches for fine-tuning, as microbatches.

With ``dataloader_type="batch"`` a loader gives all samples of a rank's step at once, padded to the
longest, and ``train_step`` divides them (``prepare_finetuning_batch`` in
megatron/bridge/data/batch_utils.py). Rank ``r`` of ``d`` data-parallel ranks reads the samples
``r, r + d, ...`` of a global batch (``MegatronPretrainingBatchSampler`` in samplers.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

BATCH = "batch"
"""The type of such loaders."""
PACKED = ("enable_offline_packing", "enable_in_batch_packing")
"""Options of data sets that put several sequences into a row."""


def padding(data: Any, options: Any) -> dict[str, Any]:
    """Fields of a data set that follow from the layout; a reference has its candidate's.

    As ``ConfigContainer.validate`` sets them (megatron/bridge/training/config.py). ``data`` is the
    configuration before that, ``options`` are the candidate's.
    """
    if not hasattr(data, "pad_to_max_length"):
        return {}
    ranks = options.tensor_model_parallel_size if options.sequence_parallel else 1
    multiple = 1
    for size in {options.context_parallel_size, options.eval_context_parallel_size or 1}:
        multiple = math.lcm(multiple, 2 * size if size > 1 else 1, size * ranks if ranks > 1 else 1)
    fields = {
        "pad_to_max_length": data.pad_to_max_length
        or options.pipeline_model_parallel_size > 1
        or options.expert_model_parallel_size > 1
    }
    if not getattr(data, "enable_in_batch_packing", False):
        fields["pad_to_multiple_of"] = math.lcm(data.pad_to_multiple_of, multiple)
    elif hasattr(data, "in_batch_packing_pad_to_multiple_of"):
        fields["in_batch_packing_pad_to_multiple_of"] = multiple
    return fields


def order(samples: int, microbatches: int, ranks: int) -> list[int]:
    """The samples of a global batch, as the microbatches of data-parallel ranks have them.

    Microbatch ``j`` of rank ``r`` becomes number ``j * ranks + r``.
    """
    size = samples // microbatches
    return [
        rank + ranks * (number * size + sample)
        for number in range(microbatches // ranks)
        for rank in range(ranks)
        for sample in range(size)
    ]


class Microbatches:
    """An iterator of ``Served`` (``capture/batches.py``) over a loader of the samples of a step.

    ``dealt_to`` are the data-parallel ranks of the candidate, in its reference.
    """

    def __init__(self, loader: Iterator[Mapping[str, Any]], dealt_to: int) -> None:
        self.iterable: Iterator[Any] = self._divided(loader, dealt_to)

    @staticmethod
    def _divided(loader: Iterator[Mapping[str, Any]], dealt_to: int) -> Iterator[Any]:
        from megatron.bridge.data.batch_utils import split_batch_into_microbatches
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        for batch in loader:
            count = get_num_microbatches()
            if dealt_to > 1:
                batch = _rearranged(batch, count, dealt_to)
            yield from split_batch_into_microbatches(dict(batch), count)


class Rejoined:
    """An iterator over the samples of a step, for ``train_step``."""

    def __init__(self, microbatches: Microbatches) -> None:
        self._microbatches = microbatches

    def __iter__(self) -> Rejoined:
        return self

    def __next__(self) -> dict[str, Any]:
        """The samples of a step."""
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        source = self._microbatches.iterable
        parts: list[Mapping[str, Any]] = [next(source) for _ in range(get_num_microbatches())]
        return {name: _joined([part[name] for part in parts]) for name in parts[0]}


def _rearranged(batch: Mapping[str, Any], count: int, ranks: int) -> dict[str, Any]:
    size = next(value.shape[0] for value in batch.values() if torch.is_tensor(value))
    positions = order(size, count, ranks)
    rearranged = dict(batch)
    for name, value in batch.items():
        if torch.is_tensor(value):
            rearranged[name] = value[positions]
        elif isinstance(value, list) and len(value) == size:
            rearranged[name] = [value[position] for position in positions]
    return rearranged


def _joined(values: Sequence[Any]) -> Any:
    """The reverse of ``split_batch_into_microbatches``: what is not of samples is in each part."""
    first = values[0]
    if torch.is_tensor(first):
        return torch.cat(list(values))
    if isinstance(first, list) and len(values) > 1 and any(v is not first for v in values):
        return [item for value in values for item in value]
    return first
