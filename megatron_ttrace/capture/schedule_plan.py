# SPDX-License-Identifier: Apache-2.0
"""Layers that run in pieces: Megatron's ``--overlap-moe-expert-parallel-comm``.

The combined schedule (megatron/core/pipeline_parallel/combined_1f1b.py) does not call the model. It
asks for a *plan* of each microbatch (``build_schedule_plan``), whose nodes run the pieces of every
layer (attention to router, dispatch, experts, combine), the forward pass of one microbatch between
the pieces of another's backward pass. Three things are different from a model that is called:

- *Which microbatch*: a plan's nodes are those of its microbatch, so each node says which one it is
  about to work on.
- *Modules that are never called*: the model, its layers, layers of experts, and the layers of
  multi-token prediction. What would have entered and left them is taken where the pieces have it.
  All modules within them are called, so their own hooks see them.
- *Gradients*: each node detaches its inputs and runs a backward pass of its own. A pass may
  contribute to the input of an earlier node, so the gradient of a node's input is complete when
  that node has finished, and is taken then.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from megatron_ttrace.capture.chunk_state import ChunkState
from megatron_ttrace.mcore import fronts
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.replaced import wrapped
from megatron_ttrace.trace.records import ROOT, Kind

_PIECES = (
    *("pre_dispatch_computation", "attn"),  # megatron-core 0.19, and before
    *("moe_dispatch", "mlp", "moe_combine", "mtp_post_process"),
)
"""Attributes of a layer's plan, in the order in which they run forward."""

