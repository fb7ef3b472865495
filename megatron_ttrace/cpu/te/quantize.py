# SPDX-License-Identifier: Apache-2.0
"""Rounding to FP8 and back, with a scale for a tensor or for each block of it.

A tensor is multiplied by its scale, cut off at the format's largest value (FP8 saturates; a plain
cast would give NaN or infinity), rounded to the eight-bit type, and divided by the scale again. The
products of such values are exact in float32, in which tensor cores sum them too: so a product of
the rounded tensors in float32 is what FP8 hardware computes, but for the order of the sum.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_ttrace.cpu.te.norms import compute_dtype

_LARGEST_SCALE = torch.finfo(torch.float32).max
_elsewhere: list[torch.Generator] = []


@contextmanager
def other_scales(generator: torch.Generator) -> Iterator[None]:
    """Within this context every scale is smaller by a random factor, down to a half.

    A scale comes from the largest value of what it covers: a tensor, a rank's part of it, or (with
    delayed scaling) of another microbatch's. Another scale rounds every element elsewhere; that is
    what another layout does. A scale that is a power of two stays one: it rounds no mantissa.
    """
    _elsewhere.append(generator)
    try:
        yield
    finally:
        _elsewhere.pop()


def lowered(scale: torch.Tensor, power_of_two: bool) -> torch.Tensor:
    """Another scale than a tensor's own, where one is asked for."""
    if not _elsewhere:
        return scale
    exponents = torch.rand(scale.shape, generator=_elsewhere[-1])
    if power_of_two:
        exponents = exponents.round()
    return scale * torch.exp2(-exponents)


def amax(tensor: torch.Tensor) -> torch.Tensor:
    """Largest absolute value, a float32 scalar; zero for an empty tensor."""
    if tensor.numel() == 0:
        return torch.zeros(())
    return tensor.detach().abs().amax().float()


def scale_from_amax(
    largest: torch.Tensor,
    fp8_max: float,
    old: torch.Tensor | None = None,
    margin: int = 0,
    power_of_two: bool = False,
) -> torch.Tensor:
    """Scale that maps ``largest`` to the format's largest value, elementwise.

    Where ``largest`` is zero or not finite it says nothing: the old scale (or 1) stays. A power of
    two rounds no mantissa; it is rounded down, so that nothing saturates.

    Like ``common/recipe/recipe_common.cuh`` in TransformerEngine it is divided and rounded once: a
    scale that is off by one unit moves all values that lie between two of FP8's.
    """
    unchanged = torch.ones_like(largest) if old is None else old
    # PyTorch multiplies a number by a tensor's reciprocal, which rounds twice.
    scale = torch.full_like(largest, fp8_max) / largest / (2.0**margin)
    scale = torch.where(torch.isinf(scale), torch.full_like(scale, _LARGEST_SCALE), scale)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where((largest > 0) & torch.isfinite(largest), scale, unchanged)


def cast(tensor: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """``tensor * scale`` in eight bits, saturating; NaN stays NaN."""
    limit = torch.finfo(fp8).max
    return (tensor.detach().float() * scale).clamp(-limit, limit).to(fp8)


def rounded(
    tensor: torch.Tensor, scale: torch.Tensor, fp8: torch.dtype, *, power_of_two: bool = False
) -> torch.Tensor:
    """Return ``tensor`` after rounding to FP8, in the type that products of FP8 are summed in.

    ``scale`` broadcasts against ``tensor``.
    """
    scale = lowered(scale, power_of_two)
    return cast(tensor, scale, fp8).to(compute_dtype(tensor.dtype)) / scale


def current_scaling(tensor: torch.Tensor, fp8: torch.dtype) -> torch.Tensor:
    """Round with one scale, from the tensor's own largest value."""
    scale = scale_from_amax(amax(tensor), torch.finfo(fp8).max)
    return rounded(tensor, scale, fp8)


def block_scaling(tensor: torch.Tensor, block: tuple[int, int], fp8: torch.dtype) -> torch.Tensor:
    """Round ``[rows, columns]`` with one power of two for each block of ``block``.

    The last blocks of a dim may be smaller.
    """
    rows, columns = tensor.shape
    if tensor.numel() == 0:
        return tensor.to(compute_dtype(tensor.dtype))
    height, width = min(block[0], rows), min(block[1], columns)
    padding = (0, -columns % width, 0, -rows % height)
    padded = torch.nn.functional.pad(tensor.detach().float(), padding)
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scale = scale_from_amax(largest, torch.finfo(fp8).max, power_of_two=True)
    result = rounded(blocks, scale, fp8, power_of_two=True).reshape(padded.shape)
    return result[:rows, :columns].to(compute_dtype(tensor.dtype))
