# SPDX-License-Identifier: Apache-2.0
"""Records which elements go into reductions, norms, counts and updates, when Megatron makes them.

What goes in is read from the arguments that Megatron's own functions get, and followed to the
number that they return (flow.py). Nothing is derived from how Megatron should choose.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megatron_ttrace.capture.flow import Flow, Memory, Parts, Terms, group_ranks
from megatron_ttrace.capture.reducing import Reducing
from megatron_ttrace.mcore import statistics
from megatron_ttrace.mcore.names import raw
from megatron_ttrace.mcore.optimizer import owned_by
from megatron_ttrace.mcore.parameters import ParameterPlace
from megatron_ttrace.mcore.replaced import wrapped
from megatron_ttrace.mcore.sharded_weights import gathered_rows, local, parts_of
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.counted import Counted, Counting, Hyperparameters, Runs, Statistic

_GRADIENTS = ("main_grad", "grad", "decoupled_grad")
_IN_BUCKETS = ("main_grad", "main_grad_copy_in_grad_buffer")
"""A copy is reduced where the gradient itself has another dtype."""

Places = list[tuple[torch.nn.Parameter, ParameterPlace]]


class Tally:
    """Records one traced step of one rank."""

    def __init__(
        self,
        chunks: list[torch.nn.Module],
        places: Places,
        optimizer: Any,
        mesh: Mesh,
        attempt: Callable[[Callable[[], Any]], Any],
    ) -> None:
        """``places``: of the chunks' parameters.

        ``attempt`` runs work of ours; if that fails, Megatron's step goes on.
        """
        self._chunks = chunks
        named = dict(places)
        # A parameter that no forward pass reads has no place, and is in the optimizer all the same.
        unused = [
            (parameter, ParameterPlace(name, tuple(parameter.shape), ()))
            for chunk in chunks
            for name, parameter in chunk.named_parameters()
            if parameter not in named
        ]
        self._held = [*_copies(places)]
        self._places = [*self._held, *unused]
        self._optimizer = optimizer
        self._attempt = attempt
        self._parts = Parts(mesh)
        self._groups: list[tuple[Hyperparameters, Any, Any]] = []
        self._countings: list[tuple[Counting, float | torch.Tensor]] = []
        self._orders: dict[Statistic, Counter[Runs]] = {
            statistic: Counter() for statistic in Statistic
        }
        # Sums over the ranks that gather weights are not made by the buckets.
        gathers = any(map(gathered_rows, named))
        why = "weights in shards" if gathers else ""
        self._reducing = Reducing(chunks, self._gradients, attempt, why)
        self.reduction = self._reducing.active

    def counted(self, iteration: int) -> Counted:
        """Everything that was recorded."""
        sharded = parts_of(self._chunks)
        held = []
        for parameter, place in self._held:
            if parameter.requires_grad:
                numel = raw(parameter).numel()
                part = sharded.get(parameter)
                span = part.range if part else (0, numel)
                held.append(self._parts.number(place, *span, numel))
        countings = [
            dataclasses.replace(counting, value=float(value)) for counting, value in self._countings
        ]
        countings += filter(None, [self._attempt(self._reducing.counting)])
        groups = (
            dataclasses.replace(numbers, following=statistics.following(states, group))
            for numbers, group, states in self._groups
        )
        return Counted(
            iteration, tuple(self._parts.parts), tuple(held), tuple(countings), tuple(groups)
        )

    def _gradients(self) -> Memory:
        """Know where this rank's own gradients are."""
        memory = Memory(self._parts, of_rank=True)
        for parameter, place in self._held:
            numel = raw(parameter).numel()
            for name in _IN_BUCKETS:
                memory.add(getattr(parameter, name, None), place, (0, numel), numel)
        return memory

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Record the optimizer's step, which runs in this context."""
        calls: dict[str, statistics.Wrap] = {
            name: functools.partial(self._call, of) for name, of in statistics.WATCHED.items()
        }
        calls[statistics.CLIP] = self._clip
        wraps = [*statistics.users(calls)]
        for leaf, groups in statistics.leaves_and_groups(self._optimizer):
            inner = getattr(leaf, "optimizer", None)
            if inner is not None and not getattr(leaf, "is_stub_optimizer", False):
                wraps.append((inner, "step", functools.partial(self._step, leaf, groups, inner)))
        with wrapped(wraps):
            yield

    def params_norm(self, compute: Callable[..., Any], *args: Any) -> Any:
        """Record a call of the function that computes the norm of all parameters."""
        return self._call(Statistic.PARAMS_NORM, compute, *args)

    def _call(
        self, statistic: Statistic, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        flow = self._attempt(lambda: self._flow(statistic))
        if flow is None:
            return original(*args, **kwargs)
        with self._followed(flow, original), flow:
            value = original(*args, **kwargs)
        self._attempt(lambda: self._add(statistic, flow, flow.result(value)))
        return value

    @contextlib.contextmanager
    def _followed(self, flow: Flow, function: Callable[..., Any]) -> Iterator[None]:
        """Follow what PyTorch's dispatcher does not show: collectives, and fused kernels."""

        def reduce(
            all_reduce: Callable[..., Any],
            tensor: torch.Tensor,
            op: Any = dist.ReduceOp.SUM,
            group: Any = None,
            async_op: bool = False,
        ) -> Any:
            terms = self._attempt(lambda: flow.of(tensor))
            work = all_reduce(tensor, op, group, async_op)
            self._attempt(lambda: flow.set(tensor, terms))
            self._attempt(lambda: flow.reduced(tensor, group_ranks(group)))
            return work

        def apply(
            applier: Callable[..., Any], kernel: Any, buffer: Any, lists: Any, *more: Any
        ) -> Any:
            terms, reads = self._attempt(lambda: flow.of(lists)), len(flow.reads)
            out = applier(kernel, buffer, lists, *more)
            del flow.reads[reads:]
            self._attempt(lambda: flow.set(out, terms))
            return out

        # Another module may have wrapped the function.
        scope = statistics.Globals(getattr(inspect.unwrap(function), "__globals__", {}))
        with wrapped([(dist, "all_reduce", reduce), (scope, statistics.KERNELS, apply)]):
            yield

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple(map(statistics.whole, args))
        self._attempt(lambda: self._clipped(*args, **kwargs))
        return original(*args, **kwargs)

    def _clipped(
        self, parameters: Any, max_norm: float, total_norm: Any, *_: Any, **__: Any
    ) -> None:
        del max_norm
        flow = self._flow(Statistic.CLIPPED)
        gradients = [
            gradient
            for parameter in ([parameters] if torch.is_tensor(parameters) else parameters)
            for name in ("grad", "decoupled_grad")
            if (gradient := getattr(parameter, name, None)) is not None
        ]
        # On a GPU it is a tensor, which is read after the step.
        value = total_norm.clone() if torch.is_tensor(total_norm) else total_norm
        self._add(Statistic.CLIPPED, flow, flow.of(gradients), value)

    def _step(
        self,
        leaf: Any,
        groups: statistics.LayerWise | None,
        inner: Any,
        original: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        self._attempt(lambda: self._stepped(leaf, groups, inner))
        return original(*args, **kwargs)

    def _stepped(self, leaf: Any, groups: statistics.LayerWise | None, inner: Any) -> None:
        flow = self._flow(Statistic.STEPPED)
        gathered: dict[Any, Terms] = {group: Counter() for group in groups or ()}
        for group in inner.param_groups:
            over = statistics.gathered_over(leaf, groups, group)
            terms: Terms = Counter()
            for parameter in group["params"]:
                if any(getattr(parameter, name, None) is not None for name in _GRADIENTS[1:]):
                    terms.update(flow.of(parameter))
            gathered.setdefault(over, Counter()).update(terms)
            parts = flow.parts(group["params"])
            numbers = Hyperparameters(parts, statistics.hyperparameters(group))
            self._groups.append((numbers, group, getattr(inner, "state", {})))
        total = gathered.pop(None, Counter())
        sharded = parts_of(getattr(leaf, "model_chunks", ()))
        for over, terms in gathered.items():
            if sharded:
                total.update(terms)
            else:
                flow.made.append(flow.collective(group_ranks(over), terms))
                total[True, len(flow.made) - 1] = 1
        flow.unknown = flow.unknown or statistics.unknown_kind(self._optimizer)
        self._add(Statistic.STEPPED, flow, total)

    def _add(
        self, statistic: Statistic, flow: Flow, terms: Terms, value: float | torch.Tensor = 0.0
    ) -> None:
        parts, sums = flow.added(terms)
        made = tuple(flow.made)
        counting = Counting(statistic, made, parts, sums, unknown=flow.unknown)
        self._countings.append((counting, value))

    def _flow(self, statistic: Statistic) -> Flow:
        """Know what lies where just now: parameters or gradients."""
        memory = Memory(self._parts)
        of_parameters = statistic in (Statistic.PARAMS_NORM, Statistic.STEPPED)
        for parameter, place in self._places:
            whole = 0, raw(parameter).numel()
            for name in ("data",) if of_parameters else _GRADIENTS:
                memory.add(getattr(parameter, name, None), place, whole, whole[1])
        places, sharded = dict(self._places), parts_of(self._chunks)
        for parameter, owned in owned_by(self._optimizer).items():
            if parameter not in places:
                continue
            numel = raw(parameter).numel()
            span = owned.range or (0, numel)
            tensors: list[Any] = [owned.main]
            if not of_parameters:
                holders = owned.main, owned.key, parameter
                tensors = [getattr(holder, name, None) for holder in holders for name in _GRADIENTS]
            elif part := sharded.get(parameter):
                memory.add(part.weights, places[parameter], part.weights_range, numel)
            for tensor in filter(torch.is_tensor, tensors):
                memory.add(local(tensor), places[parameter], span, numel)
        return Flow(memory, self._orders[statistic])


def _copies(places: Places) -> Iterator[tuple[torch.nn.Parameter, ParameterPlace]]:
    """With a number for the copies of a parameter that later chunks of a rank have."""
    counts: Counter[str] = Counter()
    for parameter, place in places:
        counts[place.name] += 1
        copy = counts[place.name] - 1
        yield parameter, dataclasses.replace(place, name=f"{place.name}#{copy}") if copy else place
