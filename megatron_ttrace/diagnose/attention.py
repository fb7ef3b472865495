# SPDX-License-Identifier: Apache-2.0
"""Repairs of attention's backward pass, block of keys by block of keys.

Context parallelism divides the keys into blocks, one per rank, and each query rank adds up what the
blocks give. The gradients of q, k and v are recomputed from the reference's own tensors in the same
way: first without a fault, which must give the reference's gradient, then with one fault at a time
(blocks that do not count once, blocks under the mask of another block, no mask at all).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from megatron_ttrace.diagnose.evidence import Evidence, FailedPart, flat, weights
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

    @property
    def work(self) -> int:
        """What one evaluation costs, in elements."""
        return 3 * self.q.numel() * self.k.shape[2] // 8

    def ring(self, order: Sequence[int] | None) -> list[torch.Tensor]:
        """What the blocks of each step of the ring add, over all ranks: tensors ``[s, b, g, d]``.

        The block of ``step`` is computed under the causal mask of the block of ``order[step]``;
        without an order, under no mask.
        """
        size = len(self.at)
        return [
            torch.stack(
                [self._block(rank, step, None if order is None else order[step]) for rank in ranks]
            ).sum(0)
            for step, ranks in ((step, range(size)) for step in range(size))
        ]

    def _block(self, rank: int, step: int, mask: int | None) -> torch.Tensor:
        here, there = self.at[rank], self._holder(rank, step)
        q, k, v = self.q[:, :, here], self.k[:, :, there], self.v[:, :, there]
        grad = self.grad[:, :, here]
        scale = 1 / math.sqrt(q.shape[-1])
        score = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            allowed = self._holder(rank, mask)[None, :] <= here[:, None]
            score = score.masked_fill(~allowed, -math.inf)
        p = torch.exp(score - self.lse[:, :, here])
        off = p * (grad @ v.transpose(-1, -2) - self.delta[:, :, here])
        if self.index == 0:
            return self._whole(off @ k * scale, here)
        own = off.transpose(-1, -2) @ q * scale if self.index == 1 else p.transpose(-1, -2) @ grad
        return self._whole(own, there)

    def _holder(self, rank: int, step: int) -> torch.Tensor:
        return self.at[(rank - step) % len(self.at)]

    def _whole(self, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        b, h, _, d = values.shape
        whole = values.new_zeros((b, h, self.q.shape[2], d))
        whole[:, :, at] = values
        whole = whole.view(b, self.groups, h // self.groups, -1, d).sum(2)
        return whole.permute(2, 0, 1, 3)


def blocks(evidence: Evidence) -> Finding | None:
    """Attention's input gradients, assembled wrongly. The repair: assemble them right."""
    key = evidence.key
    if key.kind is not Kind.GRAD_INPUT or INNER_ATTENTION not in key.name or key.index > 2:
        return None
    attention = _attention(evidence)
    if attention is None:
        return None
    evidence.work.spend(attention.work)
    right = attention.ring(range(len(attention.at)))
    # The formula (causal, this scale, no dropout) must be that of this attention.
    if not evidence.near(functools.reduce(torch.add, right)):
        return None
    return _masks(evidence, attention) or _counts(evidence, right)


def _masks(evidence: Evidence, attention: _Attention) -> WrongMasks | None:
    """Every block under another mask than its own."""
    size, name = len(attention.at), _NAMES[attention.index]
    for kind, shift, order in _orders(size):
        evidence.work.spend(attention.work)
        if evidence.holds(functools.reduce(torch.add, attention.ring(order)).float()):
            axes = ("cp",) if size > 1 else ()
            return WrongMasks(Cause.ATTENTION_MASK, axes, tensor=name, order=kind, shift=shift)
    return None


def _orders(size: int) -> Iterator[tuple[MaskOrder, int, list[int] | None]]:
    """For each step, the step whose mask is used; ``None`` for no mask."""
    yield MaskOrder.NONE, 0, None
    steps = list(range(size))
    if size > 1:
        yield MaskOrder.REVERSED, 0, steps[::-1]
        for shift in range(1, size):
            order = steps[shift:] + steps[:shift]
            if order != steps[::-1]:
                yield MaskOrder.SHIFTED, shift, order
        yield MaskOrder.OWN, 0, [0] * size


