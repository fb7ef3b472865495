# SPDX-License-Identifier: Apache-2.0
"""Perturb a run by about one machine epsilon, as summing in another order does.

Three places are perturbed, so that forward, backward and gradients get new errors in every layer:

- every float32 parameter is multiplied by 1 ± epsilon with random signs: each matrix product
  then has an independent relative error of about epsilon, as when tensor parallelism sums it in
  another order;
- the embedding's output likewise, by an epsilon of its weights' dtype, as in the paper (arXiv
  2506.09280, section 4); that of a language model inside another one, too, and the first
  convolution of an encoder of images;
- the per-token loss likewise, where the backward pass starts. It is float32 in every run, and an
  epsilon of float32 moves no 16-bit number: in 16 bits the head's input gradient is perturbed
  (``split_head``).

An epsilon of the compute dtype is much smaller than the steps of FP8: nearly all elements would be
rounded to the same FP8 number. In another layout they change because scales differ, so scales are
perturbed too (if TransformerEngine is emulated; the real one's scales cannot be changed).

Where all else is float32, three things may be in 16 bits: the gradient of logits
(``step_of_loss``), what Muon orthogonalises (``rounded_momentum``), what modules return under
autocast.
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from megatron_ttrace.capture.modules import tensors_in
from megatron_ttrace.capture.step import TracedModel
from megatron_ttrace.compare.tolerance import SAFETY, epsilon
from megatron_ttrace.cpu import te
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.optimizer import leaves_of
from megatron_ttrace.mcore.replaced import replaced
from megatron_ttrace.mcore.sharded_weights import local
from megatron_ttrace.trace.records import ROOT
from megatron_ttrace.trace.staging import to_device


@dataclasses.dataclass(frozen=True)
class Spread:
    """A model on several ranks, of which replicas are perturbed alike.

    Attributes:
        parts: of each parameter by name, a number of the elements that this rank has.
        ends: whether this rank computes the loss.
        add_up: adds a tensor up over tensor-parallel ranks, in place.
        part: which of them this rank is: with sequence parallelism, it has this part of the tokens.
    """

    parts: Mapping[str, int]
    ends: bool
    add_up: Callable[[torch.Tensor], object]
    part: int = 0


def spread_over(model: TracedModel) -> Spread:
    """This rank's part of a model on several ranks."""
    from megatron.core import parallel_state as mpu

    mesh = model.mesh
    parts = {
        place.name: zlib.crc32(
            repr((place.name, [box.region for box in place.boxes(mesh)])).encode()
        )
        for _, place in model.places()
    }
    group = mpu.get_tensor_model_parallel_group()
    add_up = functools.partial(torch.distributed.all_reduce, group=group)
    return Spread(parts, mesh.at("pp") == mesh.size("pp") - 1, add_up, mesh.at("tp"))


UNPERTURBED = 0
"""The seed of a replay that only repeats the step: what moves then is not deterministic."""

_EMBEDDING = "embedding"
_HEAD = "output_layer"


def _is(name: str, leaf: str) -> bool:
    """Whether a module is this part of a language model, which another model may contain."""
    return name.rpartition(".")[2] == leaf


def _language_model(embedding: str) -> str:
    """The name of the model that has this embedding."""
    return embedding.rpartition(".")[0] or ROOT


def _tables(modules: Iterable[tuple[str, torch.nn.Module]]) -> list[torch.nn.Module]:
    """The embeddings of a model that has none by Megatron's name."""
    return [
        module
        for _, module in modules
        if type(module).__name__.endswith("Embedding")
        and any(weight.dim() == 2 for weight in module.parameters(recurse=False))
    ]


