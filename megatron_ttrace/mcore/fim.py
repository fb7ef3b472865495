# SPDX-License-Identifier: Apache-2.0
"""Fill-in-the-middle samples that do not depend on who reads them, nor in which order.

``GPTFIMDataset`` (megatron/training/datasets/fim_dataset.py) rearranges samples at random, with one
generator per process. A data-parallel rank reads a part of the samples, so in another layout the
same sample is rearranged in another way. In a run that ends with its check, every sample has a
generator of its own instead.

Samples are cut between characters, so a tokenizer must know their text. ``NullTokenizer``, which
needs no files, does not; in such a run its tokens are characters.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy

from megatron_ttrace.mcore.arguments import MegatronArguments

_READ = "_query_document_sample_shuffle_indices"


def is_by_sample(args: MegatronArguments, *, exits: bool) -> bool:
    """Whether each sample is rearranged by its index: if the run exits after its check."""
    return bool(getattr(args, "fim_data", False)) and exits


def rearrange_by_sample() -> None:
    """Seed the data set's generator with a sample's index before the sample is read, and cut text.

    Called before the data loader forks workers.
    """
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    original = getattr(GPTFIMDataset, _READ)
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def read(self: Any, idx: int) -> Any:
        self.np_rng = numpy.random.RandomState([self.config.random_seed, int(idx)])
        return original(self, idx)

    setattr(GPTFIMDataset, _READ, read)
    _spell()


def _spell() -> None:
    """Let each token of ``NullTokenizer`` be a character; a named token is its number."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    def text_of(self: Any, ids: Any, remove_special_tokens: bool = False) -> str:
        del self, remove_special_tokens
        return "".join(map(chr, ids))

    def ids_of(self: Any, text: str) -> list[int]:
        del self
        return [ord(character) for character in text]

    def numbers_of(self: Any, tokens: str | list[str]) -> int | list[int]:
        del self
        return int(tokens) if isinstance(tokens, str) else [int(token) for token in tokens]

    NullTokenizer.ids_to_text = text_of
    NullTokenizer.text_to_ids = ids_of
    NullTokenizer.tokens_to_ids = numbers_of
