# SPDX-License-Identifier: Apache-2.0
"""Checksums of a tensor's bits: replicas that differ in one bit, or in their order, are told apart.

On a CPU it is XXH3-64. On a GPU, where no hash can be computed in parallel as cheaply, it is a sum
of the 64-bit words, weighted by position. Only checksums from one kind of device are compared: the
ranks of a job run on one kind.
"""

import functools

import torch
import xxhash

from megatron_ttrace.trace.views import as_bytes, memory

WORDS = 1 << 15
"""64-bit words that share one sum: a *part*."""
_BASE = 1_000_003
"""By which a checksum so far is multiplied before more is added."""
MASK = (1 << 64) - 1


def joined(before: int, after: int) -> int:
    """The checksum of two pieces."""
    return (before * _BASE + after) & MASK


def checksum(data: torch.Tensor) -> int:
    """Of the bits of all elements in row-major order; of no element, 0. Waits for a GPU."""
    data = data.detach()
    if not data.numel():
        return 0
    if data.device.type == "cpu":
        data = data.contiguous()
        return xxhash.xxh3_64_intdigest(memory(data))
    return int(weighted(data).item()) & MASK


def weighted(data: torch.Tensor) -> torch.Tensor:
    """The weighted sum, modulo 2^64, of shape [] on ``data``'s device; nothing is read back."""
    raw = as_bytes(data.contiguous())
    whole = len(raw) // 8 * 8
    shifts = 8 * torch.arange(8, device=raw.device)
    total = (raw[whole:].long() << shifts[: len(raw) - whole]).sum()
    parts = -(-whole // (8 * WORDS))
    padded = torch.zeros(parts * WORDS * 8, dtype=torch.uint8, device=raw.device)
    padded[:whole] = raw[:whole]
    words = padded.view(torch.int64).reshape(parts, WORDS)
    # Products wrap around: high bits alone would weigh too little, so they count again, lower.
    by = weights(raw.device)
    sums = torch.stack(((words * by[0]).sum(1), ((words >> 32) * by[1]).sum(1)), dim=1)
    exponents = powers(len(raw), raw.device)
    return total * exponents[2 * parts] + (sums.reshape(-1) * exponents[: 2 * parts].flip(0)).sum()


@functools.cache
def weights(device: torch.device) -> torch.Tensor:
    """Two rows of ``WORDS`` odd numbers: a single changed word always changes the sum."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(-(1 << 63), (1 << 63) - 1, (2, WORDS), generator=generator)
    return _constant(drawn | 1, device)


def powers(size: int, device: torch.device) -> torch.Tensor:
    """Powers of the base, modulo 2^64, as signed numbers: two for every part of ``size`` bytes."""
    parts = -(-(size // 8) // WORDS)
    # At least two: with no whole word, the kernel weighs zeros by the first two.
    return _powers(2 << parts.bit_length(), device)


@functools.cache
def _powers(count: int, device: torch.device) -> torch.Tensor:
    found, power = [], 1
    for _ in range(count):
        found.append(power - ((power >> 63) << 64))
        power = power * _BASE & MASK
    return _constant(torch.tensor(found), device)


def _constant(data: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On the device for good; waits once, because hooks on other streams use it, too."""
    if device.type == "cuda":
        data = data.pin_memory()
    there = data.to(device, non_blocking=True)
    if there.is_cuda:
        torch.cuda.synchronize(device)
    return there
