# SPDX-License-Identifier: Apache-2.0
"""Perturb a run by about one machine epsilon, as rounding in another order would.

Three places, so that forward, backward and gradients each see fresh errors in every layer:

- every parameter is moved by one epsilon of its dtype, relatively, up or down at random: each
  matrix product then carries an independent relative error of about epsilon, which is what summing
  it in another order (tensor parallelism) does;
- the embedding's output likewise, the paper's choice (arXiv 2506.09280, section 4);
- the per-token loss likewise: that is the start of the backward pass. It is float32 in any run: an
  epsilon of that moves no 16-bit number. So where training is in 16 bits, the head's input gradient
  is added up from two parts of the vocabulary, as tensor parallelism does (``split_head``).

An epsilon of the compute dtype is far less than FP8's steps: nearly all elements would be rounded
to FP8 as before. What moves them in another layout is another scale, so scales are perturbed too.
(Where the emulated TransformerEngine runs; the real one's scales are out of reach.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_ttrace.compare.device import to_device
from megatron_ttrace.compare.tolerance import epsilon
from megatron_ttrace.mcore.names import ROOT, Names

_EMBEDDINGS = ("embedding",)
_HEAD = "output_layer"


def jitter(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``tensor * (1 +- epsilon)`` with random signs, in ``tensor``'s dtype."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    step = (to_device(signs, tensor.device).float() * 2 - 1) * epsilon(tensor.dtype)
    return (tensor.float() * (1 + step)).to(tensor.dtype)


def split_head(
    module: torch.nn.Module, generator: torch.Generator
) -> torch.utils.hooks.RemovableHandle:
    """Let the head add up its input gradient from two parts of the vocabulary, cut at random.

    The target's row of the weight is much of it, and exact in 16 bits; what the other words add is
    often less than half a step between 16-bit numbers there, and lost. How much is lost depends on
    how it is added up, is much the same for every token, and shows where the tokens' gradients
    cancel: in the gradient of the last norm's bias.
    """

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        own, logits = args[0] if args else kwargs["input_"], output[0]
        shared = kwargs.get("weight")
        weight: torch.Tensor = module.weight if shared is None else shared
        if own.dtype.itemsize != 2 or not (own.requires_grad and logits.requires_grad):
            return
        cut = int(torch.randint(1, len(weight), (), generator=generator))
        seen: list[torch.Tensor] = []
        logits.register_hook(seen.append)

        def add_up(gradient: torch.Tensor) -> torch.Tensor | None:
            if not seen:
                return None
            above = seen.pop()
            parts = above[..., :cut] @ weight[:cut] + above[..., cut:] @ weight[cut:]
            # Others than the head may have read the hidden states: only its share changes.
            change = (parts.float() - (above @ weight).float()).view_as(gradient)
            return torch.add(gradient.float(), change).to(gradient.dtype)

        own.register_hook(add_up)

    return module.register_forward_hook(after, with_kwargs=True)


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
            if name == _HEAD:
                handles.append(split_head(module, generator))
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
