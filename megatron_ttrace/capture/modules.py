# SPDX-License-Identifier: Apache-2.0
"""Hooks on every module: inputs, outputs, and their gradients.

Gradients are taken with hooks on the *graph*. ``register_full_backward_hook`` passes a module's
outputs through a view, which Megatron's cross entropy then modifies in place, and autograd raises.
A hook on the graph adds no node, so the run stays bitwise the same. ``grad_input`` is therefore the
gradient of the tensor that enters a module, summed over all its consumers (a residual branch
included), and ``grad_output`` that of the tensor that leaves it.

A tensor that is seen again under another name (one module's output is the next one's input) is
handed over once, unless its version counter shows that it was modified in between. Integer and
boolean inputs are taken of the model only: the attention mask of an inner module is optional in
some layouts, and what is computed with it is judged.

Under activation recomputation a module runs twice: in the forward pass (without a graph), and again
within the backward pass, which builds the graph. Values are taken from the first run, gradients
from the run that has them.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch

from megatron_ttrace.capture.balancing import BalancingTap, OwnRouterTap
from megatron_ttrace.capture.chunk_state import (
    ChunkState,
    OnGradient,
    Seen,
    is_recomputing,
    version_of,
)
from megatron_ttrace.capture.experts import (
    DispatchTap,
    ExpertSink,
    Followed,
    RouterTap,
    SelectionTap,
    can_follow,
    dsa_of,
)
from megatron_ttrace.capture.isolate import substitute
from megatron_ttrace.capture.schedule_plan import PlanTap, runs_in_pieces
from megatron_ttrace.mcore.names import Names, called_in, stage_flag
from megatron_ttrace.placement.plan import Known
from megatron_ttrace.trace.captured import Place
from megatron_ttrace.trace.errors import TTraceError
from megatron_ttrace.trace.findings import Remark
from megatron_ttrace.trace.records import ROOT, Kind

_Hook = Callable[..., Any]


class Sink(ExpertSink, Protocol):
    """Where captured tensors go. Called in the middle of training: it must be quick."""

    def tensor(self, places: Sequence[Place], data: torch.Tensor) -> None:
        """One tensor, under all the names it is known by now (at least one)."""

    def repeat(self, first: Place, place: Place, data: torch.Tensor) -> None:
        """``place`` is the same tensor that was handed over before as ``first``."""

    def again(
        self, place: Place, data: torch.Tensor, why: Remark, known: Known | None = None
    ) -> None:
        """What was handed over as ``place`` is used once more; ``why`` says how it may be wrong.

        ``known``: of a parameter.
        """

    def replace(self, place: Place, data: torch.Tensor) -> torch.Tensor | None:
        """Values to replace ``data`` with, after it was handed over; ``None`` to keep it."""


class ModuleTap:
    """Attached to the model chunks of a rank for one iteration."""

    def __init__(
        self,
        chunks: Sequence[Names],
        sink: Sink,
        microbatches: Sequence[int],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """``microbatches``: the global number of each of this rank's.

        ``on_error`` receives an error of ours, after which the tap captures nothing.
        """
        self._chunks = chunks
        self._sink = sink
        self._microbatches = microbatches
        self._on_error = on_error
        self._handles: list[Any] = []
        self._states: list[ChunkState] = []
        self._failed = False
        self.left_out = False
        """Whether the model also ran without gradients, which is no microbatch."""

    def __enter__(self) -> Self:
        try:
            for names in self._chunks:
                state = ChunkState()
                self._states.append(state)
                for name, module in names.modules.items():
                    self._attach(state, name, module, names)
                if runs_in_pieces(names.modules[ROOT]):
                    see = functools.partial(self._guard, self._see_all, state)
                    self._handles.append(PlanTap(names, state, see, self._guard))
        except BaseException:
            self.detach()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.detach()

    def microbatch(self, chunk: int) -> int | None:
        """The global number of that which a chunk works on; ``None`` if it works on none."""
        state = self._states[chunk]
        return None if state.aside else self._microbatches[state.current]

    def detach(self) -> None:
        """Remove all hooks; what could not be removed is tried again by another call.

        Raises:
            Exception: the first error, after all others were removed.
        """
        stuck: list[tuple[Any, Exception]] = []
        for handle in self._handles:
            try:
                handle.remove()
            except Exception as error:  # noqa: BLE001 - raised below
                stuck.append((handle, error))
        self._handles = [handle for handle, _ in stuck]
        if stuck:
            raise stuck[0][1]

    def _attach(self, state: ChunkState, name: str, module: torch.nn.Module, names: Names) -> None:
        def guarded(function: Callable[..., Any], *args: Any) -> Callable[..., Any]:
            return functools.partial(self._guard, function, state, *args)

        is_root, spans = name == ROOT, name in names.spans
        before, after = [], []
        if name in names.layers:
            before.append(lambda *_: state.running.append(name))
            left = module.register_forward_hook(lambda *_: state.leaves(name), always_call=True)
            self._handles.append(left)
        if type(module).__name__ in ("IdentityOp", "IdentityFuncOp"):
            after += [guarded(self._passes)] * bool(module._forward_hooks)
        else:
            self._follow_tokens(state, name, module)
            if is_root:
                before.append(guarded(self._root_begins, names))
                after.append(guarded(self._root_ends))
            if is_root or not spans:
                before.append(guarded(self._crosses, Kind.INPUT, name))
            ends_in_loss = is_root and stage_flag(module, "post_process")
            if ends_in_loss or not (spans or is_root):
                after.append(guarded(self._crosses, Kind.OUTPUT, name))
            if is_root:
                after.append(guarded(self._root_left))
        for hook in before:
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        for hook in after:
            self._handles.append(module.register_forward_hook(hook, with_kwargs=True))
        if is_root:
            self._handles.append(DirectCalls(module, before, after))

    def _follow_tokens(self, state: ChunkState, name: str, module: torch.nn.Module) -> None:
        """Follow tokens to experts, and the choice of experts or of keys in sparse attention."""

        def microbatch() -> int:
            return self._microbatches[state.current]

        def guard(hook: Callable[..., Any], *args: Any) -> Any:
            return None if state.aside else self._guard(hook, *args)

        run = functools.partial(state.run.get, name, 0)
        followed = Followed(name, microbatch, self._sink, guard, run)
        if can_follow(module):
            experts = dataclasses.replace(followed, name=f"{name}.experts")
            self._handles.append(DispatchTap(module, experts))
            router = getattr(module, "router", None)
            if isinstance(router, torch.nn.Module) and not hasattr(router, "router_replay"):
                name, run = f"{name}.router", functools.partial(state.run.get, f"{name}.router", 0)
                own = dataclasses.replace(followed, name=name, run=run)
                self._handles.append(OwnRouterTap(module, own))
        if hasattr(module, "router_replay"):
            self._handles.append(RouterTap(module, followed))
            self._handles.append(BalancingTap(module, followed))
        if dsa_of(module) is not None:
            self._handles.append(SelectionTap(module, followed))

    def _guard(self, hook: Callable[..., Any], *args: Any) -> Any:
        """Fail open: an error in a hook is reported once and never reaches the training run."""
        if self._failed:
            return None
        try:
            return hook(*args)
        except Exception as error:  # noqa: BLE001 - tracing never harms training
            self._failed = True
            self._on_error(error)
            return None

    def _root_begins(
        self, state: ChunkState, names: Names, module: torch.nn.Module, args: Any, kwargs: Any
    ) -> None:
        # A user's step may run the model more often than it trains it, for instance for the
        # probabilities that a policy had before the update.
        state.aside = not torch.is_grad_enabled() and not is_recomputing()
        if state.aside:
            self.left_out = True
            return
        if state.begins() >= len(self._microbatches):
            raise TTraceError(
                "the model ran forward more often than the step has microbatches "
                f"({len(self._microbatches)}): join the samples of a microbatch in one pass, and "
                "run passes that are not trained on under torch.no_grad()"
            )
        if not names.inputs:
            _, *parameters = inspect.signature(type(module).forward).parameters
            given = zip(parameters, args, strict=False)
            names.inputs.extend(
                name for name, value in (*given, *kwargs.items()) for _ in _leaves(value)
            )

    def _root_ends(
        self, state: ChunkState, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if state.aside:
            return
        local = state.forward

        def backward_begins(grad: torch.Tensor) -> None:
            state.goes_back(local)

        for _, tensor in tensors_in(output):
            if tensor.requires_grad:
                self._handles.append(on_gradient(tensor, backward_begins))

    def _root_left(self, state: ChunkState, *_: Any) -> None:
        state.aside = False

    def _passes(
        self, state: ChunkState, module: torch.nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        """What leaves an identity is what entered, also if another hook returned a view of it.

        Megatron-FSDP does where it gathers each module's parameters for itself. A gradient without
        the residual branch would be the view's.
        """
        if args and isinstance(output, torch.Tensor) and output is not args[0]:
            state.views[output] = state.views.get(args[0], args[0])

    def _crosses(self, state: ChunkState, kind: Kind, name: str, module: Any, *values: Any) -> Any:
        """``values``: arguments, and what is returned if that is what is seen."""
        return self._see_all(state, kind, name, values if kind is Kind.INPUT else values[-1])

    def _see_all(self, state: ChunkState, kind: Kind, name: str, value: Any) -> Any:
        """Hand over the tensors in ``value``; returns its replacement, if any.

        Of other inputs than the model's, whole numbers only where there is nothing else: an
        embedding's.
        """
        if state.aside:
            return None
        replaced: dict[int, torch.Tensor] = {}
        tensors = [*tensors_in(value)]
        if kind is Kind.INPUT and name != ROOT:
            tensors = [pair for pair in tensors if _is_number(pair[1])] or tensors
        for index, tensor in tensors:
            instead = self._see(state, kind, name, index, tensor)
            if instead is not None:
                replaced[index] = instead
        return with_tensors(value, replaced) if replaced else None

    def _see(
        self, state: ChunkState, kind: Kind, name: str, index: int, tensor: torch.Tensor
    ) -> torch.Tensor | None:
        """Hand over a tensor; returns its replacement, if any."""
        recomputing, tensor = is_recomputing(), state.views.get(tensor, tensor)
        module, name = name, called_in(state.layer, name)
        place: Place = (self._microbatches[state.current], kind, name, index)
        seen = state.seen_again if recomputing else state.seen
        runs: list[Place] = []
        run: int | None = None
        if not recomputing or torch.is_grad_enabled():
            # A module that runs twice in one microbatch: later runs get names of their own, also
            # where they are recomputed. A pass without gradients may be before the one with them.
            taken = state.again if recomputing else state.emitted
            runs = state.recomputed(place) if recomputing else []
            names = itertools.chain(runs, _numbered(place))
            named = next(name for name in names if name not in taken)
            if not recomputing:
                state.ran(place, named)
            if not recomputing or named in runs:
                run = 0 if named == place else int(named[2].rpartition("#")[2])
            taken.add(place := named)
        state.run[module] = run
        known: Seen | None = seen.get(tensor)
        if known is not None and known.version != version_of(tensor):
            known = None
        data = _real(tensor)
        if not recomputing:
            if known is not None:
                self._sink.repeat(known.places[0], place, data)
            else:
                self._sink.tensor((place,), data)
        elif place in runs and torch.is_grad_enabled():
            self._sink.again(place, data, Remark.RECOMPUTED)
        if known is not None and known.node is tensor.grad_fn:
            known.places.append(place)
        else:
            # New, or its node is: a checkpointed block's output gets the node that counts only
            # after the hooks inside the block have seen it.
            known = Seen(version_of(tensor), [place], tensor.grad_fn)
            seen[tensor] = known
            # What enters a recomputed block has consumers outside of it, too: its gradient is that
            # of the tensor of the first pass, not of the copy that the block is recomputed from.
            # The copy is a leaf; Megatron adds biases with gradients even in the first pass, which
            # runs without.
            again = recomputing and tensor.is_leaf and place in state.followed
            if tensor.requires_grad and not again:
                hook = functools.partial(self._guard, self._gradient, state, known)
                if tensor in state.entering:
                    state.entering[tensor].append(hook)
                else:
                    self._handles.append(on_gradient(tensor, hook))
        if tensor.requires_grad and not recomputing:
            state.followed.add(place)
        values = self._sink.replace(place, data)
        if values is None:
            return None
        instead = substitute(tensor, values if data is tensor else torch.view_as_complex(values))
        # The same tensor to everyone who sees it from here on: its gradient ends in the old one's.
        seen[instead] = Seen(version_of(instead), known.places, instead.grad_fn)
        return instead

    def _gradient(self, state: ChunkState, seen: Seen, grad: torch.Tensor) -> torch.Tensor | None:
        known = [
            (microbatch, Kind.GRAD_INPUT if kind is Kind.INPUT else Kind.GRAD_OUTPUT, name, index)
            for microbatch, kind, name, index in seen.places
        ]
        places = [place for place in known if place not in state.emitted]
        state.emitted.update(places)
        data = _real(grad)
        if places:
            self._sink.tensor(places, data)
        values = self._sink.replace(known[0], data)
        return values if values is None or data is grad else torch.view_as_complex(values)


def on_gradient(tensor: torch.Tensor, hook: OnGradient) -> Any:
    """Call ``hook`` with the gradient of ``tensor``, once it is complete; returns a handle.

    What the hook returns, if anything, goes on as the gradient.

    The hook goes on the graph node. ``Tensor.register_hook`` remembers the node of the first call
    for good, and a tensor that leaves a checkpointed block changes its node.
    """
    if tensor.grad_fn is None:
        return tensor.register_hook(hook)
    output = tensor.output_nr

    def before_node(gradients: tuple[torch.Tensor | None, ...]) -> Any:
        gradient = gradients[output]
        instead = None if gradient is None else hook(gradient)
        if instead is None:
            return None
        return (*gradients[:output], instead, *gradients[output + 1 :])

    return tensor.grad_fn.register_prehook(before_node)


def _numbered(place: Place) -> Iterator[Place]:
    """The names of a module's runs."""
    microbatch, kind, name, index = place
    for call in itertools.count():
        yield microbatch, kind, f"{name}#{call}" if call else name, index


