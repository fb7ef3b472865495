# SPDX-License-Identifier: Apache-2.0
"""Cross entropy over logits that are cut along the vocabulary (``parallel_cross_entropy``).

TransformerEngine's kernel sums in float32, and overwrites the logits with their gradient, in their
own type, which until 2.17 rounded it twice. Here they are left alone.
"""

from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.cpu.te import releases
from megatron_ttrace.cpu.te.norms import compute_dtype
from megatron_ttrace.cpu.te.parallel import Group, all_reduce, group_size


class CrossEntropyFunction(torch.autograd.Function):
    """Loss of each token; each rank holds a part of the vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: Group,
        ignore_index: int,
    ) -> torch.Tensor:
        """``[..., v / tp]`` and ``[...]`` to the losses ``[...]`` in float32."""
        scores = logits.to(compute_dtype(logits.dtype))
        part = scores.shape[-1]
        first = part * (dist.get_rank(group) if group_size(group) > 1 else 0)

        largest = all_reduce(scores.amax(-1), group, dist.ReduceOp.MAX)
        exponentials = (scores - largest[..., None]).exp()
        total = all_reduce(exponentials.sum(-1), group)

        local = (target - first).clamp(0, part - 1)
        is_local = (target >= first) & (target < first + part)
        local_score = scores.gather(-1, local[..., None])[..., 0]
        target_score = all_reduce(
            torch.where(is_local, local_score, torch.zeros_like(local_score)), group
        )
        loss = total.log() + largest - target_score
        counted = target != ignore_index
        loss = torch.where(counted, loss, torch.zeros_like(loss))

        gradient = exponentials / total[..., None]
        if releases.is_before(2, 18):
            gradient = gradient.to(logits.dtype).to(scores.dtype)
        hit = is_local[..., None].to(scores.dtype)
        gradient = gradient.scatter_add(-1, local[..., None], -hit) * counted[..., None]
        ctx.save_for_backward(gradient.to(logits.dtype))
        ctx.dtype = logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradient of the logits."""
        (gradient,) = ctx.saved_tensors
        result = gradient.to(grad_loss.dtype) * grad_loss[..., None]
        return result.to(ctx.dtype), None, None, None


def parallel_cross_entropy(
    inp: torch.Tensor,
    target: torch.Tensor,
    label_smoothing: float = 0.0,
    reduce_loss: bool = False,
    dist_process_group: Group = None,
    ignore_idx: int = -100,
    is_cg_capturable: bool = False,
) -> torch.Tensor:
    """Losses ``[...]`` of logits ``[..., v / tp]``.

    Raises:
        NotImplementedError: for smoothed labels, or the mean: no supported Megatron asks for them.
    """
    if label_smoothing or reduce_loss:
        raise NotImplementedError("cross entropy with smoothed labels, or their mean, on a CPU")
    loss: torch.Tensor = CrossEntropyFunction.apply(inp, target, dist_process_group, ignore_idx)
    return loss
