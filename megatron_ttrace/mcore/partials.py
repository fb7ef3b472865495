# SPDX-License-Identifier: Apache-2.0
"""Activations and gradients that Megatron adds up later: the sum over an axis is the tensor.

Knowing them is better than concluding it from their consumers (compare/by_design.py): where modules
are isolated, each rank must hand on its share.

With fewer groups of keys and values than tensor-parallel ranks, several ranks have the same group
(``get_query_key_value_tensors`` in megatron/core/transformer/attention.py). The gradient of its key
and value is, on each of them, the sum over the rank's query heads. The ranks' sums are added where
the groups were gathered, behind the norm of the keys.

Shared experts that overlap with communication are run in pieces (``SharedExpertMLP`` in
megatron/core/transformer/moe/shared_experts.py): ``post_forward_comm`` adds up what the second
linear layer returns, and the backward pass of ``pre_forward_comm`` the gradient of the first one's
input.

In sparse attention over absorbed latents (``DSAttention`` in
megatron/core/transformer/experimental_attention_variant/dsa.py) all heads share one compressed key,
of which the value is a part. Each tensor-parallel rank has the whole key, and its gradient there is
the sum over the rank's heads. The ranks' sums are added where the key was gathered
(``AbsorbedMLASelfAttention``, absorbed_mla.py in the same folder). A weight is also an argument; as
for any weight, its gradient is of the rank's own tokens until gradients are reduced.
"""

from collections.abc import Iterable

from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.roles import INNER_ATTENTION
from megatron_ttrace.trace.captured import Partials
from megatron_ttrace.trace.records import Kind

_KEY, _VALUE, _WEIGHT = 1, 2, 6
"""Positions in the arguments (query, key, value, mask, hidden states, latent, weight)."""
_KEY_NORM = "k_layernorm"
_NORMALIZED = 1
"""Position in the results of a layer with a norm (output, the norm's output)."""


def partials(chunks: Iterable[Names]) -> Partials:
    """Those of a rank's model chunks: (kind, module, index of the argument) -> axis."""
    partial: Partials = {}
    for names in chunks:
        for name, module in names.modules.items():
            if type(module).__name__ == "DSAttention" and _is_absorbed(names, name):
                partial[Kind.GRAD_INPUT, name, _KEY] = "tp"
                partial[Kind.GRAD_INPUT, name, _WEIGHT] = "cp"
            config = getattr(module, "config", None)
            overlaps = getattr(config, "moe_shared_expert_overlap", False)
            if type(module).__name__ == "SharedExpertMLP" and overlaps:
                partial[Kind.OUTPUT, f"{name}.linear_fc2", 0] = "tp"
                partial[Kind.GRAD_INPUT, f"{name}.linear_fc1", 0] = "tp"
            wrapped = getattr(module, "to_wrap", None)
            if getattr(wrapped, "return_layernorm_output_gathered", False):
                partial |= dict.fromkeys(_of_gathered_norm(name), "tp")
            groups = getattr(config, "num_query_groups", None)
            inner = f"{name}.{INNER_ATTENTION}"
            # Latent attention has the option, but no groups and no such projection.
            has_groups = inner in names.modules and hasattr(module, "linear_qkv")
            if groups and has_groups and groups < getattr(module, "world_size", 1):
                partial |= dict.fromkeys(_of_shared_groups(name, inner), "tp")
    return partial


def _of_shared_groups(attention: str, inner: str) -> Iterable[tuple[Kind, str, int]]:
    yield Kind.GRAD_INPUT, inner, _KEY
    yield Kind.GRAD_INPUT, inner, _VALUE
    yield Kind.GRAD_OUTPUT, f"{attention}.{_KEY_NORM}", 0
    yield Kind.GRAD_INPUT, f"{attention}.{_KEY_NORM}", 0


def _of_gathered_norm(layer: str) -> Iterable[tuple[Kind, str, int]]:
    """An adapter takes the gathered output of the norm (megatron/bridge/peft/lora_layers.py).

    Its gradient is added to that of the layer's own product before both are reduce-scattered.
    """
    yield Kind.GRAD_OUTPUT, f"{layer}.to_wrap", _NORMALIZED
    yield Kind.GRAD_OUTPUT, f"{layer}.adapter.dropout", 0
    for module in ("adapter", "adapter.dropout", "adapter.linear_in"):
        yield Kind.GRAD_INPUT, f"{layer}.{module}", 0


def _is_absorbed(names: Names, attention: str) -> bool:
    owner = names.modules.get(attention.rpartition(".")[0])
    return type(owner).__name__ == "AbsorbedMLASelfAttention"
