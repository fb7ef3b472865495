# SPDX-License-Identifier: Apache-2.0
"""Compile the comparison's kernels for a Hopper GPU, which takes no GPU; run as a program."""

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from megatron_ttrace.compare import kernel
from megatron_ttrace.trace.checksum import WORDS

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {1: "*i8", 2: "*i16", 4: "*i32", 8: "*i64"}


def pairs(candidate: torch.dtype, reference: torch.dtype) -> int:
    """Size of the machine code that reads this pair of dtypes."""
    constants = {
        "c_type": kernel._TYPES[candidate][1],
        "r_type": kernel._TYPES[reference][1],
        "width": 8 * candidate.itemsize,
        "words": WORDS,
        "block": kernel._BLOCK,
        "blocks": kernel._BLOCKS,
    }
    signature = {
        "candidate": POINTERS[candidate.itemsize],
        "reference": POINTERS[reference.itemsize],
        "weights": "*i64",
        "floats": "*fp64",
        "integers": "*i64",
        "n": "i32",
        "whole": "i32",
        "factor": "fp32",
        **dict.fromkeys(constants, "constexpr"),
    }
    source = ASTSource(kernel._partial_sums, signature=signature, constexprs=constants)
    return len(triton.compile(source, target=HOPPER, options={"num_warps": 8}).asm["cubin"])


def total() -> int:
    numbers = dict.fromkeys(("programs", "parts", "per_part"), "i32")
    pointers = {"floats": "*fp64", "integers": "*i64", "powers": "*i64", "total": "*i64"}
    source = ASTSource(
        kernel._total,
        signature={**pointers, **numbers, "block": "constexpr"},
        constexprs={"block": 1024},
    )
    return len(triton.compile(source, target=HOPPER).asm["cubin"])


if __name__ == "__main__":
    for dtype in sorted(kernel.DTYPES, key=str):
        print(dtype, pairs(dtype, dtype), pairs(dtype, torch.float32))
    print("total", total())
