# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations that are partial by design: the sum over an axis is the gradient.

In sparse attention over absorbed latents (``DSAttention`` in
megatron/core/transformer/experimental_attention_variant/dsa.py) all heads share one compressed key,
of which the value is a part. Each tensor-parallel rank has the whole key, and its gradient there is
the sum over the rank's heads. The ranks' sums are added where the key was gathered
(``AbsorbedMLASelfAttention``, absorbed_mla.py in the same folder). A weight is also an argument; as
for any weight, its gradient is of the rank's own tokens until gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Iterable

from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.captured import Partials

_KEY, _WEIGHT = 1, 6
"""Positions in the arguments (query, key, value, mask, hidden states, latent, weight)."""


def partials(chunks: Iterable[Names]) -> Partials:
    """Those of a rank's model chunks: (module, index of the argument) -> axis."""
    found: Partials = {}
    for names in chunks:
        for name, module in names.modules.items():
            if type(module).__name__ == "DSAttention" and _is_absorbed(names, name):
                found |= {(name, _KEY): "tp", (name, _WEIGHT): "cp"}
    return found


def _is_absorbed(names: Names, attention: str) -> bool:
    owner = names.modules.get(attention.rpartition(".")[0])
    return type(owner).__name__ == "AbsorbedMLASelfAttention"
