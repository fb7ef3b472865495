# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about origin: the value of another time, of another module, of another operand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.compare.measure import logical_view
from megatron_ttrace.localise.evidence import Evidence, Finding, Part, dot
from megatron_ttrace.records import STEP_LEVEL, Kind, TraceKey

_SAMPLE = 256
_FLOPS = 1e9


def elsewhere(evidence: Evidence) -> Finding | None:
    """The tensor is another one of the reference. The repair: use the right one."""
    if not evidence.parts:
        return None
    for words, cause, key in evidence.others():
        if not evidence.in_time:
            return None
        other = evidence.whole(key)
        if other is None or other.shape != evidence.reference.shape:
            continue
        swapped = dataclasses.replace(evidence, reference=other)
        first = evidence.parts[0]
        head = [piece.reshape(-1)[:_SAMPLE] for piece in first.pieces[:1]]
        there = [piece.reshape(-1)[:_SAMPLE] for piece in swapped.expected(first)[:1]]
        if torch.linalg.vector_norm(head[0] - there[0]) > 0.5 * torch.linalg.vector_norm(there[0]):
            continue
        if swapped.mends(lambda part: part.pieces):
            return Finding(words, cause)
    return None


def summand(evidence: Evidence) -> Finding | None:
    """A bias or the module's own input is added too often or not at all. The repair: undo that."""
    if evidence.key.kind is not Kind.OUTPUT:
        return None
    for what, addend in _addends(evidence):
        slices = {
            part.rank: [logical_view(addend, b).float() for b in part.boxes]
            for part in evidence.parts
        }
        cross = size = 0.0
        for part in evidence.parts:
            residual = [p - r for p, r in zip(part.pieces, evidence.expected(part), strict=True)]
            one, other = dot([(residual, slices[part.rank])])
            cross, size = cross + one, size + other
        times = round(cross / size, 2) if size else 0.0
        if not times:
            continue

        def without(
            part: Part, times: float = times, slices: dict[int, list[torch.Tensor]] = slices
        ) -> list[torch.Tensor]:
            return [p - times * s for p, s in zip(part.pieces, slices[part.rank], strict=True)]

        if evidence.mends(without):
            if times == -1:
                return Finding(f"{what} is missing", "addend")
            return Finding(f"{what} is added {times + 1:g} times", "addend")
    return None


def _addends(evidence: Evidence) -> Iterator[tuple[str, torch.Tensor]]:
    key = evidence.key
    name = key.name.split("#")[0]
    shape = evidence.reference.shape
    bias = evidence.whole(TraceKey(key.iteration, STEP_LEVEL, Kind.PARAM, f"{name}.bias", 0))
    if bias is not None and shape and bias.shape == shape[-1:]:
        yield "the bias", bias.expand(shape)
    own = evidence.whole(dataclasses.replace(key, kind=Kind.INPUT, index=0))
    if own is not None and own.shape == shape:
        yield "the module's input (residual)", own


def operand(evidence: Evidence) -> Finding | None:
    """A linear layer's weight gradient, made with another layer's input. The repair: its own.

    ``dW = sum over microbatches of grad_output^T input`` is computed from the reference's tensors;
    the module's own ones must give its own gradient first.
    """
    key = evidence.key
    if key.kind is not Kind.MAIN_GRAD or not key.name.endswith(".weight"):
        return None
    module = key.name.removesuffix(".weight")
    if evidence.reference.ndim != 2 or not _reproduces(evidence, module, evidence.reference):
        return None
    for other in _siblings(evidence, module):
        if not evidence.in_time:
            return None
        product = _total(evidence, module, other)
        if product is None:
            continue
        if dataclasses.replace(evidence, reference=product).mends(lambda part: part.pieces):
            text = (
                f"computed with the input of {other}: the input saved for backward was overwritten "
                "before it was used"
            )
            return Finding(text, "operand")
    return None


