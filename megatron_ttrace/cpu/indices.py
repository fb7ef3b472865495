# SPDX-License-Identifier: Apache-2.0
"""Sample and blending indices of Megatron's GPT data sets, in numpy.

The same functions, with the same names, signatures and results, as in the extension that Megatron
compiles (``megatron/core/datasets/helpers.cpp``), for checkouts in which it was not compiled. Only
blending is a loop in Python: about a microsecond for each sample and data set.
"""

import math
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from megatron_ttrace.trace.errors import TTraceError

__all__ = [
    "build_blending_indices",
    "build_blocks_mapping",
    "build_exhaustive_blending_indices",
    "build_mapping",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
]

Integers = NDArray[Any]


def build_sample_idx_int64(
    sizes: Integers,
    document_idx: Integers,
    seq_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> Integers:
    """Where each sample of ``seq_length`` tokens starts in the documents laid end to end.

    ``sizes`` are the tokens of each document, ``document_idx`` the documents in the order of all
    epochs. ``drop_last_partial_sequence``: whether a last sample that is too short is left out;
    ``add_extra_token_to_sequence``: 1 when a sample ends with the first token of the next.

    Returns:
        ``[samples + 1, 2]``: a position in ``document_idx``, and an offset in that document.
    """
    tokens = num_epochs * tokens_per_epoch - add_extra_token_to_sequence
    if drop_last_partial_sequence:
        samples = tokens // seq_length
    else:
        # The extension divides in single precision; so must whoever wants as many samples.
        samples = math.ceil(float(np.float32(tokens) / np.float32(seq_length)))
    lengths = np.asarray(sizes)[np.asarray(document_idx)].astype(np.int64)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    tokens_before = np.arange(samples + 1, dtype=np.int64) * seq_length
    # A sample starts in the document in which its predecessor's last token, the extra one with it,
    # lies; so one that starts at the very end of a document stays there without an extra token.
    reach = tokens_before + (add_extra_token_to_sequence - 1)
    document = np.searchsorted(ends, reach, side="right")
    offset = np.empty_like(tokens_before)
    inside = document < len(lengths)
    offset[inside] = tokens_before[inside] - starts[document[inside]]
    last = len(lengths) - 1
    document[~inside] = last
    offset[~inside] = lengths[last] - add_extra_token_to_sequence
    document[0], offset[0] = 0, 0
    return np.stack([document, offset], axis=1).astype(np.int64)


def build_sample_idx_int32(*args: Any, **kwargs: Any) -> Integers:
    """:func:`build_sample_idx_int64` for as many documents as 32 bits can count."""
    return build_sample_idx_int64(*args, **kwargs).astype(np.int32)


def build_blending_indices(
    dataset_index: Integers,
    dataset_sample_index: Integers,
    weights: NDArray[np.float64],
    num_datasets: int,
    size: int,
    verbose: bool,
) -> None:
    """Fill in which data set each sample comes from, and its number there, ``[size]`` each.

    Each sample comes from the data set that lags behind its weight the most; the first of equals.
    ``weights`` ``[num_datasets]`` sum up to 1. The extension prints the achieved ratios if
    ``verbose``.
    """
    del verbose
    shares = [float(weight) for weight in weights[:num_datasets]]
    _blend((dataset_index, dataset_sample_index), shares, [size] * num_datasets, size)


def build_exhaustive_blending_indices(
    dataset_index: Integers, dataset_sample_index: Integers, sizes: Integers, num_datasets: int
) -> None:
    """As :func:`build_blending_indices`, until ``sizes`` samples of each data set are taken."""
    wanted = [int(size) for size in sizes[:num_datasets]]
    total = sum(wanted)
    shares = [size / float(total) for size in wanted]
    _blend((dataset_index, dataset_sample_index), shares, wanted, total)


def _blend(
    written: tuple[Integers, Integers], shares: list[float], wanted: list[int], total: int
) -> None:
    taken = [0] * len(shares)
    unspent = list(range(len(shares)))
    for sample in range(total):
        position = float(max(sample, 1))
        lags = [shares[index] * position - taken[index] for index in unspent]
        chosen = unspent[lags.index(max(lags))]
        written[0][sample], written[1][sample] = chosen, taken[chosen]
        taken[chosen] += 1
        if taken[chosen] == wanted[chosen]:
            unspent.remove(chosen)


def build_mapping(*args: Any, **kwargs: Any) -> NoReturn:
    """Not for GPT: masked data sets draw from C++'s generator."""
    del args, kwargs
    raise TTraceError(
        "masked data sets need Megatron's compiled helper: pip install pybind11, then run "
        "make in megatron/core/datasets of the checkout"
    )


build_blocks_mapping = build_mapping
