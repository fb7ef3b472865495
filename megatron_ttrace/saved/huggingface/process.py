# SPDX-License-Identifier: Apache-2.0
"""Run a model of ``transformers`` on the weights, inputs and gradients of losses of a trace.

``python -m megatron_ttrace.saved.huggingface.process CONFIG REFERENCE OUT [by-layer]`` computes in
float32 what has a counterpart in ``REFERENCE`` (:mod:`.modules`), and writes it to ``OUT`` as a run
on one rank. ``by-layer``, the weights and activations of one layer are in memory at a time: each
layer's input and the gradient of its output are those of the trace.
It is a process of its own: ``transformers`` remembers which devices it saw first, and the emulation
of CUDA must not be among them. Nothing is read from the model hub, and no code that comes with a
model is run.
"""

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
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from megatron_ttrace.compare import tolerance
from megatron_ttrace.compare.configuration import RunConfig
from megatron_ttrace.compare.exercised import Requested
from megatron_ttrace.compare.tolerance import Tolerance
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import SINGLE
from megatron_ttrace.saved.huggingface import modules, weights
from megatron_ttrace.saved.huggingface.inputs import POSITIONS, Inputs
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
        self._model = model
        self._seen: dict[Source, torch.Tensor] = {}
        self._names = {module: name for name, module in model.named_modules()}
        names = {source.module for source in sources}
        for module, name in self._names.items():
            if name in names:
                hook = self._hook(name, Source(name, bare=True) in sources)
                module.register_forward_hook(hook, with_kwargs=True)

    def clear(self) -> None:
        """Forget a microbatch."""
        self._seen = {Source(name): buffer for name, buffer in self._model.named_buffers()}

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
        ranked, replayed_ranked = (s.detach().sort(dim=1).values for s in (values, instead))
        gap = (ranked - replayed_ranked).abs().amax(dim=1, keepdim=True)
        size = scores.detach()[scores.isfinite()].square().mean().sqrt()
        tie = gap <= 2 * self._limit.value * size
        return type(result)((torch.where(tie, instead, values), torch.where(tie, replayed, chosen)))


