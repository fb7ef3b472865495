# SPDX-License-Identifier: Apache-2.0
"""Perturb a run by about one machine epsilon, as rounding in another order would.

Three places, so that forward, backward and gradients each see fresh errors in every layer:

- every parameter is moved by one epsilon of its dtype, relatively, up or down at random: each
  matrix product then carries an independent relative error of about epsilon, which is what summing
  it in another order (tensor parallelism) does;
- the embedding's output likewise, the paper's choice (arXiv 2506.09280, section 4);
- the per-token loss likewise: that is the start of the backward pass.

An epsilon of the compute dtype is far less than FP8's steps: nearly all elements would be rounded
to FP8 as before. What moves them in another layout is another scale, so scales are perturbed too.
(Where the emulated TransformerEngine runs; the real one's scales are out of reach.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_ttrace.capture.names import ROOT, Names
from megatron_ttrace.compare.tolerance import epsilon

_EMBEDDINGS = ("embedding",)


def jitter(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``tensor * (1 +- epsilon)`` with random signs, in ``tensor``'s dtype."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    step = (signs.to(tensor.device, torch.float32) * 2 - 1) * epsilon(tensor.dtype)
    return (tensor.float() * (1 + step)).to(tensor.dtype)


@contextmanager
def perturbed(chunks: Sequence[Names], seed: int) -> Iterator[None]:
    """Within this context the model's next step runs perturbed. Parameters are *not* put back."""
    generator = torch.Generator().manual_seed(seed)
    handles = []

    def outputs(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if torch.is_tensor(output) and output.is_floating_point():
            with torch.no_grad():
                factor = jitter(torch.ones_like(output), generator)
            return output * factor
        return output

    for names in chunks:
        with torch.no_grad():
            for parameter in names.parameters.values():
                if parameter.dtype == torch.float32:
                    parameter.data.copy_(jitter(parameter.data, generator))
        for name, module in names.modules.items():
            if name in _EMBEDDINGS or name == ROOT:
                handles.append(module.register_forward_hook(outputs))
    with ExitStack() as stack:
        for handle in handles:
            stack.callback(handle.remove)
        stack.enter_context(_other_scales(generator))
        yield


@contextmanager
def _other_scales(generator: torch.Generator) -> Iterator[None]:
    from megatron_ttrace.cpu import te

    if not te.emulated():
        yield
        return
    from megatron_ttrace.cpu.te import quantize

    with quantize.other_scales(generator):
        yield
