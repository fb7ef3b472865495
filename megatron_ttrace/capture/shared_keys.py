# SPDX-License-Identifier: Apache-2.0
"""Attention in which all heads share one key, which every tensor-parallel rank holds whole.

Sparse attention over absorbed latents (``DSAttention`` in
megatron/core/transformer/experimental_attention_variant/dsa.py) gives each rank its heads' queries
and the whole compressed key. The key's gradient there is the sum over the rank's own heads; the
ranks' sums are added where the key was gathered (``AbsorbedMLASelfAttention``, absorbed_mla.py
beside it). The value is a part of the key.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ttrace.capture.names import Names

KEY = 1
"""Place of the key among an attention's inputs: query, key, value, ..."""


def shared_keys(chunks: Iterable[Names]) -> frozenset[str]:
    """Canonical names of the attentions whose key's gradient is a summand over ``tp``."""
    return frozenset(
        name
        for names in chunks
        for name, module in names.modules.items()
        if type(module).__name__ == "DSAttention" and _is_absorbed(names, name)
    )


def _is_absorbed(names: Names, attention: str) -> bool:
    owner = names.modules.get(attention.rpartition(".")[0])
    return type(owner).__name__ == "AbsorbedMLASelfAttention"
