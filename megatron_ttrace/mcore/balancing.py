# SPDX-License-Identifier: Apache-2.0
"""Routing whose choice depends on all tokens that a rank holds, not on each token alone.

Sinkhorn balances the loads of the experts over the tokens of one call of the router
(``sinkhorn_load_balancing`` in megatron/core/transformer/moe/router.py); an expert's capacity is
a share of them, and which tokens exceed it depends on the others
(``apply_router_token_dropping`` in moe_utils.py beside it). Sequence and context parallelism give
each rank a part of a microbatch, so the choice differs from a single device's by design.

Routers may also have biases, which are updated by the tokens that each expert got in a step.
"""

import torch

from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.records import RoutingIndex


def depends_on_layout(args: MegatronArguments) -> dict[int, str]:
    """What of a router's choice differs in this layout by design, and because of which option.

    Returns:
        Indices of the ``routing`` tensors of a router (:mod:`megatron_ttrace.trace.records`); none
        where a rank's router sees all tokens of a microbatch.
    """
    if not args.num_experts:
        return {}
    sequence_parallel = args.sequence_parallel and args.tensor_model_parallel_size > 1
    if not sequence_parallel and args.context_parallel_size == 1:
        return {}
    return by_all_tokens(args)


def by_all_tokens(args: MegatronArguments) -> dict[int, str]:
    """What of a router's choice depends on all tokens of a rank, and because of which option."""
    options: dict[int, str] = {}
    kinds = getattr(args, "moe_router_load_balancing_type", "")
    if "sinkhorn" in ([kinds] if isinstance(kinds, str) else kinds or []):
        options[RoutingIndex.CHOICE] = "--moe-router-load-balancing-type sinkhorn"
    if getattr(args, "moe_expert_capacity_factor", None) is not None:
        options[RoutingIndex.KEPT] = "--moe-expert-capacity-factor"
    return options


UPDATE = "get_updated_expert_bias"
"""The function of megatron/core/transformer/moe/moe_utils.py that updates the biases of all routers
of a rank. It sums its first argument, the tokens of each expert, over ranks, in place."""

BIAS = "expert_bias"
_QUANTILES = "qb_beta"


def is_bias(buffer: str) -> bool:
    """Whether a router adds the buffer of this name to its scores, or subtracts it."""
    return buffer.rpartition(".")[2] in (BIAS, _QUANTILES)


def updated_biases(chunks: list[Names]) -> list[str]:
    """Names of the biases that are updated, in the order in which :data:`UPDATE` gets them.

    As ``_update_router_expert_bias`` of megatron/core/distributed/finalize_model_grads.py does.
    """
    return [
        f"{name}.{BIAS}"
        for names in chunks
        for name, module in names.modules.items()
        if hasattr(module, BIAS)
        and module.training
        and not getattr(module, "frozen_expert_bias", False)
    ]


def keep_biases(chunks: list[torch.nn.Module]) -> None:
    """Let the biases of routers have the float32 that routers give them in a forward pass.

    In 0.18 they have the model's dtype until the first one. If a run has made one and another has
    not, the same start values would be rounded in one of them only.
    """
    for chunk in chunks:
        for module in chunk.modules():
            if keep := getattr(module, "_maintain_float32_expert_bias", None):
                keep()


def loads(tokens: torch.Tensor) -> torch.Tensor:
    """The load of each expert relative to the mean, [routers, experts], in the counts' dtype.

    A bias is changed by a fixed step whose sign is that of the mean less the expert's tokens.
    Counts in bf16 (docs/findings.md, 30) are rounded differently where ranks share the counting.
    """
    counts = tokens.detach().float()
    mean = counts.mean(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    return (counts / mean).to(tokens.dtype if tokens.is_floating_point() else counts.dtype)
