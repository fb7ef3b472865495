# SPDX-License-Identifier: Apache-2.0
"""Token ids, permuted so that they use the whole vocabulary.

A tensor-parallel rank holds a range of the vocabulary. Bytes of English text, or the first batch of
any data set, leave most ranges unused, and a fault in an unused range is invisible. So in a traced
step ids are permuted within the (padded) vocabulary, in both runs alike. Sequences keep their
structure; masks and document borders were computed from the original ids.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

_NAMES = ("tokens", "labels", "input_ids")


def multiplier(vocabulary: int) -> int:
    """A factor coprime to ``vocabulary``, near its golden section, to move neighbours far apart."""
    factor = max(1, int(vocabulary * 0.618))
    while math.gcd(factor, vocabulary) != 1:
        factor += 1
    return factor


def spread(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Permute ids ``0 .. vocabulary-1``; others (an ignored label is negative) are unchanged."""
    renamed = (ids * multiplier(vocabulary) + 1) % vocabulary
    return torch.where((ids >= 0) & (ids < vocabulary), renamed, ids)


def spread_batch(item: Any, vocabulary: int) -> Any:
    """A loader's batch with its ids permuted; anything else is returned unchanged."""
    if not isinstance(item, Mapping):
        return item
    return {
        name: spread(value, vocabulary) if name in _NAMES and torch.is_tensor(value) else value
        for name, value in item.items()
    }
