# SPDX-License-Identifier: Apache-2.0
"""Repairs of the origin: the value of another time, of another module, of another operand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch

from megatron_ttrace.diagnose.evidence import Evidence, flat, is_constant
from megatron_ttrace.trace.findings import Cause, Finding, WrongOperand
from megatron_ttrace.trace.records import Kind

_SAMPLE = 256
_PER_ELEMENT = 8
"""Multiplications of a matrix product that cost what another operation costs per element."""
_EPSILON = 1e-5


def elsewhere(evidence: Evidence) -> Finding | None:
    """The tensor is another one of the reference. The repair: use the right one."""
    return evidence.instead(_likely(evidence))


def _likely(evidence: Evidence) -> Iterator[tuple[Finding, torch.Tensor]]:
    """Other tensors that begin as a failing part does."""
    first = evidence.parts[0]
    if is_constant(flat(first.pieces)):
        return
    head = flat(first.pieces[:1])[:_SAMPLE]
    for finding, key in evidence.others():
        evidence.work.spend(0)
        other = evidence.whole(key)
        if other is None or other.shape != evidence.reference.shape:
            continue
        start = flat(evidence.expected(first, other)[:1])[:_SAMPLE]
        if torch.linalg.vector_norm(head - start) <= 0.5 * torch.linalg.vector_norm(start):
            yield finding, other


def operand(evidence: Evidence) -> WrongOperand | None:
    """A linear layer's weight gradient, made with another layer's input. The repair: its own.

    ``dW = sum over microbatches of grad_output^T input`` is computed from the reference's tensors.
    The module's own ones must give its own gradient first (they do not with a tied weight).
    """
    key = evidence.key
    module = key.name.removesuffix(".weight")
    if key.kind is not Kind.MAIN_GRAD or module == key.name or evidence.reference.ndim != 2:
        return None
    gradient = _gradient(evidence, module, module)
    if gradient is None or not evidence.near(gradient):
        return None
    modules = itertools.chain(_siblings(module), evidence.alike(module))
    return evidence.instead(
        (WrongOperand(Cause.OPERAND, module=other), value)
        for other in modules
        if (value := _gradient(evidence, module, other)) is not None
    )


def _siblings(module: str) -> Iterator[str]:
    """The same module of other layers, the nearest first."""
    words = module.split(".")
    position = next((at for at, word in enumerate(words) if word.isdigit()), None)
    if position is None:
        return
    number = int(words[position])
    for distance in range(1, 9):
        for layer in (number + distance, number - distance):
            if layer >= 0:
                yield ".".join([*words[:position], str(layer), *words[position + 1 :]])


def _gradient(evidence: Evidence, module: str, fed: str) -> torch.Tensor | None:
    """A linear layer's weight gradient, made with the input of ``fed``."""
    shares = by_microbatch(evidence, lambda number: product(evidence, module, fed, number))
    return functools.reduce(torch.add, shares) if shares else None


def by_microbatch(
    evidence: Evidence, share: Callable[[int], torch.Tensor | None]
) -> list[torch.Tensor]:
    """The shares of all microbatches in a tensor: up to the first that has none."""
    shares: list[torch.Tensor] = []
    while (value := share(len(shares))) is not None and value.shape == evidence.reference.shape:
        shares.append(value)
    return shares


def product(
    evidence: Evidence,
    module: str,
    fed: str,
    microbatch: int,
    rows: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """A microbatch's share of a linear layer's weight gradient; ``None`` without its tensors.

    ``rows`` has true for each that counts: sequence position, or token that an expert has. By
    default all count.
    """
    gradient = evidence.tensor(Kind.GRAD_OUTPUT, module, microbatch)
    fed_with = evidence.tensor(Kind.INPUT, fed, microbatch)
    if gradient is None or fed_with is None or not 2 <= gradient.ndim == fed_with.ndim:
        return None
    if rows is not None:
        if not len(gradient) == len(fed_with) == len(rows):
            return None
        gradient, fed_with = gradient[rows], fed_with[rows]
    left, right = gradient.float().flatten(0, -2), normed(evidence, fed, fed_with.float())
    if len(left) != len(right):
        return None
    evidence.work.spend(left.numel() * right.shape[1] // _PER_ELEMENT)
    return left.T @ right


def ids_by_row(ids: torch.Tensor | None, shape: torch.Size) -> torch.Tensor | None:
    """Token ids as a module has its rows: as they are, or transposed; else ``None``."""
    if ids is None or ids.shape == shape:
        return ids
    return ids.mT if ids.ndim == 2 and ids.mT.shape == shape else None


def normed(evidence: Evidence, module: str, fed: torch.Tensor) -> torch.Tensor:
    """What a linear layer multiplies: its input, through the norm that is fused with it, if one is.

    Whether this is the norm shows in the module's own gradient, which must be reproduced.
    """
    fed = fed.flatten(0, -2)
    weight = evidence.parameter(f"{module}.layer_norm_weight")
    if weight is None or weight.shape != fed.shape[-1:]:
        return fed
    bias = evidence.parameter(f"{module}.layer_norm_bias")
    scaled = standardised(evidence, module, "layer_norm_weight", fed) * weight.float()
    return scaled if bias is None else scaled + bias.float()


def standardised(evidence: Evidence, module: str, leaf: str, fed: torch.Tensor) -> torch.Tensor:
    """What the weight ``leaf`` of a norm multiplies; one with a bias centres its input.

    Epsilon is Megatron's default.
    """
    if evidence.parameter(f"{module}.{leaf.replace('weight', 'bias')}") is not None:
        fed = fed - fed.mean(-1, keepdim=True)
    return fed * torch.rsqrt(fed.square().mean(-1, keepdim=True) + _EPSILON)
