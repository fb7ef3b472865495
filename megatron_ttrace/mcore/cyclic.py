# SPDX-License-Identifier: Apache-2.0
"""Shuffled samples (``--dataloader-type cyclic``) in the order of another data-parallel size.

``MegatronPretrainingRandomSampler`` (megatron/training/datasets/data_samplers.py) shuffles each
data-parallel rank's part of the data set, or deals one shuffled list to the ranks. Either way the
number of ranks decides which samples a global batch has. So a reference reads, in turns, what each
rank of its candidate reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from megatron_ttrace.mcore.arguments import MegatronArguments


def dealt_to(args: MegatronArguments) -> int:
    """The data-parallel ranks that the order of samples depends on; 1 if it depends on none."""
    is_shuffled = getattr(args, "dataloader_type", None) == "cyclic"
    return int(args.data_parallel_size) if is_shuffled else 1


def deal_to(ranks: int) -> None:
    """Let samplers read what this many data-parallel ranks would.

    Microbatch ``j`` of rank ``r`` is number ``j * ranks + r`` of the global batch. Called before
    data loaders are built.
    """
    from megatron.training.datasets.data_samplers import MegatronPretrainingRandomSampler

    original = MegatronPretrainingRandomSampler.__iter__

    def dealt(self: Any) -> Iterator[list[int]]:
        settings = self.dataset, self.total_samples, self.consumed_samples, self.micro_batch_size
        samplers = [type(self)(*settings, rank, ranks, self.data_sharding) for rank in range(ranks)]
        turns = zip(*(original(sampler) for sampler in samplers), strict=False)
        for number, samples in enumerate(itertools.chain.from_iterable(turns)):
            if number % self.data_parallel_size == self.data_parallel_rank:
                self.consumed_samples += self.micro_batch_times_data_parallel_size
                yield samples

    MegatronPretrainingRandomSampler.__iter__ = dealt