def perturb(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """``tensor * (1 +- epsilon)`` with random signs, in ``tensor``'s dtype."""
    signs = torch.randint(0, 2, tensor.shape, generator=generator, dtype=torch.int8)
    step = (to_device(signs, tensor.device).float() * 2 - 1) * epsilon(tensor.dtype)
    return (tensor.float() * (1 + step)).to(tensor.dtype)


def split_head(
    module: torch.nn.Module, generator: torch.Generator, spread: Spread | None = None
) -> torch.utils.hooks.RemovableHandle:
    """Let the head sum its input gradient from two parts of the vocabulary, cut at random.

    The target's row of the weight is a large part of this gradient, and exact in 16 bits. What the
    other words add is often less than half a step between 16-bit numbers, and is lost. How much is
    lost depends on the order of summation, is similar for all tokens, and becomes visible where the
    tokens' gradients cancel: in the gradient of the last norm's bias.
    """

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> None:
        hidden: Any = next((tensor for _, tensor in tensors_in((args, kwargs))), None)
        logits: Any = next((tensor for _, tensor in tensors_in(output)), None)
        shared = kwargs.get("weight")
        weight: Any = getattr(module, "weight", None) if shared is None else shared
        if not _are_logits(logits, hidden, weight) or hidden.dtype.itemsize != 2:
            return
        cut = int(torch.randint(1, len(weight), (), generator=generator))
        seen: list[torch.Tensor] = []
        logits.register_hook(seen.append)

        def add_up(gradient: torch.Tensor) -> torch.Tensor | None:
            if not seen:
                return None
            above = seen.pop()
            rows = weight.to(above.dtype)  # as autocast does
            parts = above[..., :cut] @ rows[:cut] + above[..., cut:] @ rows[cut:]
            # Other modules may have read the hidden states: only the head's share changes.
            change = (parts.float() - (above @ rows).float()).view(-1, *gradient.shape[1:])
            if spread is not None:
                spread.add_up(change)
                if len(change) != len(gradient):
                    change = change.split(len(gradient))[spread.part]
            return torch.add(gradient.float(), change).to(gradient.dtype)

        hidden.register_hook(add_up)

    return module.register_forward_hook(after, with_kwargs=True)


def _are_logits(logits: Any, hidden: Any, weight: Any) -> bool:
    """Whether a head returns products with several rows of its weight: a fork's may be any."""
    if not all(map(torch.is_tensor, (logits, hidden, weight))) or weight.dim() != 2:
        return False
    rows, columns = weight.shape
    fits = (hidden.shape[-1], logits.shape[-1]) == (columns, rows)
    return bool(fits and rows > 1 and hidden.requires_grad and logits.requires_grad)


def step_of_loss(
    module: torch.nn.Module, generator: torch.Generator
) -> torch.utils.hooks.RemovableHandle:
    """Where the gradient of float32 logits is in bfloat16, move one token's largest element.

    The native fused cross entropy rounds it (megatron/core/fusions/fused_cross_entropy.py). Two
    runs rarely differ there, but if they do, by a whole step of bfloat16. So it is moved by the
    fraction that makes the tolerance a whole step: two at once are next to impossible.
    """
    own = torch.Generator().manual_seed(generator.initial_seed())

    def after(module: Any, args: Any, output: Any) -> None:
        logits = next((tensor for _, tensor in tensors_in(output)), None)

        def step(gradient: torch.Tensor) -> torch.Tensor | None:
            rows = gradient.flatten(0, -2)
            if not len(rows):
                return None
            row = int(torch.randint(len(rows), (), generator=own))
            largest = rows[row].abs().argmax(keepdim=True)
            is_rounded = (rows.bfloat16().float() == rows).all()
            factor = torch.where(is_rounded, 1 + epsilon(torch.bfloat16) / SAFETY, 1.0)
            changed = rows.clone()
            changed[row].index_copy_(0, largest, rows[row][largest] * factor)
            return changed.view_as(gradient)

        if logits is not None and logits.dtype == torch.float32 and logits.requires_grad:
            logits.register_hook(step)

    return module.register_forward_hook(after)


@contextmanager
def rounded_momentum(optimizer: Any, generator: torch.Generator) -> Iterator[None]:
    """Within this context optimizers that orthogonalise in bfloat16 get another rounding of it.

    As Muon does with ``--muon-fp32-matmul-prec medium``: by 1 ± epsilon of bfloat16.
    """
    coarse: list[Any] = [
        leaf.optimizer
        for leaf in leaves_of(optimizer)
        if getattr(getattr(leaf, "optimizer", None), "fp32_matmul_prec", "") == "medium"
    ]

    def rounding(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def orthogonalize(p: torch.Tensor, grad: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            ones = torch.ones_like(grad, dtype=torch.bfloat16)
            return original(p, grad * perturb(ones, generator), **kwargs)

        return orthogonalize

    with replaced((i, "orthogonalize", rounding(i.orthogonalize)) for i in coarse):
        yield


@contextmanager
def perturbed(
    chunks: Sequence[Names], seed: int, optimizer: Any = None, spread: Spread | None = None
) -> Iterator[None]:
    """Within this context the model's next step runs perturbed; parameters are *not* restored.

    ``seed`` is that of the random signs, or :data:`UNPERTURBED`. With an optimizer its arithmetic
    is perturbed as well.
    """
    if seed == UNPERTURBED:
        yield
        return
    generator = torch.Generator().manual_seed(seed)
    named = [pair for names in chunks for pair in names.parameters.items()]
    modules = [pair for names in chunks for pair in names.modules.items()]
    losses = {_language_model(name) for name, _ in modules if _is(name, _EMBEDDING)} | {ROOT}
    sources = [module for name, module in modules if _is(name, _EMBEDDING)] or _tables(modules)
    ends = losses if spread is None or spread.ends else set()

    def signs_of(name: str) -> torch.Generator:
        if spread is None:
            return generator
        return torch.Generator().manual_seed(seed << 32 | spread.parts[name])

    def outputs(weights: Sequence[torch.Tensor], _: Any, __: Any, output: Any) -> Any:
        if torch.is_tensor(output) and output.is_floating_point():
            dtypes = output.dtype, *(weight.dtype for weight in weights)
            ones = torch.ones_like(output, dtype=min(dtypes, key=lambda dtype: dtype.itemsize))
            with torch.no_grad():
                factor = perturb(ones, generator)
            return output * factor.to(output.dtype)
        return output

    def cast(module: Any, args: Any, output: Any) -> Any:
        first, *others = output if type(output) is tuple else (output,)
        if not (torch.is_tensor(first) and first.dtype in (torch.bfloat16, torch.float16)):
            return output
        changed = outputs((), module, args, first)
        return (changed, *others) if type(output) is tuple else changed

    with torch.no_grad():
        for name, parameter in named:
            if parameter.dtype == torch.float32:
                values = local(parameter.data)
                values.copy_(perturb(values, signs_of(name)))
    with ExitStack() as stack:
        for name, module in modules:
            is_source = module in sources or isinstance(module, torch.nn.Conv2d)
            if is_source or name in ends:
                # With float32 residuals the embedding's output is float32, and its layers are not.
                hook = functools.partial(outputs, list(module.parameters()) if is_source else ())
                stack.callback(module.register_forward_hook(hook).remove)
            if _is(name, _HEAD):
                stack.callback(split_head(module, generator, spread).remove)
                stack.callback(step_of_loss(module, generator).remove)
        if te.emulated():
            from megatron_ttrace.cpu.te import quantize

            stack.enter_context(quantize.other_scales(generator))
        if all(parameter.dtype == torch.float32 for _, parameter in named):
            stack.enter_context(rounded_momentum(optimizer, generator))
            for _, module in modules:
                if next(module.children(), None) is None:
                    stack.callback(module.register_forward_hook(cast).remove)
        yield
