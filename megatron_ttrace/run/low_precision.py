# SPDX-License-Identifier: Apache-2.0
"""FP8 runs are checked module by module, others in 16 bits if asked to: see docs/tolerance.md.

Equal inputs round to equal numbers; what remains are sums in another order, and scales computed
from a rank's own part. Replays estimate both. This needs the emulated TransformerEngine. The scales
of the real one cannot be perturbed: FP8 runs are then compared without isolation, and tensors that
are blind are reported.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch

from megatron_ttrace.cpu import te
from megatron_ttrace.jobs import fingerprint
from megatron_ttrace.jobs.settings import Settings
from megatron_ttrace.mcore import fp8
from megatron_ttrace.mcore.arguments import MegatronArguments
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.run.perturb import perturb
from megatron_ttrace.trace.modules import module_of
from megatron_ttrace.trace.records import TraceKey

NOTICE = (
    "FP8: every module is checked with the reference's inputs, as with --ttrace-isolate, "
    "because FP8 rounding errors spread"
)


def uses_fp8(args: MegatronArguments) -> bool:
    """Whether matrix products are computed in FP8."""
    return bool(getattr(args, "fp8", None))


def is_isolated(args: MegatronArguments) -> bool:
    """Whether this run is checked module by module because of FP8."""
    return uses_fp8(args) and te.emulated()


def replays_are_isolated(args: MegatronArguments, settings: Settings) -> bool:
    """Whether a reference's replays give each module its inputs: then nothing accumulates."""
    return is_isolated(args) or bool(fingerprint.by_module(args, settings))


@contextmanager
def equal_scales(
    args: MegatronArguments, chunks: Sequence[torch.nn.Module], mesh: Mesh
) -> Iterator[None]:
    """Within this context every layout starts from the same delayed scales."""
    with ExitStack() as stack:
        if uses_fp8(args):
            stack.enter_context(fp8.scales_kept(chunks))
            scale = restart_scales(args, chunks, mesh)
            if te.emulated():
                from megatron_ttrace.cpu.te.fp8 import backward_scales_from

                stack.enter_context(backward_scales_from(scale))
        yield


def restart_scales(args: MegatronArguments, chunks: Sequence[torch.nn.Module], mesh: Mesh) -> float:
    """Set delayed scales to their start values; returns that of gradients.

    A rank's loss is a mean over the tokens of its own step, unless it is computed per token.
    """
    tokens = args.seq_length * args.global_batch_size / (mesh.size("dp") * mesh.size("cp"))
    scale = fp8.HEADROOM if args.calculate_per_token_loss else fp8.backward_scale(tokens)
    if uses_fp8(args):
        fp8.equal_scales(chunks, scale)
    return scale


def input_perturbation(
    args: MegatronArguments, chunks: Sequence[Names], seed: int
) -> Callable[[TraceKey, torch.Tensor], torch.Tensor]:
    """How a replay perturbs the inputs that it gives to modules.

    By one epsilon; but in FP8 not those of an FP8 product, which in a healthy candidate are bitwise
    equal to the reference's.
    """
    generator = torch.Generator().manual_seed(seed)
    exact = {
        name
        for names in (chunks if is_isolated(args) else ())
        for name, module in names.modules.items()
        if hasattr(module, "fp8_meta") and "linear" in type(module).__name__.lower()
    }

    def perturbed(key: TraceKey, values: torch.Tensor) -> torch.Tensor:
        name = module_of(key.name)
        return values if name in exact else perturb(values, generator)

    return perturbed
