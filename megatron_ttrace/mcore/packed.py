# SPDX-License-Identifier: Apache-2.0
"""Packed conversations (``--sft``): several sequences, one after the other, in one sample.

Context parallelism divides each of them (``get_batch_on_this_cp_rank`` in megatron/core/utils.py),
so ``SFTDataset`` (megatron/training/datasets/sft_dataset.py) pads each to a multiple of twice the
context-parallel ranks. A single device would pad none and train on other samples: its data set pads
as the candidate's does.
"""

from __future__ import annotations

import functools
from typing import Any

from megatron_ttrace.mcore.arguments import MegatronArguments

BOUNDS = "cu_seqlens"
"""The batch's tensor [samples, tokens + 1] of where sequences start and end, filled up with the
number of tokens."""


OPTIONS = ("sft", "dataloader_inter_document_masking")
"""Options that pack sequences."""


def padded_for(args: MegatronArguments) -> int:
    """The context-parallel ranks for which conversations are padded; 1 if none are."""
    return int(args.context_parallel_size) if getattr(args, "sft", False) else 1


def pad_for(ranks: int) -> None:
    """Pad conversations as for this many context-parallel ranks.

    Called before the data set is built.
    """
    from megatron.training.datasets.sft_dataset import SFTDataset

    original = SFTDataset.__getitem__

    @functools.wraps(original)
    def padded(self: Any, idx: int) -> Any:
        self.config.context_parallel_size = ranks
        return original(self, idx)

    SFTDataset.__getitem__ = padded
