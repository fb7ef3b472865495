# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about attention's backward pass, block of keys by block of keys.

Context parallelism cuts the keys into blocks, one a rank, and each query rank adds up what the
blocks give. The gradients of q, k and v are recomputed from the reference's own tensors in the same
way; first without a fault, which must give the reference's gradient, then with one fault at a time:
blocks that count wrongly, blocks under another block's mask, no mask at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence, Part, ranges
from megatron_ttrace.mcore.roles import INNER_ATTENTION
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import Kind, TraceKey

_FLOPS = 2e9
_NAMES = "qkv"


@dataclasses.dataclass(frozen=True)
class _Attention:
    """What a backward pass needs, in float64.

    ``q`` and ``grad`` are ``[b, h, s, d]``, ``k`` and ``v`` too (each head its own copy); ``lse``
    is the logarithm of the normaliser, ``[b, h, s, 1]``. ``at`` gives the sequence positions of
    each context-parallel rank in the order in which it holds them.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    grad: torch.Tensor
    lse: torch.Tensor
    delta: torch.Tensor
    groups: int
    at: tuple[torch.Tensor, ...]

    def allowed(self, rank: int, step: int) -> torch.Tensor:
        """Which keys each of a rank's queries may see in the block it holds after ``step``."""
        holder = (rank - step) % len(self.at)
        return self.at[holder][None, :] <= self.at[rank][:, None]

    def block(self, index: int, rank: int, step: int, mask: torch.Tensor | None) -> torch.Tensor:
        """What one block adds to the gradient of q, k or v, as a whole tensor ``[s, b, g, d]``."""
        here, there = self.at[rank], self.at[(rank - step) % len(self.at)]
        q, k, v = self.q[:, :, here], self.k[:, :, there], self.v[:, :, there]
        grad = self.grad[:, :, here]
        scale = 1 / math.sqrt(q.shape[-1])
        score = q @ k.transpose(-1, -2) * scale
        if mask is not None:
            score = score.masked_fill(~mask, -math.inf)
        p = torch.exp(score - self.lse[:, :, here])
        off = p * (grad @ v.transpose(-1, -2) - self.delta[:, :, here])
        if index == 0:
            return self._whole(off @ k * scale, here)
        own = off.transpose(-1, -2) @ q * scale if index == 1 else p.transpose(-1, -2) @ grad
        return self._whole(own, there)

    def _whole(self, values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        b, h, _, d = values.shape
        whole = values.new_zeros((b, h, self.q.shape[2], d))
        whole[:, :, at] = values
        whole = whole.view(b, self.groups, h // self.groups, -1, d).sum(2)
        return whole.permute(2, 0, 1, 3)


def blocks(evidence: Evidence) -> Finding | None:
    """Attention's input gradients, put together wrongly. The repair: put them together rightly."""
    key = evidence.key
    if key.kind is not Kind.GRAD_INPUT or INNER_ATTENTION not in key.name or key.index > 2:
        return None
    attention = _attention(evidence)
    if attention is None:
        return None
    # Heads that share keys share their gradients; each query head has its own.
    if key.index == 0:
        attention = dataclasses.replace(attention, groups=attention.q.shape[1])
    size = len(attention.at)
    pairs = [(rank, step) for rank in range(size) for step in range(size)]
    right = {
        (rank, step): attention.block(key.index, rank, step, attention.allowed(rank, step))
        for rank, step in pairs
    }
    total = torch.stack(list(right.values())).sum(0)
    if not _reproduces(evidence, total):
        return None
    return _masks(evidence, attention) or (_counts(evidence, attention, right, total))


def _reproduces(evidence: Evidence, total: torch.Tensor) -> bool:
    """Whether the formula (causal, this scale, no dropout) gives this attention's gradient."""
    reference = evidence.reference.double()
    off = float(torch.linalg.vector_norm(total - reference))
    return off <= 0.1 * float(torch.linalg.vector_norm(reference))


def _masks(evidence: Evidence, attention: _Attention) -> Finding | None:
    """Every block under another mask than its own."""
    index, size = evidence.key.index, len(attention.at)
    what = f"the gradient of {_NAMES[index]} was computed with"
    for words, order in _orders(size):
        if not evidence.in_time:
            return None
        faulty = torch.zeros_like(evidence.reference, dtype=torch.float64)
        for rank in range(size):
            for step in range(size):
                mask = None if order is None else attention.allowed(rank, order[step])
                faulty += attention.block(index, rank, step, mask)
        if _is(evidence, faulty):
            return Finding(f"{what} {words}", Cause.ATTENTION_MASK, ("cp",) if size > 1 else ())
    return None


def _orders(size: int) -> Iterator[tuple[str, list[int] | None]]:
    """For each step the step whose mask is taken; ``None`` for no mask."""
    yield "no causal mask", None
    steps = list(range(size))
    if size > 1:
        text = "the causal masks of the blocks of keys in {}: each block under another one's mask"
        yield text.format("reverse order"), steps[::-1]
        for shift in range(1, size):
            order = steps[shift:] + steps[:shift]
            if order != steps[::-1]:
                yield text.format(f"an order shifted by {shift}"), order
        yield "the causal mask of a rank's own block of keys for all blocks", [0] * size


def _is(evidence: Evidence, faulty: torch.Tensor) -> bool:
    return dataclasses.replace(evidence, reference=faulty.float()).mends(lambda part: part.pieces)


def _counts(
    evidence: Evidence,
    attention: _Attention,
    right: dict[tuple[int, int], torch.Tensor],
    total: torch.Tensor,
) -> Finding | None:
    """Blocks that do not count once, on each failing rank; by the distance they have travelled."""
    size = len(attention.at)
    if size == 1:
        return None
    by_step = [
        torch.stack([right[rank, step] for rank in range(size)]).sum(0) for step in range(size)
    ]
    rest = evidence.reference.double() - total
    fits = {part.rank: _fit(evidence, part, by_step, rest) for part in evidence.parts}

    def once(part: Part) -> list[torch.Tensor]:
        own = fits[part.rank]
        extra = sum((weight - 1) * block for weight, block in zip(own, by_step, strict=True))
        taken = dataclasses.replace(evidence, reference=torch.as_tensor(extra).float())
        return [p - e for p, e in zip(part.pieces, taken.expected(part), strict=True)]

    if not evidence.mends(once):
        return None
    near = max(1e-3, 20 * evidence.tolerance.value)
    first = next(iter(fits.values()))
    if any(abs(a - b) > near for own in fits.values() for a, b in zip(own, first, strict=True)):
        return None
    odd = [(step, weight) for step, weight in enumerate(first) if abs(weight - 1) > near]
    if not odd:
        return None
    lost = all(abs(weight) <= near for _, weight in odd)
    which = f"{ranges([step for step, _ in odd])} of 0..{size - 1}"
    how = "is missing" if lost else f"counts {odd[0][1]:.3f} times"
    name = _NAMES[evidence.key.index]
    text = f"what the block of step {which} of the ring adds to the gradient of {name} {how}"
    return Finding(text, Cause.ATTENTION_BLOCK, ("cp",))


def _fit(
    evidence: Evidence, part: Part, blocks: list[torch.Tensor], rest: torch.Tensor
) -> list[float]:
    def here(whole: torch.Tensor) -> torch.Tensor:
        pieces = dataclasses.replace(evidence, reference=whole.float()).expected(part)
        return torch.cat([piece.reshape(-1).double() for piece in pieces])

    matrix = torch.stack([here(block) for block in blocks])
    wanted = torch.cat([piece.reshape(-1).double() for piece in part.pieces]) - here(rest)
    weights: list[float] = torch.linalg.lstsq(
        matrix @ matrix.T, matrix @ wanted, driver="gelsd"
    ).solution.tolist()
    return weights


def _attention(evidence: Evidence) -> _Attention | None:
    """The reference's q, k, v ``[s, b, heads, d]`` and output gradient, if they are such."""
    key = evidence.key
    found = [
        evidence.whole(TraceKey(key.iteration, key.microbatch, kind, key.name, index))
        for kind, index in (
            (Kind.INPUT, 0),
            (Kind.INPUT, 1),
            (Kind.INPUT, 2),
            (Kind.GRAD_OUTPUT, 0),
        )
    ]
    if any(tensor is None for tensor in found):
        return None
    q, k, v, grad = (tensor.double() for tensor in found if tensor is not None)
    if q.ndim != 4 or k.shape[:2] != q.shape[:2] or q.shape[-1] != k.shape[-1]:
        return None
    s, b, h, d = q.shape
    groups = k.shape[2]
    if h % groups or v.shape[:3] != k.shape[:3] or s * s * b * h * d > _FLOPS:
        return None
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
    return _Attention(q, k, v, grad, lse, delta, groups, at)


def _positions(evidence: Evidence, length: int) -> tuple[torch.Tensor, ...] | None:
    """Sequence positions that each context-parallel rank holds."""
    size = evidence.meshes[0].size("cp") if evidence.meshes else 1
    if size == 1:
        return (torch.arange(length),)
    found: dict[int, torch.Tensor] = {}
    for mesh in evidence.meshes:
        boxes = evidence.held.get(mesh.rank)
        if boxes and mesh.at("cp") not in found:
            runs = sorted({(box.local[0], box.logical[0], box.extent[0]) for box in boxes})
            pieces = [torch.arange(first, first + count) for _, first, count in runs]
            found[mesh.at("cp")] = torch.cat(pieces)
    everything = [found[rank] for rank in range(size) if rank in found]
    if len(everything) != size or sorted(torch.cat(everything).tolist()) != list(range(length)):
        return None
    if len({len(at) for at in everything}) != 1:
        return None
    return tuple(everything)