def tensors_in(value: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Activation tensors in nested arguments with a position that other layouts agree on.

    Positions count every slot, ``None`` included, so that an optional argument that is absent in
    one layout does not shift the others. Parameters (a tied head's weight) are judged elsewhere,
    nested tensors, and those within ``torch.func.vmap``, as what a module makes of them: they have
    no shape that could be divided. What a
    fork's dataclass holds comes after all else, and of that no whole numbers: those are bounds of
    packed sequences, masks and the like.
    """
    leaves = [*_leaves(value)]
    held = [
        part if _is_number(part) else None for leaf in leaves for part in _leaves(_fields(leaf))
    ]
    for position, leaf in enumerate((*leaves, *held)):
        is_tensor = isinstance(leaf, torch.Tensor) and not (leaf.is_nested or is_mapped(leaf))
        if is_tensor and not isinstance(leaf, torch.nn.Parameter):
            yield position, leaf


is_mapped = torch._C._functorch.is_functorch_wrapped_tensor


def _fields(leaf: Any) -> list[Any]:
    """What a dataclass holds; nothing of anything else."""
    is_record = dataclasses.is_dataclass(leaf) and not isinstance(leaf, type)
    fields = dataclasses.fields(leaf) if is_record else ()
    return [getattr(leaf, field.name, None) for field in fields]


def _is_number(value: Any) -> bool:
    """Whether it is a tensor of floating or complex numbers."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as it is handed over: of complex numbers real and imaginary parts, in a last dim."""
    return torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor


def _leaves(value: Any) -> Iterator[Any]:
    # Unlike in torch's pytree, an instance of a subclass of dict or list is no leaf.
    if isinstance(value, tuple | list):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _leaves(item)
    else:
        yield value


def with_tensors(value: Any, replaced: Mapping[int, torch.Tensor]) -> Any:
    """``value`` with the leaves at the given positions exchanged."""
    position = -1

    def rebuild(item: Any) -> Any:
        nonlocal position
        if isinstance(item, tuple | list):
            parts = [rebuild(part) for part in item]
            return type(item)(*parts) if hasattr(item, "_fields") else type(item)(parts)
        if isinstance(item, Mapping):
            own: Any = copy.copy(item)
            for name, part in item.items():
                own[name] = rebuild(part)
            return own
        position += 1
        return replaced.get(position, item)

    return rebuild(value)


class DirectCalls:
    """Calls hooks in direct calls of a module's ``forward``, which skip ``torch``'s hooks.

    ``MegatronFSDP.forward`` calls the whole model so before 0.19
    (megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py). The module's other hooks
    are skipped then as they are without us.
    """

    def __init__(
        self, module: torch.nn.Module, before: Sequence[_Hook], after: Sequence[_Hook]
    ) -> None:
        """Put a function in the place of ``module.forward``; hooks take keywords."""
        self._module = module
        self._before, self._after = before, after
        self._forward = module.forward
        self._own = vars(module).get("forward")
        self._has_hooks = False
        self._handle = module.register_forward_pre_hook(self._called)
        module.forward = self._run

    def remove(self) -> None:
        """Put everything back; a second call does nothing."""
        self._handle.remove()
        if vars(self._module).get("forward") == self._run:
            del self._module.forward
            if self._own is not None:
                self._module.forward = self._own

    def _called(self, *_: Any) -> None:
        self._has_hooks = True

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        has_hooks, self._has_hooks = self._has_hooks, False
        if has_hooks:
            return self._forward(*args, **kwargs)
        for hook in self._before:
            args, kwargs = hook(self._module, args, kwargs) or (args, kwargs)
        output = self._forward(*args, **kwargs)
        for hook in self._after:
            instead = hook(self._module, args, kwargs, output)
            output = output if instead is None else instead
        return output
