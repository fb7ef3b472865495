# SPDX-License-Identifier: Apache-2.0
"""Run a model of ``transformers`` on the weights, inputs and gradients of losses of a trace.

``python -m megatron_ttrace.saved.huggingface.process CONFIG REFERENCE OUT`` computes in float32
what has a counterpart in ``REFERENCE`` (:mod:`.modules`), and writes it to ``OUT`` as a run on one
rank.
It is a process of its own: ``transformers`` remembers which devices it saw first, and the emulation
of CUDA must not be among them. Nothing is read from the model hub, and no code that comes with a
model is run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.saved.huggingface import modules, weights
from megatron_ttrace.saved.huggingface.given import POSITIONS, Given
from megatron_ttrace.saved.huggingface.modules import Row, Source
from megatron_ttrace.trace.errors import ExitCode, TTraceError, one_line
from megatron_ttrace.trace.meta import CandidateMeta
from megatron_ttrace.trace.records import ROOT, STEP_LEVEL, Kind, RoutingIndex, TraceKey
from megatron_ttrace.trace.store import Entry, TraceReader, TraceWriter, seal

_NAME = "ttrace"
"""Of the attention function that is registered."""
_GRADIENTS = (Kind.GRAD_OUTPUT, Kind.GRAD_INPUT)
_TOKENS, _LABELS = 0, 3
"""Inputs of Megatron's GPTModel."""