class _Model:
    """A model of ``transformers`` with a trace's weights, of which some layers are in memory."""

    def __init__(self, inputs: Inputs) -> None:
        """Build the model in float32. Raises ``TTraceError`` when the weights do not fit it."""
        import transformers
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        self._inputs, self._trace = inputs, inputs.trace
        self._parameters = inputs.parameters()
        self._correspondence = inputs.correspondence()
        weights.require_complete(inputs.family, inputs.config, self._parameters)
        # Before the model is built, which looks the name up.
        transformers.AttentionInterface.register(_NAME, self._attention)
        AttentionMaskInterface.register(_NAME, eager_mask)
        config = transformers.AutoConfig.for_model(**inputs.config)
        # Its row would get no gradient.
        config.pad_token_id = None
        with _without_memory():
            self._model = getattr(transformers, inputs.family.architecture)._from_config(
                config,
                dtype=torch.float32,
                attn_implementation=_NAME,
                experts_implementation="eager",
            )
        self._model.eval()
        rows = [row for key in self._trace if (row := self._correspondence.row(key))]
        self._taps = Taps(self._model, {source for row in rows for source in row.sources})
        self._loaded: Collection[int | None] = ()
        self._ends: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._microbatch = 0
        self._divide()

    def _attention(self, *args: Any, **kwargs: Any) -> Any:
        return self._taps.attention(*args, **kwargs)

    def _divide(self) -> None:
        """Make layers (by number) and what surrounds them (``None``) run apart from each other.

        Those that are not loaded return their input. What a loaded part reads from such a layer is
        the trace's, and so is the gradient of what it returns to such a layer.
        """
        layers = range(self._inputs.config["num_hidden_layers"])
        names = ["embedding", *(f"decoder.layers.{number}" for number in layers)]
        for name, after in zip(names, [*layers, None], strict=True):
            key = TraceKey(self._inputs.iteration, 0, Kind.OUTPUT, name)
            module = self._module(key)
            module.register_forward_hook(self._passing(key, modules.layer_of(name), after))
            module.forward = self._where_loaded(modules.layer_of(name), module.forward)
        head = self._model.get_output_embeddings()
        norm = self._module(dataclasses.replace(key, name="decoder.final_layernorm"))
        for module in (norm, head):
            module.forward = self._where_loaded(None, module.forward)

    def _module(self, key: TraceKey) -> torch.nn.Module:
        """The module whose output corresponds to a tensor."""
        row = self._correspondence.row(key)
        assert row is not None, f"{key} is in the table"
        module: torch.nn.Module = self._model.get_submodule(row.sources[0].module)
        return module

    def _where_loaded(self, number: int | None, forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(value: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(value, *args, **kwargs) if number in self._loaded else value

        return call

    def _passing(self, key: TraceKey, number: int | None, after: int | None) -> Callable[..., Any]:
        def hook(module: Any, args: Any, output: Any) -> Any:
            is_loaded, is_read = number in self._loaded, after in self._loaded
            now = dataclasses.replace(key, microbatch=self._microbatch)
            if is_loaded and not is_read:
                gradient = dataclasses.replace(now, kind=Kind.GRAD_OUTPUT)
                self._ends.append((output, self._states(gradient)))
            if is_loaded or not (is_read or number is None):
                return output  # of no layer in memory; masks have the dtype of the embedding's
            return self._states(now).requires_grad_()

        return hook

    def _states(self, key: TraceKey) -> torch.Tensor:
        """Hidden states of the trace, as [b, s, h]. Raises ``TTraceError`` if it has none."""
        return self._data(key).float().transpose(0, 1).contiguous()

    def _data(self, key: TraceKey) -> torch.Tensor:
        if key not in self._trace:
            raise TTraceError(f"{self._trace.directory} has no {key}: is it a GPT model's?")
        return self._trace.data(key)

    @contextlib.contextmanager
    def _in_memory(self, layers: Collection[int | None]) -> Iterator[None]:
        """Load the weights of some layers; ``None`` is what surrounds them."""
        inputs = self._inputs
        keys = {n: k for n, k in self._parameters.items() if modules.layer_of(n) in layers}
        state = weights.load_weights(inputs.family, inputs.config, inputs.tensors(keys))
        theirs = {
            n: v for n, v in self._model.state_dict().items() if modules.layer_of(n) in layers
        }
        for name in sorted(theirs.keys() ^ state.keys()):
            has, lacks = ("transformers'", "Megatron's")[:: 1 if name in theirs else -1]
            raise TTraceError(
                f"{inputs.path}: {has} model has {name}, {lacks} has no such parameter: the two "
                "are not of one architecture"
            )
        for name, value in state.items():
            if value.shape != theirs[name].shape:
                raise TTraceError(
                    f"{inputs.path}: {name} is {tuple(theirs[name].shape)}, in the trace "
                    f"{tuple(value.shape)}: give the config the sizes of the traced job"
                )
        self._loaded = layers
        self._model.load_state_dict(state, strict=False, assign=True)
        self._model.tie_weights()
        yield
        empty = {name: value.to("meta") for name, value in state.items()}
        self._model.load_state_dict(empty, strict=False, assign=True)
        self._taps.clear()

    def step(self, writer: TraceWriter, *, by_layer: bool) -> Requested:
        """Run all microbatches, and write what has a counterpart in the trace.

        Returns what the report should mention if these batches do not exercise it.

        Raises:
            TTraceError: when the trace has no plain samples, or other modules than the model.
        """
        keys: dict[int, list[TraceKey]] = defaultdict(list)
        for key in self._trace:
            if key.iteration == self._inputs.iteration:
                keys[key.microbatch].append(key)
        parts = [None, *range(self._inputs.config["num_hidden_layers"])]
        for layers in [[part] for part in parts] if by_layer else [parts]:
            with self._in_memory(layers):
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
            return self._data(TraceKey(self._inputs.iteration, number, kind, ROOT, index))

        tokens, positions, labels = (
            data(Kind.INPUT, index) for index in (_TOKENS, POSITIONS, _LABELS)
        )
        sizes = weights.Sizes.of(self._inputs.config, self._inputs.family.defaults)
        ours = modules.Sizes(tokens.shape[1], sizes.groups, sizes.experts)
        self._taps.clear()
        self._microbatch, self._ends = number, []
        for module in self._model.modules():
            # Without kernels, states are lost between chunks (transformers issue 47246).
            if hasattr(module, "chunk_size"):
                module.chunk_size = ours.tokens
        with self._replayed(keys, ours):
            logits = self._model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        if None in self._loaded:
            losses = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels.flatten(), reduction="none"
            ).view_as(labels)
            self._taps.keep(Source(modules.LOSS), losses)
            self._ends.append((losses, data(Kind.GRAD_OUTPUT, 0).to(losses.dtype)))
        outputs, gradients = zip(*self._ends, strict=True)
        torch.autograd.backward(outputs, gradients)
        return ours

    def _rows(self, keys: Sequence[TraceKey]) -> Iterator[tuple[TraceKey, Row]]:
        """Tensors of the layers in memory, and what they are made of."""
        for key in keys:
            # What is one tensor in Megatron has one counterpart.
            names = [key] if self._correspondence.is_apart(key) else [key, self._trace.primary(key)]
            row = next(filter(None, map(self._correspondence.row, names)), None)
            if row is not None and modules.layer_of(row.sources[0].module) in self._loaded:
                yield key, row

    @contextlib.contextmanager
    def _replayed(self, keys: Sequence[TraceKey], sizes: modules.Sizes) -> Iterator[None]:
        """Choose experts as in the trace where scores are equal but for rounding."""
        tolerances = tolerance.of_reference(self._trace)
        routers = []
        for key, row in self._rows(keys):
            if (key.kind, key.index) != (Kind.ROUTING, RoutingIndex.CHOICE):
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
        for key, row in self._rows(keys):
            data = self._taps.value(row, sizes, gradient=key.kind in _GRADIENTS)
            if modules.is_of_probabilities(key, self._trace.data(key)):
                data = data.softmax(dim=-1)
            _add(writer, key, data, self._trace.entry(key).dtype)

    def _main_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients of parameters as Megatron has them, scaled and summed over a step."""
        meta, step = self._trace.reference, self._inputs.iteration
        factor = 1 / meta.loss_scales.get(str(step), 1.0)
        if self._inputs.arguments.get("calculate_per_token_loss"):
            masks = (
                self._trace.data(key)
                for key in self._trace
                if (key.iteration, key.kind, key.name) == (step, Kind.TOKENS, "loss_mask")
            )
            factor /= sum(float(mask.sum()) for mask in masks)
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad * factor
            for name, value in self._model.state_dict(keep_vars=True).items()
            if modules.layer_of(name) in self._loaded
        }
        names = [name for name in self._parameters if modules.layer_of(name) in self._loaded]
        return weights.megatron_weights(self._inputs.family, self._inputs.config, gradients, names)


@contextlib.contextmanager
def _without_memory() -> Iterator[None]:
    """Models that are built now have no weights yet, but their buffers."""

    def empty(module: Any, name: str, value: torch.nn.Parameter | None) -> Any:
        return None if value is None or value.is_meta else torch.nn.Parameter(value.to("meta"))

    handle = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


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


def write(config: Path, reference: Path, directory: Path, *, by_layer: bool) -> None:
    """Run the model of a config, whole or layer by layer, and write its trace.

    Raises:
        TTraceError: when the model cannot be compared with the reference.
    """
    inputs = Inputs.read(config, TraceReader(reference))
    model = _Model(inputs)
    writer = TraceWriter(directory, 0)
    try:
        requested = model.step(writer, by_layer=by_layer)
    finally:
        writer.close()
    run = RunConfig(
        dtype="float32",
        layers=inputs.config["num_hidden_layers"],
        hidden=inputs.config["hidden_size"],
        iterations=(inputs.iteration,),
        logs=True,
        requested=requested,
    )
    seal(directory, CandidateMeta(complete=True, meshes=(SINGLE,), config=run.to_json()).to_json())


def main() -> int:
    """Returns the exit code. The last line of stderr is the reason of a failure."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    try:
        write(*map(Path, sys.argv[1:4]), by_layer="by-layer" in sys.argv[4:])
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
