# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations that are partial by design: the sum over an axis is the gradient.

Sparse attention over absorbed latents (``DSAttention`` in
megatron/core/transformer/experimental_attention_variant/dsa.py) takes its own heads' queries, and
on every tensor-parallel rank the whole compressed key, which all heads share: the key's gradient is
the sum over the rank's heads, and the ranks' sums are added where the key was gathered
(``AbsorbedMLASelfAttention``, absorbed_mla.py beside it). The value is a part of the key. It also
takes a weight as an argument, whose gradient is of the rank's own tokens, as any weight's is before
gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.captured import Partials

_KEY, _WEIGHT = 1, 6
"""Places among the arguments: query, key, value, mask, hidden states, queries' latent, weight."""


def partials(chunks: Iterable[Names]) -> Partials:
    """Those of a rank's model chunks."""
    found: Partials = {}
    for names in chunks:
        for name, module in names.modules.items():
            if type(module).__name__ == "DSAttention" and _is_absorbed(names, name):
                found |= {(name, _KEY): "tp", (name, _WEIGHT): "cp"}
    return found


def _is_absorbed(names: Names, attention: str) -> bool:
    owner = names.modules.get(attention.rpartition(".")[0])
    return type(owner).__name__ == "AbsorbedMLASelfAttention"
