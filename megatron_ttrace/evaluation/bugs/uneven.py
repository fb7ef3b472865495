# SPDX-License-Identifier: Apache-2.0
"""Data whose sequences differ much in how many tokens a loss mask leaves.

With ``--eod-mask-loss`` the tokens that end documents do not count. Here each stretch of a few
sequences has a share of them of its own, from none to nearly all, so that two ranks' batches hold
very different numbers of counted tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from megatron_ttrace.mcore import text_data

_STRETCHES = 512
_TOKENS = 96
_LARGEST_SHARE = 0.9


def uneven_corpus(prefix: Path, words: int) -> Path:
    """Write the data set, once; ids are below ``words``, the last of which ends documents.

    Returns:
        ``prefix``, for ``--data-path``.
    """
    if prefix.with_name(f"{prefix.name}.idx").exists():
        return prefix
    random = np.random.default_rng(1)
    documents = []
    for share in random.uniform(0, _LARGEST_SHARE, _STRETCHES):
        ids = random.integers(0, words - 1, _TOKENS)
        ids[random.random(_TOKENS) < share] = words - 1
        documents.append(ids.astype(np.uint8).tobytes())
    text_data.write_corpus(documents, prefix, append_eod=False)
    return prefix
