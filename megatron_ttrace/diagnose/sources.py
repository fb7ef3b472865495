# SPDX-License-Identifier: Apache-2.0
"""Hypotheses about origin: the value of another time, of another module, of another operand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import torch

from megatron_ttrace.compare.measure import logical_view
from megatron_ttrace.diagnose.evidence import Evidence, Part, dot
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.records import STEP_LEVEL, Kind, TraceKey

_SAMPLE = 256
_FLOPS = 1e9
_EPSILON = 1e-5


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


def addend(evidence: Evidence) -> Finding | None:
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
                return Finding(f"{what} is missing", Cause.ADDEND)
            return Finding(f"{what} is added {times + 1:g} times", Cause.ADDEND)
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
    for other in itertools.chain(_siblings(module), evidence.alike(module)):
        if not evidence.in_time:
            return None
        product = _total(evidence, module, other)
        if product is None:
            continue
        if dataclasses.replace(evidence, reference=product).mends(lambda part: part.pieces):
            hint = "the input saved for backward was overwritten before it was used"
            return Finding(f"computed with the input of {other}", Cause.OPERAND, (), hint)
    return None


def _reproduces(evidence: Evidence, module: str, reference: torch.Tensor) -> bool:
    """Whether the formula gives this module's gradient at all (it does not with a tied weight)."""
    product = _total(evidence, module, module)
    if product is None:
        return False
    off = float(torch.linalg.vector_norm(product - reference))
    return off <= 0.1 * float(torch.linalg.vector_norm(reference))


def _siblings(module: str) -> Iterator[str]:
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
        one = product(evidence, module, fed, microbatch)
        if one is None:
            break
        total = one if total is None else total + one
    return total if total is not None and total.shape == evidence.reference.shape else None


def product(evidence: Evidence, module: str, fed: str, microbatch: int) -> torch.Tensor | None:
    """A microbatch's share of a linear layer's weight gradient; ``None`` without its tensors."""
    place = (evidence.key.iteration, microbatch)
    gradient = evidence.whole(TraceKey(*place, Kind.GRAD_OUTPUT, module, 0))
    fed_with = evidence.whole(TraceKey(*place, Kind.INPUT, fed, 0))
    if gradient is None or fed_with is None:
        return None
    left, right = gradient.float().flatten(0, -2), normed(evidence, fed, fed_with.float())
    if len(left) != len(right) or math.prod((*left.shape, right.shape[1])) > _FLOPS:
        return None
    return left.T @ right


def normed(evidence: Evidence, module: str, fed: torch.Tensor) -> torch.Tensor:
    """What a linear layer multiplies: its input, through the norm that is fused with it, if one is.

    Epsilon and centring are Megatron's defaults; that the module's own gradient is reproduced tells
    whether they fit.
    """
    fed = fed.flatten(0, -2)
    first = (evidence.key.iteration, STEP_LEVEL, Kind.PARAM)
    weight = evidence.whole(TraceKey(*first, f"{module}.layer_norm_weight", 0))
    if weight is None or weight.shape != fed.shape[-1:]:
        return fed
    bias = evidence.whole(TraceKey(*first, f"{module}.layer_norm_bias", 0))
    if bias is None:
        return fed * torch.rsqrt(fed.square().mean(-1, keepdim=True) + _EPSILON) * weight.float()
    shape = tuple(weight.shape)
    return torch.nn.functional.layer_norm(fed, shape, weight.float(), bias.float(), _EPSILON)
