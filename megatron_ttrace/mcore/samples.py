# SPDX-License-Identifier: Apache-2.0
"""Samples that Megatron makes from the data otherwise in another layout; both runs get the same.

Shuffled (``--dataloader-type cyclic``): ``MegatronPretrainingRandomSampler``
(megatron/training/datasets/data_samplers.py) shuffles each data-parallel rank's part of the data
set, or deals one shuffled list to the ranks. A reference reads, in turns, what each rank of its
candidate reads; it does not start if that is a sample twice. (Megatron-Bridge's ``batch``:
``fronts/bridge_batches.py``.)

Fill in the middle (``--fim-data``): ``GPTFIMDataset`` (fim_dataset.py in the same folder)
rearranges samples at random, with one generator per process. In a run that ends with its check,
every sample has a generator of its own instead. Samples are cut between characters, so a tokenizer
must know their text. ``NullTokenizer``, which needs no files, does not: its tokens are characters
then.

Packed conversations (``--sft``): context parallelism divides each sequence of a sample
(``get_batch_on_this_cp_rank`` in megatron/core/utils.py), so ``SFTDataset`` (sft_dataset.py) pads
each to a multiple of twice the context-parallel ranks. A reference pads as its candidate does.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.replaced import wrap
from megatron_ttrace.trace import owned
from megatron_ttrace.trace.errors import TTraceError

PACKING = ("sft", "dataloader_inter_document_masking")
"""Options that pack sequences."""

_AHEAD = 10_000
"""Microbatches of each rank that are examined before the first is read."""
_READ = "_query_document_sample_shuffle_indices"


def dealt_to(args: MegatronArguments) -> int:
    """The data-parallel ranks that the order of samples depends on; 1 if it depends on none."""
    is_dealt = getattr(args, "dataloader_type", None) in ("cyclic", "batch")
    if not is_dealt:
        return 1
    # Ranks that gather weights from each other read samples of their own.
    return int(args.data_parallel_size) * int(getattr(args, "gtp_weight_remat_size", 1))


def depend_on_layout(args: MegatronArguments) -> bool:
    """Whether another layout trains on other samples, or in another order, by design."""
    return dealt_to(args) > 1 or any(getattr(args, name, False) for name in ("fim_data", "sft"))


def write_indices_at_once() -> None:
    """Let no process read half an index of samples: a job and its reference make the same ones.

    Megatron writes them with ``numpy.save`` (``GPTDataset`` in megatron/core/datasets).
    """

    def save(original: Callable[..., None], file: Any, *args: Any, **kwargs: Any) -> None:
        is_index = isinstance(file, str) and file.endswith(".npy")
        with owned.at_once(file) if is_index else contextlib.nullcontext(file) as name:
            original(name, *args, **kwargs)

    wrap(numpy, "save", save)


def deal_to(ranks: int, sampler: Any) -> None:
    """Let shuffling samplers read what this many data-parallel ranks would.

    Microbatch ``j`` of rank ``r`` is number ``j * ranks + r`` of the global batch. Called before
    data loaders are built, with the class ``MegatronPretrainingRandomSampler`` of Megatron-LM or
    Megatron-Bridge.

    Iterating raises a :class:`TTraceError` if the ranks read a sample twice: what each rank reads
    is the sampler's answer in both runs, so no comparison shows it.
    """
    original = sampler.__iter__

    def dealt(self: Any) -> Iterator[list[int]]:
        settings = self.dataset, self.total_samples, self.consumed_samples, self.micro_batch_size
        samplers = [type(self)(*settings, rank, ranks, self.data_sharding) for rank in range(ranks)]
        turns = zip(*(original(sampler) for sampler in samplers), strict=False)
        ahead = [*itertools.islice(turns, _AHEAD)]
        _examine(itertools.chain.from_iterable(itertools.chain.from_iterable(ahead)))
        microbatches = itertools.chain.from_iterable(itertools.chain(ahead, turns))
        for number, samples in enumerate(microbatches):
            if number % self.data_parallel_size == self.data_parallel_rank:
                self.consumed_samples += self.micro_batch_times_data_parallel_size
                yield samples

    sampler.__iter__ = dealt


def _examine(read: Iterable[int]) -> None:
    twice = next((sample for sample, times in Counter(read).items() if times > 1), None)
    if twice is not None:
        raise TTraceError(
            f"the data-parallel ranks read sample {twice} twice in one pass over the data, by the "
            "sampler of --dataloader-type cyclic (data_samplers.py)"
        )


def has_ramp() -> bool:
    """Whether ``--rampup-batch-size`` has an effect: from 0.19 on Megatron ignores it."""
    from megatron.core import num_microbatches_calculator

    return hasattr(num_microbatches_calculator, "RampupBatchsizeNumMicroBatchesCalculator")


def is_by_sample(args: MegatronArguments, *, exits: bool) -> bool:
    """Whether each sample is rearranged by its index: if the run exits after its check."""
    return bool(getattr(args, "fim_data", False)) and exits


def rearrange_by_sample() -> None:
    """Seed the data set's generator with a sample's index before the sample is read, and cut text.

    Called before the data loader forks workers.
    """
    from megatron.training.datasets.fim_dataset import GPTFIMDataset

    def read(original: Callable[..., Any], self: Any, idx: int) -> Any:
        self.np_rng = numpy.random.RandomState([self.config.random_seed, int(idx)])
        return original(self, idx)

    if not hasattr(getattr(GPTFIMDataset, _READ), "__wrapped__"):
        wrap(GPTFIMDataset, _READ, read)
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


def padded_for(args: MegatronArguments) -> int:
    """The context-parallel ranks for which conversations are padded; 1 if none are."""
    return int(args.context_parallel_size) if getattr(args, "sft", False) else 1


def pad_for(ranks: int) -> None:
    """Pad conversations as for this many context-parallel ranks.

    Called before the data set is built.
    """
    from megatron.training.datasets.sft_dataset import SFTDataset

    def padded(original: Callable[..., Any], self: Any, idx: int) -> Any:
        self.config.context_parallel_size = ranks
        return original(self, idx)

    wrap(SFTDataset, "__getitem__", padded)