def weighted(evidence: Evidence) -> Finding | None:
    """Microbatches count unequally in a weight's or bias's gradient. The repair: count each once.

    The reference's activations and gradients give each microbatch's share of the gradient; the
    candidate is fitted as their weighted sum.
    """
    key = evidence.key
    module, _, leaf = key.name.rpartition(".")
    if key.kind is not Kind.MAIN_GRAD or leaf not in ("weight", "bias"):
        return None
    shares = list(_shares(evidence, module, leaf))
    if len(shares) < 2:
        return None
    total = torch.stack(shares).sum(0)
    # With a loss per token the gradient is divided by their number only at the step's end.
    scale, size = dot([([evidence.reference.float()], [total])])
    if not size:
        return None
    shares = [share * (scale / size) for share in shares]
    total = total * (scale / size)
    # What the shares leave out (a tied head, rounding) counts as it should.
    rest = evidence.reference - total
    if float(rest.norm()) > 0.1 * float(evidence.reference.norm()):
        return None
    rows, target = [], []
    for part in evidence.parts:
        for box, piece in zip(part.boxes, part.pieces, strict=True):
            rows.append(torch.stack([logical_view(s, box).reshape(-1) for s in shares]).double())
            target.append((piece - logical_view(rest, box)).reshape(-1).double())
    matrix, wanted = torch.cat(rows, 1), torch.cat(target)
    weights = torch.linalg.lstsq(matrix @ matrix.T, matrix @ wanted).solution.tolist()
    moved = sum(((w - 1) * s for w, s in zip(weights, shares, strict=True)), torch.zeros(()))

    def counted_once(part: Part) -> list[torch.Tensor]:
        return [
            piece - logical_view(moved, box)
            for box, piece in zip(part.boxes, part.pieces, strict=True)
        ]

    if not evidence.mends(counted_once):
        return None
    return Finding(_weights_in_words(evidence, weights), "weights", "dp")


def _weights_in_words(evidence: Evidence, weights: list[float]) -> str:
    ranks = evidence.meshes[0].size("dp") if evidence.meshes else 1
    by_rank = [weights[rank::ranks] for rank in range(ranks)]
    if 1 < ranks <= len(weights) and all(max(own) - min(own) < 1e-2 for own in by_rank):
        listed = ", ".join(f"dp {rank}: {own[0]:.3f}" for rank, own in enumerate(by_rank[:8]))
        return (
            f"data-parallel ranks count unequally ({listed} instead of 1): each takes the mean "
            "over its own tokens before the sum over dp"
        )
    listed = ", ".join(f"{number}: {weight:.3f}" for number, weight in enumerate(weights[:8]))
    return f"microbatches count unequally ({listed} instead of 1)"


def _shares(evidence: Evidence, module: str, leaf: str) -> Iterator[torch.Tensor]:
    """Each microbatch's share of a linear layer's gradient, from the reference's tensors."""
    for microbatch in range(1 << 16):
        if leaf == "weight":
            share = _product(evidence, module, module, microbatch)
        else:
            key = TraceKey(evidence.key.iteration, microbatch, Kind.GRAD_OUTPUT, module, 0)
            gradient = evidence.whole(key)
            share = None if gradient is None else gradient.float().flatten(0, -2).sum(0)
        if share is None or share.shape != evidence.reference.shape:
            return
        yield share


def _reproduces(evidence: Evidence, module: str, reference: torch.Tensor) -> bool:
    """Whether the formula gives this module's gradient at all (it does not with a tied weight)."""
    product = _total(evidence, module, module)
    if product is None:
        return False
    off = float(torch.linalg.vector_norm(product - reference))
    return off <= 0.1 * float(torch.linalg.vector_norm(reference))


def _siblings(evidence: Evidence, module: str) -> Iterator[str]:
    """The same module of other layers, the nearest first."""
    words = module.split(".")
    for position, word in enumerate(words):
        if word.isdigit():
            own = int(word)
            for distance in range(1, 9):
                for layer in (own + distance, own - distance):
                    if layer >= 0:
                        yield ".".join([*words[:position], str(layer), *words[position + 1 :]])
            return


def _total(evidence: Evidence, module: str, fed: str) -> torch.Tensor | None:
    """A linear layer's weight gradient, made with the input of ``fed``."""
    total: torch.Tensor | None = None
    for microbatch in range(1 << 16):
        product = _product(evidence, module, fed, microbatch)
        if product is None:
            break
        total = product if total is None else total + product
    return total if total is not None and total.shape == evidence.reference.shape else None


def _product(evidence: Evidence, module: str, fed: str, microbatch: int) -> torch.Tensor | None:
    place = (evidence.key.iteration, microbatch)
    gradient = evidence.whole(TraceKey(*place, Kind.GRAD_OUTPUT, module, 0))
    fed_with = evidence.whole(TraceKey(*place, Kind.INPUT, fed, 0))
    if gradient is None or fed_with is None:
        return None
    left, right = gradient.float().flatten(0, -2), fed_with.float().flatten(0, -2)
    if len(left) != len(right) or math.prod((*left.shape, right.shape[1])) > _FLOPS:
        return None
    return left.T @ right
