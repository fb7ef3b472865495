# SPDX-License-Identifier: Apache-2.0
"""The fused functions of an MoE router, as Megatron's unfused code computes them."""

import torch


def _activated(logits: torch.Tensor, score_function: str) -> torch.Tensor:
    if score_function == "softmax":
        return torch.softmax(logits.float(), -1)
    if score_function == "sigmoid":
        return torch.sigmoid(logits.float())
    if score_function == "sqrtsoftplus":
        return torch.nn.functional.softplus(logits.float()).sqrt()
    raise ValueError(f"unknown score function {score_function}")


def _choose(
    scores: torch.Tensor, topk: int, num_groups: int | None, group_topk: int | None
) -> torch.Tensor:
    """Indices of the best experts, of the best groups only if there are groups."""
    if group_topk and num_groups:
        tokens, experts = scores.shape
        grouped = scores.view(tokens, num_groups, -1)
        group_scores = grouped.topk(topk // group_topk, dim=-1).values.sum(-1)
        chosen = group_scores.topk(group_topk, dim=-1).indices
        mask = torch.zeros_like(group_scores).scatter_(1, chosen, 1.0).bool()
        mask = mask[..., None].expand(-1, -1, experts // num_groups).reshape(tokens, experts)
        scores = scores.masked_fill(~mask, float("-inf"))
    return scores.topk(topk, dim=-1).indices


def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and choice of experts, both ``[tokens, experts]``; weights in the logits' type."""
    if score_function == "softmax" and not use_pre_softmax:
        indices = _choose(logits, topk, num_groups, group_topk)
        chosen = torch.softmax(logits.gather(1, indices).float(), -1)
    else:
        scores = _activated(logits, score_function)
        if expert_bias is None:
            indices = _choose(scores, topk, num_groups, group_topk)
            chosen = scores.gather(1, indices)
        else:
            # The bias is added before the choice, and taken away from the chosen.
            biased = scores + expert_bias
            indices = _choose(biased, topk, num_groups, group_topk)
            chosen = biased.gather(1, indices) - expert_bias.expand_as(biased).gather(1, indices)
        if score_function != "softmax" and topk > 1:
            chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    if scaling_factor:
        chosen = chosen * scaling_factor
    probabilities = torch.zeros_like(logits).scatter(1, indices, chosen.to(logits.dtype))
    routing_map = torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True)
    return probabilities, routing_map


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, topk: int, score_function: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choice and normalised scores of all experts, both ``[tokens, experts]``."""
    scores = _activated(logits, score_function)
    if score_function != "softmax":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    indices = scores.topk(topk, dim=-1).indices
    return torch.zeros_like(logits, dtype=torch.bool).scatter(1, indices, True), scores


def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int,
    num_experts: int,
    topk: int,
    coeff: float,
) -> torch.Tensor:
    """Load-balancing loss of ``probs`` ``[tokens, experts]``."""
    per_expert = probs.sum(0)
    return (per_expert * tokens_per_expert).sum() * (
        num_experts * coeff / (topk * total_num_tokens * total_num_tokens)
    )
