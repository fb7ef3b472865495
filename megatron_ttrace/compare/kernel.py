# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for ``measure``'s sums: one pass over a candidate and its reference.

Programs read disjoint ranges of elements and write partial sums; a single program adds these up, in
a fixed order, so that a repeated run gives the same bits. All arithmetic is in float64, which needs
no second pass where float32 would underflow. Imported by megatron_ttrace/compare/device.py alone.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron_ttrace.trace.checksum import WORDS, powers, weights

_BLOCK = 2048
_BLOCKS = 8
"""Blocks of one program. Its elements never straddle two parts of the checksum."""
_FLOATS = tl.constexpr(5)
_INTEGERS = tl.constexpr(5)

_TYPES: dict[torch.dtype, tuple[torch.dtype, Any]] = {
    torch.float64: (torch.int64, tl.float64),
    torch.float32: (torch.int32, tl.float32),
    torch.float16: (torch.int16, tl.float16),
    torch.bfloat16: (torch.int16, tl.bfloat16),
    torch.float8_e4m3fn: (torch.int8, tl.float8e4nv),
    torch.float8_e5m2: (torch.int8, tl.float8e5),
}
DTYPES = frozenset(_TYPES)
"""The dtypes that the kernels read."""


# Not compiled anew for sizes that are one, or multiples of 16.
@triton.jit(do_not_specialize=["n", "whole", "factor"])  # type: ignore[untyped-decorator]
def _partial_sums(  # type: ignore[no-untyped-def]
    candidate,
    reference,
    weights,
    floats,
    integers,
    n,
    whole,
    factor,
    c_type: tl.constexpr,
    r_type: tl.constexpr,
    width: tl.constexpr,  # of a candidate's element in bits
    words: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    per_word: tl.constexpr = 64 // width
    inverse = tl.full([block], 1.0, tl.float64) / factor
    diff = tl.zeros([block], tl.float64)
    norm_r = tl.zeros([block], tl.float64)
    norm_c = tl.zeros([block], tl.float64)
    dot = tl.zeros([block], tl.float64)
    worst = tl.zeros([block], tl.float64)
    nonfinite = tl.zeros([block], tl.int64)
    undefined = tl.zeros([block], tl.int64)
    low = tl.zeros([block], tl.int64)
    high = tl.zeros([block], tl.int64)
    tail = tl.zeros([block], tl.int64)
    for step in range(blocks):
        at = (program * blocks + step) * block + tl.arange(0, block)
        inside = at < n
        bits = tl.load(candidate + at, mask=inside, other=0)
        c = bits.to(c_type, bitcast=True)
        r = tl.load(reference + at, mask=inside, other=0).to(r_type, bitcast=True)
        if c_type != tl.float64:
            c = c.to(tl.float32)
        if r_type != tl.float64:
            r = r.to(tl.float32)
        c, r = c.to(tl.float64), r.to(tl.float64)

        finite = (tl.abs(c) < float("inf")) & (tl.abs(r) < float("inf"))
        neither = (c != c) & (r != r)
        nonfinite += ((finite | (c == r) | neither) == 0).to(tl.int64)
        undefined += neither.to(tl.int64)
        c = tl.where(finite, c, 0.0) * inverse
        r = tl.where(finite, r, 0.0)
        d = c - r
        diff += d * d
        norm_r += r * r
        norm_c += c * c
        dot += c * r
        worst = tl.maximum(worst, tl.abs(d))

        # The 64-bit words of checksum.weighted, element by element: both sums are linear in them.
        signed = bits.to(tl.int64)
        unsigned = signed
        if width < 64:
            unsigned = signed & ((1 << width) - 1)
        word = at // per_word
        lane = at % per_word
        first = tl.load(weights + word % words, mask=inside, other=0)
        second = tl.load(weights + words + word % words, mask=inside, other=0)
        is_whole = word < whole
        placed = unsigned << (lane * width)
        low += tl.where(is_whole, placed * first, 0)
        tail += tl.where(is_whole, 0, placed)
        if width == 64:
            high += (signed >> 32) * second
        else:
            upper = lane - per_word // 2
            half = tl.where(lane == per_word - 1, signed, unsigned)
            half = half << (tl.maximum(upper, 0) * width)
            high += tl.where(is_whole & (upper >= 0), half * second, 0)
    floats += program * _FLOATS
    tl.store(floats, tl.sum(diff))
    tl.store(floats + 1, tl.sum(norm_r))
    tl.store(floats + 2, tl.sum(norm_c))
    tl.store(floats + 3, tl.sum(dot))
    tl.store(floats + 4, tl.max(worst))
    integers += program * _INTEGERS
    tl.store(integers, tl.sum(nonfinite))
    tl.store(integers + 1, tl.sum(undefined))
    tl.store(integers + 2, tl.sum(low))
    tl.store(integers + 3, tl.sum(high))
    tl.store(integers + 4, tl.sum(tail))


@triton.jit(do_not_specialize=["programs", "parts", "per_part"])  # type: ignore[untyped-decorator]
def _total(  # type: ignore[no-untyped-def]
    floats, integers, powers, total, programs, parts, per_part, block: tl.constexpr
):
    diff = tl.zeros([block], tl.float64)
    norm_r = tl.zeros([block], tl.float64)
    norm_c = tl.zeros([block], tl.float64)
    dot = tl.zeros([block], tl.float64)
    worst = tl.zeros([block], tl.float64)
    nonfinite = tl.zeros([block], tl.int64)
    undefined = tl.zeros([block], tl.int64)
    checksum = tl.zeros([block], tl.int64)
    beginning = tl.load(powers + 2 * parts)
    for start in range(0, programs, block):
        at = start + tl.arange(0, block)
        inside = at < programs
        diff += tl.load(floats + at * _FLOATS, mask=inside, other=0.0)
        norm_r += tl.load(floats + at * _FLOATS + 1, mask=inside, other=0.0)
        norm_c += tl.load(floats + at * _FLOATS + 2, mask=inside, other=0.0)
        dot += tl.load(floats + at * _FLOATS + 3, mask=inside, other=0.0)
        worst = tl.maximum(worst, tl.load(floats + at * _FLOATS + 4, mask=inside, other=0.0))
        nonfinite += tl.load(integers + at * _INTEGERS, mask=inside, other=0)
        undefined += tl.load(integers + at * _INTEGERS + 1, mask=inside, other=0)
        # A program after the last whole word has zeros to weigh.
        exponent = tl.maximum(2 * (parts - 1 - at // per_part), 0)
        low = tl.load(integers + at * _INTEGERS + 2, mask=inside, other=0)
        high = tl.load(integers + at * _INTEGERS + 3, mask=inside, other=0)
        checksum += low * tl.load(powers + exponent + 1, mask=inside, other=0)
        checksum += high * tl.load(powers + exponent, mask=inside, other=0)
        checksum += tl.load(integers + at * _INTEGERS + 4, mask=inside, other=0) * beginning
    tl.store(total, tl.sum(diff).to(tl.int64, bitcast=True))
    tl.store(total + 1, tl.sum(norm_r).to(tl.int64, bitcast=True))
    tl.store(total + 2, tl.sum(norm_c).to(tl.int64, bitcast=True))
    tl.store(total + 3, tl.sum(dot).to(tl.int64, bitcast=True))
    tl.store(total + 4, tl.max(worst).to(tl.int64, bitcast=True))
    tl.store(total + 5, tl.sum(nonfinite))
    tl.store(total + 6, tl.sum(undefined))
    tl.store(total + 7, tl.sum(checksum))


def fused_sums(candidate: torch.Tensor, reference: torch.Tensor, factor: float) -> torch.Tensor:
    """The sums of one box, as a row of device.py; nothing is read back.

    Args:
        candidate: contiguous, of one of ``DTYPES``.
        reference: as many elements, likewise, on the same device.
        factor: expected candidate/reference ratio.
    """
    n = candidate.numel()
    (c_bits, c_type), (r_bits, r_type) = _TYPES[candidate.dtype], _TYPES[reference.dtype]
    per_word = 8 // candidate.element_size()
    programs = triton.cdiv(n, _BLOCK * _BLOCKS)
    whole = n // per_word
    device = candidate.device
    floats = torch.empty(programs, _FLOATS.value, dtype=torch.float64, device=device)
    integers = torch.empty(programs, _INTEGERS.value, dtype=torch.int64, device=device)
    total = torch.empty(8, dtype=torch.int64, device=device)
    _partial_sums[(programs,)](
        candidate.view(c_bits),
        reference.view(r_bits),
        weights(device),
        floats,
        integers,
        n=n,
        whole=whole,
        factor=float(factor),  # float32 in a kernel, which is exact for a number of ranks
        c_type=c_type,
        r_type=r_type,
        width=8 * candidate.element_size(),
        words=WORDS,
        block=_BLOCK,
        blocks=_BLOCKS,
        num_warps=8,
    )
    _total[(1,)](
        floats,
        integers,
        powers(candidate.nbytes, device),
        total,
        programs=programs,
        parts=triton.cdiv(whole, WORDS),
        per_part=WORDS * per_word // (_BLOCK * _BLOCKS),
        block=1024,
    )
    return total
