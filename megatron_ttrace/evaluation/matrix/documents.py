# SPDX-License-Identifier: Apache-2.0
"""A data set of documents of very uneven length, from a single token to several sequences.

For ``--eod-mask-loss``, ``--reset-position-ids`` and ``--reset-attention-mask``: sequences then
hold none to many borders, and ranks different numbers of tokens that count.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_ttrace.mcore import text_data

_DOCUMENTS = 2048
_SHORTEST, _LONGEST = 1, 120


def uneven_documents(prefix: Path, words: int) -> Path:
    """Write the data set, once.

    Args:
        prefix: of the ``.bin`` and ``.idx`` files.
        words: size of the vocabulary; its last id ends every document and occurs nowhere else.

    Returns:
        ``prefix``, for ``--data-path``.
    """
    if prefix.with_name(f"{prefix.name}.idx").exists():
        return prefix
    random = np.random.default_rng(1)
    # Evenly spread on a logarithmic scale: as many documents of 1 to 10 tokens as of 12 to 120.
    lengths = np.exp(random.uniform(np.log(_SHORTEST), np.log(_LONGEST), _DOCUMENTS)).astype(int)
    documents = []
    for length in lengths:
        ids = random.integers(0, words - 1, length + 1)
        ids[-1] = words - 1
        documents.append(ids.astype(np.uint8).tobytes())
    text_data.write_corpus(documents, prefix, append_eod=False)
    return prefix