class Taps:
    """Hooks on the modules of a model that keep what goes in and comes out, with gradients."""

    def __init__(self, model: torch.nn.Module, sources: Collection[Source]) -> None:
        """Attach to the modules of these sources."""
        self._buffers = {Source(name): buffer for name, buffer in model.named_buffers()}
        self._seen: dict[Source, torch.Tensor] = {}
        self._names = {module: name for name, module in model.named_modules()}
        names = {source.module for source in sources}
        for module, name in self._names.items():
            if name in names:
                hook = self._hook(name, Source(name, bare=True) in sources)
                module.register_forward_hook(hook, with_kwargs=True)

    def clear(self) -> None:
        """Forget a microbatch."""
        self._seen = {**self._buffers}

    def keep(self, source: Source, value: Any) -> None:
        """Keep a tensor, and its gradient; other values are ignored."""
        if isinstance(value, torch.Tensor):
            if value.requires_grad:
                value.retain_grad()
            self._seen[source] = value

    def _hook(self, name: str, bare: bool) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            for index, value in enumerate(args or (kwargs.get("hidden_states"),)):
                self.keep(Source(name, True, index), value)
            if bare:
                product = torch.nn.functional.linear(args[0], module.weight)
                self.keep(Source(name, bare=True), product)
                return product if module.bias is None else product + module.bias
            for index, value in enumerate(output if isinstance(output, tuple) else (output,)):
                self.keep(Source(name, index=index), value)
            return output

        return hook

    def attention(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """What the model calls for attention: its own plain function."""
        name = f"{self._names[module]}.{modules.ATTENTION}"
        for index, value in enumerate(args[:3]):
            self.keep(Source(name, True, index), value)
        result = sys.modules[type(module).__module__].eager_attention_forward(
            module, *args, **kwargs
        )
        self.keep(Source(name), result[0])
        return result

    def value(self, row: Row, sizes: modules.Sizes, *, gradient: bool) -> torch.Tensor:
        """A tensor as Megatron has it. Raises ``TTraceError`` when the model has no such module."""
        parts = []
        for source in row.sources:
            if (kept := self._seen.get(source)) is None:
                raise TTraceError(
                    f"the model of transformers has no {source.module}, to which Megatron's "
                    f"{row.module} corresponds: the two are not of one architecture"
                )
            if gradient and kept.is_floating_point():
                kept = torch.zeros_like(kept) if kept.grad is None else kept.grad
            parts.append(kept.detach())
        return row.layout(parts, sizes)


class _Replayed(TorchFunctionMode):
    """Gives a router the trace's choice of experts where its own is better by rounding only.

    Two scores are a tie if each is within its tolerance (``limit``) of the other. Of routers that
    choose groups of experts first, these are the groups of the trace's choice.
    """

    def __init__(self, chosen: torch.Tensor, experts: int, limit: Tolerance) -> None:
        super().__init__()
        self._chosen, self._experts, self._limit = chosen, experts, limit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in (torch.topk, torch.Tensor.topk) or args[0].ndim != 2:
            return result
        scores, (values, chosen) = args[0], result
        replayed = self._chosen
        if (count := scores.shape[1]) != self._experts:
            groups = replayed // (self._experts // count)
            replayed = scores.scatter(1, groups, torch.inf).topk(values.shape[1]).indices
        if replayed.shape != chosen.shape:
            return result
        instead = scores.gather(1, replayed)
        ranked = (each.detach().sort(dim=1).values for each in (values, instead))
        gap = torch.sub(*ranked).abs().amax(dim=1, keepdim=True)
        size = scores.detach()[scores.isfinite()].square().mean().sqrt()
        tie = gap <= 2 * self._limit.value * size
        return type(result)((torch.where(tie, instead, values), torch.where(tie, replayed, chosen)))


class _Model:
    """A model of ``transformers`` with a trace's weights."""

    def __init__(self, given: Given) -> None:
        """Build the model in float32. Raises ``TTraceError`` when the weights do not fit it."""
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        self._given, self._trace = given, given.trace
        self._parameters = given.parameters()
        self._correspondence = given.correspondence()
        # Before the model is built, which looks the name up.
        transformers.AttentionInterface.register(_NAME, self._attention)
        AttentionMaskInterface.register(_NAME, eager_mask)
        config = transformers.AutoConfig.for_model(**given.config)
        # Its row would get no gradient.
        config.pad_token_id = None
        self._model = getattr(transformers, given.family.architecture)._from_config(
            config, dtype=torch.float32, attn_implementation=_NAME, experts_implementation="eager"
        )
        self._model.eval()
        self._load()
        rows = [row for key in self._trace if (row := self._correspondence.row(key))]
        self._taps = Taps(self._model, {source for row in rows for source in row.sources})

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        return self._taps.attention(*args, **kwargs)

    def _load(self) -> None:
        given = self._given
        state = weights.load_weights(given.family, given.config, given.tensors(self._parameters))
        theirs = self._model.state_dict()  # a tied head has its own name
        for name in sorted(theirs.keys() ^ state.keys()):
            has, lacks = ("transformers'", "Megatron's")[:: 1 if name in theirs else -1]
            raise TTraceError(
                f"{given.path}: {has} model has {name}, {lacks} has no such parameter: the two are "
                "not of one architecture"
            )
        with torch.no_grad():
            for name, value in state.items():
                if value.shape != theirs[name].shape:
                    raise TTraceError(
                        f"{given.path}: {name} is {tuple(theirs[name].shape)}, in the trace "
                        f"{tuple(value.shape)}: give the config the sizes of the traced job"
                    )
                theirs[name].copy_(value)

    def step(self, writer: TraceWriter) -> Requested:
        """Run all microbatches, and write what has a counterpart in the trace.

        Returns what the report should mention if these batches do not exercise it.

        Raises:
            TTraceError: when the trace has no plain samples, or other modules than the model.
        """
        keys: dict[int, list[TraceKey]] = defaultdict(list)
        for key in self._trace:
            if key.iteration == self._given.iteration:
                keys[key.microbatch].append(key)
        for number in sorted(keys.keys() - {STEP_LEVEL}):
            sizes = self._run(number, keys[number])
            self._write(writer, keys[number], sizes)
        gradients = self._main_gradients()
        for key in keys[STEP_LEVEL]:
            if key.kind is Kind.MAIN_GRAD and key.name in gradients:
                _add(writer, key, gradients[key.name], self._trace.entry(key).dtype)
        window = getattr(self._model.config, "sliding_window", None) or 0
        return Requested(window=max(window - 1, 0), seq_length=sizes.tokens)

    def _run(self, number: int, keys: Sequence[TraceKey]) -> modules.Sizes:
        """One microbatch, forward and backward."""

        def data(kind: Kind, index: int) -> torch.Tensor:
            key = TraceKey(self._given.iteration, number, kind, ROOT, index)
            if key not in self._trace:
                raise TTraceError(f"{self._trace.directory} has no {key}: is it a GPT model's?")
            return self._trace.data(key)

        tokens, positions, labels = (
            data(Kind.INPUT, index) for index in (_TOKENS, POSITIONS, _LABELS)
        )
        sizes = weights.Sizes.of(self._given.config, self._given.family.defaults)
        ours = modules.Sizes(tokens.shape[1], sizes.groups, sizes.experts)
        self._taps.clear()
        for module in self._model.modules():
            # Without kernels, states are lost between chunks (transformers issue 47246).
            if hasattr(module, "chunk_size"):
                module.chunk_size = ours.tokens
        with self._replayed(keys, ours):
            logits = self._model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), reduction="none"
        ).view_as(labels)
        self._taps.keep(Source(modules.LOSS), losses)
        losses.backward(data(Kind.GRAD_OUTPUT, 0).to(losses.dtype))
        return ours

    @contextlib.contextmanager
    def _replayed(self, keys: Sequence[TraceKey], sizes: modules.Sizes) -> Iterator[None]:
        """Choose experts as in the trace where scores are equal but for rounding."""
        tolerances = tolerance.of_reference(self._trace)
        routers = []
        for key in keys:
            row = self._correspondence.row(key)
            if row is None or (key.kind, key.index) != (Kind.ROUTING, RoutingIndex.CHOICE):
                continue
            chosen = modules.by_sample(self._trace.data(key), sizes)
            limit = tolerances.of(dataclasses.replace(key, index=RoutingIndex.SCORES))
            # A router may be a part of the module around its gate and experts.
            router = self._model.get_submodule(row.sources[0].module.rpartition(".")[0])
            replayed = _Replayed(chosen, sizes.experts, limit)
            router.forward = _under(replayed, router.forward)
            routers.append(router)
        try:
            yield
        finally:
            for router in routers:
                del router.forward

    def _write(self, writer: TraceWriter, keys: Sequence[TraceKey], sizes: modules.Sizes) -> None:
        for key in keys:
            # What is one tensor in Megatron has one counterpart.
            names = [key] if self._correspondence.is_apart(key) else [key, self._trace.primary(key)]
            row = next(filter(None, map(self._correspondence.row, names)), None)
            if row is not None:
                data = self._taps.value(row, sizes, gradient=key.kind in _GRADIENTS)
                if modules.is_of_probabilities(key, self._trace.data(key)):
                    data = data.softmax(dim=-1)
                _add(writer, key, data, self._trace.entry(key).dtype)

    def _main_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of parameters as Megatron has them, scaled and summed over a step."""
        meta, step = self._trace.reference, self._given.iteration
        factor = 1 / meta.loss_scales.get(str(step), 1.0)
        if self._given.arguments.get("calculate_per_token_loss"):
            masks = (
                self._trace.data(key)
                for key in self._trace
                if (key.iteration, key.kind, key.name) == (step, Kind.TOKENS, "loss_mask")
            )
            factor /= sum(float(mask.sum()) for mask in masks)
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad * factor
            for name, value in self._model.state_dict(keep_vars=True).items()
        }
        return weights.megatron_weights(
            self._given.family, self._given.config, gradients, self._parameters
        )


def _under(mode: TorchFunctionMode, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def _add(writer: TraceWriter, key: TraceKey, data: torch.Tensor, dtype: str) -> None:
    """Write a whole tensor, rounded to the dtype that the trace has it in."""
    data = data.to(getattr(torch, dtype)).contiguous()
    shape, origin = tuple(data.shape), (0,) * data.ndim
    boxes = (Box(origin, shape, origin),)
    writer.add(Entry.of(key, data, logical_shape=shape, boxes=boxes), data)


def write(config: Path, reference: Path, directory: Path) -> None:
    """Run the model of a config, and write its trace.

    Raises:
        TTraceError: when the model cannot be compared with the reference.
    """
    given = Given.read(config, TraceReader(reference))
    model = _Model(given)
    writer = TraceWriter(directory, 0)
    try:
        requested = model.step(writer)
    finally:
        writer.close()
    run = RunConfig(
        dtype="float32",
        layers=given.config["num_hidden_layers"],
        hidden=given.config["hidden_size"],
        iterations=(given.iteration,),
        logs=True,
        requested=requested,
    )
    seal(directory, CandidateMeta(complete=True, meshes=(SINGLE,), config=run.to_json()).to_json())


def main() -> int:
    """Returns the exit code. The last line of stderr is the reason of a failure."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    try:
        write(*map(Path, sys.argv[1:]))
    except TTraceError as error:
        print(error, file=sys.stderr)
    except Exception as error:  # noqa: BLE001 - transformers raises anything
        traceback.print_exc()
        print(f"transformers cannot run this model ({one_line(error)})", file=sys.stderr)
    else:
        return ExitCode.EQUIVALENT
    return ExitCode.COULD_NOT_CHECK


if __name__ == "__main__":
    sys.exit(main())