LAYER_INPUTS = (
    *("hidden_states", "attention_mask", "context", "context_mask"),
    *("rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
)
"""Order of the arguments with which a block calls its layers."""

MTP_INPUTS = (
    *("input_ids", "position_ids", "hidden_states", "attention_mask", "padding_mask"),
    *("inference_params", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin"),
)
"""Order of the arguments with which a block of multi-token prediction calls its layers; those that
a release does not know do not count."""

_See = Callable[[Kind, str, Any], Any]
"""Hand over the tensors in a module's arguments or result; returns their replacement, if any."""


def runs_in_pieces(model: torch.nn.Module) -> bool:
    """Whether Megatron runs this (unwrapped) model by a plan."""
    return bool(
        getattr(getattr(model, "config", None), "overlap_moe_expert_parallel_comm", False)
        and hasattr(model, "build_schedule_plan")
    )


class PlanTap:
    """On one model chunk that is run by plans."""

    def __init__(
        self, names: Names, state: ChunkState, see: _See, guard: Callable[..., Any]
    ) -> None:
        """``state``: of the hooks on the chunk's modules.

        ``see`` takes what enters and leaves a module that is not called, ``guard`` calls a function
        so that its errors do not reach training.
        """
        self._model: Any = names.modules[ROOT]
        self._names = {id(module): name for name, module in names.modules.items()}
        self._state = state
        self._see = see
        self._guard = guard
        self._plan: Any = None
        self._ending: str | None = None
        self._undo = ExitStack()
        try:
            self._around(self._model, "build_schedule_plan", self._build)
            for name, module in names.modules.items():
                self._attach(name, module)
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        """Detach: the methods of Megatron's modules are what they were before."""
        self._undo.close()

    def _around(self, owner: Any, method: str, wrap: Callable[..., Any], *args: Any) -> None:
        """Have ``owner``'s method called by ``wrap``, which gets it after ``args``."""
        around = functools.partial(wrap, *args)
        self._undo.enter_context(wrapped([(owner, method, around)]))

    def _attach(self, name: str, module: Any) -> None:
        if hasattr(module, "token_dispatcher"):
            self._around(module, "route", self._route, name)
            self._around(module, "postprocess", self._postprocess, name)
        elif hasattr(module, "_forward_attention"):
            self._around(module, "_forward_attention", self._attention, name)
        elif hasattr(module, "_concat_embeddings"):
            self._around(module, "_postprocess", self._end_of_prediction, name)
        elif name == "decoder.final_layernorm":
            # The last layer's piece applies it. Before its own hooks, which may replace its input.
            handle = module.register_forward_pre_hook(
                self._before_final_norm, with_kwargs=True, prepend=True
            )
            self._undo.callback(handle.remove)

    def _build(self, build: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        number = self._state.begins()
        # A reference runs without a plan, and has none of them.
        names = [name for name in fronts.current().only_in_plans if name in kwargs]
        rest = {name: kwargs.pop(name) for name in names}
        args, kwargs = self._see(Kind.INPUT, ROOT, (args, kwargs)) or (args, kwargs)
        plan = build(*args, **kwargs, **rest)
        self._guard(self._follow_plan, plan, number)
        return plan

    def _follow_plan(self, plan: Any, number: int) -> None:
        self._follow(plan.pre_process, number, plan.state)
        for layer in map(plan.get_layer, range(plan.num_layers())):
            self._follow_layer(layer, number, plan.state)
        if plan.post_process is not None:
            ends = functools.partial(self._leaves, ROOT)
            self._follow(plan.post_process, number, plan.state, after=ends)

    def _follow_layer(self, plan: Any, number: int, chunk: Any) -> None:
        pieces = [getattr(plan, piece, None) for piece in _PIECES]
        # The others have nothing to do in this layer (``NoopScheduleNode``).
        pieces = [piece for piece in pieces if hasattr(piece, "forward_func")]
        inner, predicts = plan.layer, hasattr(plan.layer, "_concat_embeddings")
        before = after = None
        if predicts:
            inner = next(
                child for child in inner.children() if hasattr(child, "_forward_attention")
            )
            before = functools.partial(self._start_of_prediction, plan.layer)
        name, layer = self._names[id(inner)], self._names[id(plan.layer)]
        last = pieces[-2 if predicts else -1]
        for piece in pieces:
            starts = functools.partial(self._starts, name) if piece is last else before
            after = functools.partial(self._end_of_layer, name) if piece is last else None
            self._follow(piece, number, chunk, starts, after, layer)
            before = None

    def _follow(
        self,
        node: Any,
        number: int,
        chunk: Any,
        before: Callable[[Any], Any] | None = None,
        after: Callable[[Any], Any] | None = None,
        layer: str = ROOT,
    ) -> None:
        """Follow what a node does, for which microbatch, and the gradients of its inputs.

        ``layer``: the one that the node is a piece of.
        """
        forward, backward = node.forward_func, node.backward_func
        entered: list[torch.Tensor] = []

        def run(*inputs: Any) -> Any:
            self._state.forward, self._state.running = number, [layer]
            self._plan = chunk
            for entering in inputs:
                if isinstance(entering, torch.Tensor) and entering.requires_grad:
                    self._state.entering[entering] = []
                    entered.append(entering)
            inputs = inputs if before is None else before(inputs)
            output = forward(*inputs)
            self._state.running = []
            return output if after is None else after(output)

        def go_back(*args: Any) -> Any:
            self._state.goes_back(number)
            result = backward(*args)
            while entered:
                self._complete(entered.pop())
            return result

        node.forward_func, node.backward_func = run, go_back

    def _complete(self, leaf: torch.Tensor) -> None:
        for hook in self._state.entering.pop(leaf):
            if leaf.grad is not None and (instead := hook(leaf.grad)) is not None:
                leaf.grad = instead

    def _starts(self, name: str, inputs: Any) -> Any:
        self._ending = name
        return inputs

    def _before_final_norm(self, _: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        name, self._ending = self._ending, None
        self._state.running = []
        return None if name is None else self._see(Kind.OUTPUT, name, (args, kwargs))

    def _end_of_layer(self, name: str, output: Any) -> Any:
        if self._ending is None:
            return output
        self._ending = None
        return self._leaves(name, output)

    def _leaves(self, name: str, output: Any) -> Any:
        """Hand over what leaves a module; returns what goes on."""
        instead = self._see(Kind.OUTPUT, name, output)
        return output if instead is None else instead

    def _attention(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        kwargs |= self._enters(name, LAYER_INPUTS, kwargs)
        return forward(*args, **kwargs)

    def _start_of_prediction(self, layer: Any, inputs: Any) -> Any:
        known = inspect.signature(layer.forward).parameters
        order = tuple(name for name in MTP_INPUTS if name in known)
        values = {**vars(self._plan), "hidden_states": inputs[0]}
        return (self._enters(self._names[id(layer)], order, values)["hidden_states"],)

    def _enters(
        self, name: str, order: tuple[str, ...], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Hand over what a module would have been called with, in ``order``; as it goes on."""
        given = {argument: values.get(argument) for argument in order}
        given = self._see(Kind.INPUT, name, given) or given
        return {argument: value for argument, value in given.items() if argument in values}

    def _end_of_prediction(self, name: str, postprocess: Callable[..., Any], *args: Any) -> Any:
        output = postprocess(*args)
        ids = (getattr(self._plan, rest, None) for rest in ("input_ids", "position_ids"))
        padding = getattr(self._plan, "padding_mask", None)
        return self._leaves(name, (output, *ids, padding))[0]

    def _route(
        self, name: str, route: Callable[..., Any], hidden: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        self._see(Kind.INPUT, name, hidden)
        return route(hidden, *args, **kwargs)

    def _postprocess(self, name: str, postprocess: Callable[..., Any], *args: Any) -> Any:
        return self._leaves(name, postprocess(*args))
