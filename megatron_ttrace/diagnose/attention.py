# SPDX-License-Identifier: Apache-2.0
"""Repairs of attention's backward pass, block of keys by block of keys.

Context parallelism divides the keys into blocks, one per rank, and each query rank adds up what the
blocks give. The gradients of q, k and v are recomputed from the reference's own tensors in the same
way: first without a fault, which must give the reference's gradient, then with one fault at a time
(blocks that do not count once, blocks under the mask of another block, no mask at all).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, indices_of
from megatron_ttrace.diagnose.summands import weights_of
from megatron_ttrace.mcore.roles import INNER_ATTENTION
from megatron_ttrace.trace.findings import BlockWeight, Cause, Finding, MaskOrder, WrongMasks
from megatron_ttrace.trace.records import Kind

_NAMES = "qkv"


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What the gradient of q, k or v (``index``) needs, in float64.

    ``q`` and ``grad`` are ``[b, h, s, d]``, ``k`` and ``v`` too (each head its own copy); ``lse``
    is the logarithm of the normaliser, ``[b, h, s, 1]``. Heads that share keys share the gradients
    of these: they are summed into ``groups``. ``at`` gives the sequence positions of each
    context-parallel rank in the order in which it holds them.
    """

    index: int
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    groups: int
    at: tuple[torch.Tensor, ...]

    def ring(self, evidence: Evidence, order: Sequence[int] | None) -> list[torch.Tensor]:
        """What the blocks of each step of the ring add, over all ranks: tensors ``[s, b, g, d]``.

        The block of ``step`` is computed under the causal mask of the block of ``order[step]``;
        without an order, under no mask.
        """
        evidence.work.spend(3 * self.q.numel() * self.k.shape[2] // 8)
        ranks = range(len(self.at))
        masks = [None] * len(self.at) if order is None else order
        return [
            torch.stack([self._block(rank, step, mask) for rank in ranks]).sum(0)
            for step, mask in enumerate(masks)
        ]

    def _block(self, rank: int, step: int, mask: int | None) -> torch.Tensor:
        queries, keys = self.at[rank], self.at[(rank - step) % len(self.at)]
        q, k, v = self.q[:, :, queries], self.k[:, :, keys], self.v[:, :, keys]
        grad = self.grad[:, :, queries]
        scale = 1 / math.sqrt(q.shape[-1])
        score = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            allowed = self.at[(rank - mask) % len(self.at)][None, :] <= queries[:, None]
            score = score.masked_fill(~allowed, -math.inf)
        p = torch.exp(score - self.lse[:, :, queries])
        off = p * (grad @ v.transpose(-1, -2) - self.delta[:, :, queries])
        if self.index == 0:
            values, at = off @ k * scale, queries
        elif self.index == 1:
            values, at = off.transpose(-1, -2) @ q * scale, keys
        else:
            values, at = p.transpose(-1, -2) @ grad, keys
        b, h, _, d = values.shape
        gradient = values.new_zeros((b, h, self.q.shape[2], d))
        gradient[:, :, at] = values
        return gradient.view(b, self.groups, h // self.groups, -1, d).sum(2).permute(2, 0, 1, 3)


def blocks(evidence: Evidence) -> Finding | None:
    """Attention's input gradients, assembled wrongly. The repair: assemble them right."""
    key = evidence.key
    if key.kind is not Kind.GRAD_INPUT or INNER_ATTENTION not in key.name or key.index > 2:
        return None
    attention = _attention(evidence)
    if attention is None:
        return None
    right = attention.ring(evidence, range(len(attention.at)))
    # The formula (causal, this scale, no dropout) must be that of this attention.
    if not evidence.near(sum(right, torch.zeros(()))):
        return None
    return evidence.instead(_masked(evidence, attention)) or _counts(evidence, right)


def _masked(evidence: Evidence, attention: _Attention) -> Iterator[tuple[WrongMasks, torch.Tensor]]:
    """The gradient with every block under another mask than its own, or under none."""
    steps = list(range(len(attention.at)))
    orders: list[tuple[MaskOrder, int, list[int] | None]] = [(MaskOrder.NONE, 0, None)]
    if len(steps) > 1:
        orders += [
            (MaskOrder.REVERSED, 0, steps[::-1]),
            *((MaskOrder.SHIFTED, n, steps[n:] + steps[:n]) for n in steps[1:]),
            (MaskOrder.OWN, 0, [0] * len(steps)),
        ]
    axes = ("cp",) if len(steps) > 1 else ()
    for kind, shift, order in orders:
        gradient = sum(attention.ring(evidence, order), torch.zeros(())).float()
        name = _NAMES[attention.index]
        yield WrongMasks(Cause.ATTENTION_MASK, axes, tensor=name, order=kind, shift=shift), gradient


def _counts(evidence: Evidence, right: list[torch.Tensor]) -> BlockWeight | None:
    """Blocks that do not count once on all failing ranks alike, by their step in the ring."""
    fits = weights_of(evidence, [block.float() for block in right]) if len(right) > 1 else None
    if fits is None:
        return None
    near = max(1e-3, 20 * evidence.tolerance.value)
    weights = next(iter(fits.values()))
    if any(abs(a - b) > near for fit in fits.values() for a, b in zip(fit, weights, strict=True)):
        return None
    odd = {step: weight for step, weight in enumerate(weights) if abs(weight - 1) > near}
    if not odd:
        return None
    return BlockWeight(
        Cause.ATTENTION_BLOCK,
        ("cp",),
        tensor=_NAMES[evidence.key.index],
        steps=tuple(odd),
        ring=len(right),
        weight=next(iter(odd.values())),
        missing=all(abs(weight) <= near for weight in odd.values()),
    )


def _attention(evidence: Evidence) -> _Attention | None:
    """The reference's q, k, v ``[s, b, heads, d]`` and output gradient, if they are such."""
    name = evidence.key.name
    inputs = [evidence.tensor(Kind.INPUT, name, index=index) for index in range(3)]
    read = [*inputs, evidence.tensor(Kind.GRAD_OUTPUT, name)]
    tensors = [tensor.double() for tensor in read if tensor is not None]
    if len(tensors) != len(read):
        return None
    q, k, v, grad = tensors
    if q.ndim != 4 or k.shape[:2] != q.shape[:2] or q.shape[-1] != k.shape[-1]:
        return None
    s, b, h, d = q.shape
    groups = k.shape[2]
    if h % groups or v.shape[:3] != k.shape[:3] or grad.numel() != s * b * h * v.shape[-1]:
        return None
    evidence.work.spend(s * s * b * h * d // 8)
    at = _positions(evidence, s)
    if at is None:
        return None
    q = q.permute(1, 2, 0, 3)
    k, v = (t.permute(1, 2, 0, 3).repeat_interleave(h // groups, dim=1) for t in (k, v))
    grad = grad.reshape(s, b, h, -1).permute(1, 2, 0, 3)
    score = q @ k.transpose(-1, -2) / math.sqrt(d)
    score = score.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
    lse = torch.logsumexp(score, -1, keepdim=True)
    delta = (grad * (torch.exp(score - lse) @ v)).sum(-1, keepdim=True)
    index = evidence.key.index
    of_heads = groups if index else h
    return _Attention(index, q, k, v, grad=grad, lse=lse, delta=delta, groups=of_heads, at=at)


def _positions(evidence: Evidence, length: int) -> tuple[torch.Tensor, ...] | None:
    """Sequence positions that each context-parallel rank holds."""
    size = evidence.size("cp")
    positions: dict[int, torch.Tensor] = {}
    for mesh in evidence.meshes:
        if boxes := evidence.held.get(mesh.rank):
            positions.setdefault(mesh.at("cp"), indices_of(boxes, 0))
    at = tuple(positions[rank] for rank in range(size) if rank in positions)
    is_complete = len(at) == size and sorted(torch.cat(at).tolist()) == list(range(length))
    return at if is_complete else None