def _counts(evidence: Evidence, right: list[torch.Tensor]) -> BlockWeight | None:
    """Blocks that do not count once on some failing rank, by their step in the ring."""
    if len(right) == 1:
        return None
    rest = evidence.reference.double() - functools.reduce(torch.add, right)
    fits = {}
    for part in evidence.parts:
        slices = [flat(evidence.expected(part, one.float())) for one in right]
        wanted = flat(part.pieces) - flat(evidence.expected(part, rest.float()))
        fits[part.rank] = weights(torch.stack(slices), wanted)

    def once(part: FailedPart) -> list[torch.Tensor]:
        pairs = zip(fits[part.rank], right, strict=True)
        extra = torch.stack([(weight - 1) * one for weight, one in pairs]).sum(0).float()
        return [p - e for p, e in zip(part.pieces, evidence.expected(part, extra), strict=True)]

    if not evidence.repairs(once, free=len(right)):
        return None
    near = max(1e-3, 20 * evidence.tolerance.value)
    first = next(iter(fits.values()))
    if any(abs(a - b) > near for own in fits.values() for a, b in zip(own, first, strict=True)):
        return None
    odd = [(step, weight) for step, weight in enumerate(first) if abs(weight - 1) > near]
    if not odd:
        return None
    return BlockWeight(
        Cause.ATTENTION_BLOCK,
        ("cp",),
        tensor=_NAMES[evidence.key.index],
        steps=tuple(step for step, _ in odd),
        ring=len(right),
        weight=odd[0][1],
        missing=all(abs(weight) <= near for _, weight in odd),
    )


def _attention(evidence: Evidence) -> _Attention | None:
    """The reference's q, k, v ``[s, b, heads, d]`` and output gradient, if they are such."""
    name = evidence.key.name
    inputs = [evidence.tensor(Kind.INPUT, name, index=index) for index in range(3)]
    found = [*inputs, evidence.tensor(Kind.GRAD_OUTPUT, name)]
    given = [tensor.double() for tensor in found if tensor is not None]
    if len(given) != len(found):
        return None
    q, k, v, grad = given
    if q.ndim != 4 or k.shape[:2] != q.shape[:2] or q.shape[-1] != k.shape[-1]:
        return None
    s, b, h, d = q.shape
    groups = k.shape[2]
    if h % groups or v.shape[:3] != k.shape[:3]:
        return None
    evidence.work.spend(s * s * b * h * d // 8)
    at = _positions(evidence, s)
    if at is None or grad.numel() != s * b * h * v.shape[-1]:
        return None
    q = q.permute(1, 2, 0, 3)
    k, v = (t.permute(1, 2, 0, 3).repeat_interleave(h // groups, dim=1) for t in (k, v))
    grad = grad.reshape(s, b, h, -1).permute(1, 2, 0, 3)
    score = q @ k.transpose(-1, -2) / math.sqrt(d)
    score = score.masked_fill(torch.ones(s, s, dtype=torch.bool).triu(1), -math.inf)
    lse = torch.logsumexp(score, -1, keepdim=True)
    delta = (grad * (torch.exp(score - lse) @ v)).sum(-1, keepdim=True)
    index = evidence.key.index
    return _Attention(
        index=index,
        q=q,
        k=k,
        v=v,
        grad=grad,
        lse=lse,
        delta=delta,
        groups=groups if index else h,
        at=at,
    )


def _positions(evidence: Evidence, length: int) -> tuple[torch.Tensor, ...] | None:
    """Sequence positions that each context-parallel rank holds."""
    size = evidence.size("cp")
    if size == 1:
        return (torch.arange(length),)
    found: dict[int, torch.Tensor] = {}
    for mesh in evidence.meshes:
        boxes = evidence.held.get(mesh.rank)
        if boxes and mesh.at("cp") not in found:
            runs = sorted({(box.local[0], box.logical[0], box.extent[0]) for box in boxes})
            pieces = [torch.arange(first, first + count) for _, first, count in runs]
            found[mesh.at("cp")] = torch.cat(pieces)
    at = tuple(found[rank] for rank in range(size) if rank in found)
    if len(at) != size or sorted(torch.cat(at).tolist()) != list(range(length)):
        return None
    return at if len({len(own) for own in at}) == 1 else None
