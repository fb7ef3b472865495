# SPDX-License-Identifier: Apache-2.0
"""Losses that Megatron adds to a model's main loss, each with a coefficient of its own.

Their values are not added to the loss that is returned: an autograd function adds their gradients
in the backward pass (``MoEAuxLossAutoScaler`` in megatron/core/transformer/moe/moe_utils.py,
``MTPLossAutoScaler``, ``DSAIndexerLossAutoScaler``). Modules read the coefficients from their
config in each forward pass.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.replaced import replaced
from megatron_ttrace.trace.findings import Loss

_COEFFICIENTS = {
    Loss.Z: "moe_z_loss_coeff",
    Loss.MTP: "mtp_loss_scaling_factor",
    Loss.INDEXER: "dsa_indexer_loss_coeff",
}
_BALANCING = {
    Loss.AUXILIARY: "aux_loss",
    Loss.SEQUENCE: "seq_aux_loss",
    Loss.GLOBAL: "global_aux_loss",
}
"""Types of load balancing (``--moe-router-load-balancing-type``) that are a loss."""
_SHOWN = 0.01
"""In 16 bits half of a router's z loss is beyond the tolerance of its gradient from this
coefficient on. No coefficient does that for a balancing loss, whose gradient is rounded more: with
small ones the loss is within the tolerance, with large ones gradients are blind."""
_TYPES, _AUXILIARY = "moe_router_load_balancing_type", "moe_aux_loss_coeff"
"""One of each, or a list of each."""


def has_sparse_attention(args: MegatronArguments) -> bool:
    """Whether an indexer selects tokens: in all layers, or in those of a hybrid model marked D."""
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    return getattr(args, "experimental_attention_variant", None) == "dsa" or "D" in pattern


def present(args: MegatronArguments) -> tuple[Loss, ...]:
    """The losses beside the main loss whose coefficients are not zero."""
    uses = {
        Loss.MTP: getattr(args, "mtp_num_layers", None),
        Loss.INDEXER: has_sparse_attention(args),
    }
    return tuple(
        loss
        for loss in (*_BALANCING, *_COEFFICIENTS)
        if uses.get(loss, args.num_experts) and _coefficient(args, loss)
    )


def hidden(args: MegatronArguments) -> float:
    """The coefficient of a balancing loss whose scale 16 bits may hide; 0 if there is none."""
    if not getattr(args, "num_experts", None) or args.params_dtype.itemsize > 2:
        return 0.0
    found = (_coefficient(args, loss) for loss in _BALANCING)
    return min((each[2] for each in found if each), default=0.0)


def revealed(
    args: MegatronArguments, chunks: Sequence[torch.nn.Module]
) -> AbstractContextManager[None]:
    """Within this context the z loss of routers has a coefficient with which its scale shows."""
    found = _coefficient(args, Loss.Z) if args.num_experts else None
    if found is None or found[2] >= _SHOWN or args.params_dtype.itemsize > 2:
        return nullcontext()
    return weighted(chunks, Loss.Z, _SHOWN / found[2])


def weighted(
    chunks: Sequence[torch.nn.Module], loss: Loss, factor: float
) -> AbstractContextManager[None]:
    """Within this context a loss has ``factor`` times its coefficient."""
    configs = {
        id(config): config
        for chunk in chunks
        for module in chunk.modules()
        if (config := getattr(module, "config", None)) is not None
    }
    values = []
    for config in configs.values():
        if coefficient := _coefficient(config, loss):
            name, index, value = coefficient
            scaled: Any = value * factor
            before = getattr(config, name)
            if index is not None:
                scaled = [*before[:index], scaled, *before[index + 1 :]]
            values.append((config, name, scaled))
    return replaced(values)


def _coefficient(config: Any, loss: Loss) -> tuple[str, int | None, float] | None:
    """The attribute that holds a loss's coefficient, its index if that is a list, its value."""
    name, index = _COEFFICIENTS.get(loss, _AUXILIARY), None
    value = getattr(config, name, None)
    if loss in _BALANCING:
        types = getattr(config, _TYPES, None)
        if isinstance(types, list):
            if _BALANCING[loss] not in types or not isinstance(value, list):
                return None
            index = types.index(_BALANCING[loss])
            value = value[index]
        elif types != _BALANCING[loss]:
            return None
    return (name, index, value) if value else None
