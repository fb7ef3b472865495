# SPDX-License-Identifier: Apache-2.0
"""Runs in FP8: checked module by module.

A perturbation of one bf16 epsilon makes a few percent of the elements round to another FP8 number,
and that is as large as what FP8 itself rounds: after two layers every tensor differs by several
percent on a healthy run. So every module is given the reference's inputs and output gradients
(``--ttrace-isolate``, without being asked), and what each then makes of them is compared. Equal
inputs round to equal numbers; what is left are sums in another order, and scales that come from a
rank's own part. Replays estimate both.

Only where TransformerEngine is emulated: elsewhere its scales cannot be disturbed, and FP8 runs are
compared as they are, with what is then blind named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_ttrace.cpu import te
from megatron_ttrace.mcore import fp8
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.runtime.perturb import jitter
from megatron_ttrace.trace.records import TraceKey

NOTICE = (
    "FP8: every module is checked with the reference's inputs, as with --ttrace-isolate, "
    "because FP8 rounding errors spread"
)


def uses_fp8(args: MegatronArguments) -> bool:
    """Whether products are taken in FP8."""
    return bool(getattr(args, "fp8", None))


def is_isolated(args: MegatronArguments) -> bool:
    """Whether FP8 makes this run be checked module by module."""
    return uses_fp8(args) and te.emulated()


@contextmanager
def equal_scales(
    args: MegatronArguments, chunks: Sequence[torch.nn.Module], mesh: Mesh
) -> Iterator[None]:
    """Start from the same delayed scales on every layout; put this run's own back afterwards."""
    if not uses_fp8(args):
        yield
        return
    kept = fp8.ScalesKept(chunks)
    try:
        scale = restart_scales(args, chunks, mesh)
        if te.emulated():
            from megatron_ttrace.cpu.te.fp8_modules import backward_scales_from

            with backward_scales_from(scale):
                yield
        else:
            yield
    finally:
        kept.restore()


def restart_scales(args: MegatronArguments, chunks: Sequence[torch.nn.Module], mesh: Mesh) -> float:
    """Put delayed scales to their start values; returns that of gradients."""
    scale = backward_scale(args, mesh)
    if uses_fp8(args):
        fp8.equal_scales(chunks, scale)
    return scale


def backward_scale(args: MegatronArguments, mesh: Mesh) -> float:
    """A gradient's first scale: a rank's loss is a mean over the tokens of its own step."""
    if args.calculate_per_token_loss:
        return fp8.HEADROOM
    tokens = args.seq_length * args.global_batch_size
    return fp8.backward_scale(tokens / (mesh.size("dp") * mesh.size("cp")))


def wobble(chunks: Sequence[Names], seed: int) -> Callable[[TraceKey, torch.Tensor], torch.Tensor]:
    """What a replay does to the inputs that it gives to modules.

    One epsilon, as everywhere; but nothing to those of an FP8 product, which in a healthy candidate
    are the reference's to the last bit.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = {
        name
        for names in chunks
        for name, module in names.modules.items()
        if hasattr(module, "fp8_meta") and "linear" in type(module).__name__.lower()
    }

    def disturb(key: TraceKey, values: torch.Tensor) -> torch.Tensor:
        name = key.name.partition("#")[0]
        return values if name in exact else jitter(values, generator)

    return disturb
