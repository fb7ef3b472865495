# SPDX-License-Identifier: Apache-2.0
"""The ledger of collectives of a traced step, and the code that ran in it.

All of Python's collectives end in methods of PyTorch's ``ProcessGroup``, whichever function of
``torch.distributed`` was called and under whichever name it was imported. These methods are
replaced while a traced step runs. The replacement notes the arguments and calls the original with
exactly these: no tensor is read, nothing is synchronised. Functional collectives do not pass these
methods, and are taken at ``torch.distributed._functional_collectives``.

A collective of the forward pass belongs to the module that runs on its thread. In the backward
pass, autograd knows the graph node that it runs, and the number that this node got when the forward
pass made it; modules noted these numbers when they began and ended. On a GPU, autograd runs on a
thread of its own, with its own numbers for what is recomputed there.
"""

import bisect
import collections
import dataclasses
import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from megatron_ttrace.capture.chunk_state import is_recomputing, receive
from megatron_ttrace.capture.modules import tensors_in
from megatron_ttrace.capture.waiting import outwards
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.groups import group_name
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.replaced import replaced, wrapped
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.collectives import (
    Call,
    Group,
    ModuleCode,
    Operation,
    Phase,
    RankLedger,
    Size,
    pattern,
)
from megatron_ttrace.trace.counted import runs_of
from megatron_ttrace.trace.errors import one_line
from megatron_ttrace.trace.records import ROOT
from megatron_ttrace.trace.views import every_tensor

_NODES = 200
"""Graph nodes of a module that are looked at for autograd functions."""


class _Method(NamedTuple):
    """A method of ``ProcessGroup``: positions of the tensors that are its input.

    ``agreed``: position of the tensors whose size is the same on all ranks; ``None`` if no size is.
    ``peer``: position of the other rank of a message.
    """

    operation: Operation
    input: int
    agreed: int | None
    peer: int | None = None


_METHODS = {
    name: method
    for method, *names in (
        (_Method(Operation.ALL_REDUCE, 0, 0), "allreduce", "allreduce_coalesced"),
        (_Method(Operation.REDUCE, 0, 0), "reduce"),
        (_Method(Operation.BROADCAST, 0, 0), "broadcast"),
        # Lists may have parts of unequal size: their sum is what all ranks have in common.
        (_Method(Operation.ALL_GATHER, 1, 0), "allgather", "allgather_coalesced"),
        (_Method(Operation.ALL_GATHER, 1, 1), "_allgather_base", "all_gather_single"),
        (_Method(Operation.ALL_GATHER, 1, 1), "allgather_into_tensor_coalesced"),
        (_Method(Operation.ALL_GATHER, 1, 1), "all_gather_single_coalesced"),
        (_Method(Operation.REDUCE_SCATTER, 1, 1), "reduce_scatter", "_reduce_scatter_base"),
        (_Method(Operation.REDUCE_SCATTER, 1, 1), "reduce_scatter_single"),
        (_Method(Operation.REDUCE_SCATTER, 1, 1), "reduce_scatter_tensor_coalesced"),
        (_Method(Operation.REDUCE_SCATTER, 1, 1), "reduce_scatter_single_coalesced"),
        (_Method(Operation.GATHER, 1, 1), "gather", "gather_single"),
        (_Method(Operation.SCATTER, 0, 0), "scatter"),
        (_Method(Operation.ALL_TO_ALL, 1, None), "alltoall", "alltoall_base"),
        (_Method(Operation.ALL_TO_ALL, 1, None), "all_to_all_single"),
        (_Method(Operation.SEND, 0, None, 1), "send"),
        (_Method(Operation.RECV, 0, None, 1), "recv"),
        (_Method(Operation.RECV, 0, None), "recv_anysource"),
    )
    for name in names
}
"""Those of any release of PyTorch; barriers move no data."""

_FUNCOL = "torch.distributed._functional_collectives"
"""It is not imported for this: then nobody calls it."""

_FUNCTIONAL = {
    "all_reduce": Operation.ALL_REDUCE,
    "all_reduce_coalesced": Operation.ALL_REDUCE,
    "all_gather_tensor": Operation.ALL_GATHER,
    "all_gather_into_tensor_coalesced": Operation.ALL_GATHER,
    "reduce_scatter_tensor": Operation.REDUCE_SCATTER,
    "reduce_scatter_tensor_coalesced": Operation.REDUCE_SCATTER,
    "all_to_all_single": Operation.ALL_TO_ALL,
    "broadcast": Operation.BROADCAST,
}


type _Sort = tuple[str, type[torch.nn.Module]]
"""Pattern and class: what modules of all layers have in common that run the same code."""


class _Place(NamedTuple):
    """Where a collective ran: in a module, a part of the step, and the code that called it."""

    module: str
    phase: Phase
    code: CodeType | None
    line: int


class _Run:
    """What a thread runs: modules from the outermost, and when which of them was innermost."""

    def __init__(self) -> None:
        self.stack: list[str] = []
        self.numbers: list[int] = []
        self.names: list[str] = []

    def changed(self) -> None:
        """From the next graph node on, the innermost module is another one."""
        self.numbers.append(torch._C._autograd._get_sequence_nr())
        self.names.append(self.stack[-1] if self.stack else "")

    def made(self, number: int) -> str:
        """The module that made a graph node."""
        position = bisect.bisect_right(self.numbers, number) - 1
        return self.names[position] if position >= 0 else ""


class CollectiveTap:
    """Records the collectives of the steps that run in :meth:`active`, on one rank."""

    def __init__(
        self, chunks: Sequence[Names], mesh: Mesh, entered: Callable[[], None] = lambda: None
    ) -> None:
        """``entered`` is called when a sort of module runs forward for the first time."""
        self._mesh = mesh
        self._sorts: set[str] = set()
        self._entered = entered
        named = [(name, module) for names in chunks for name, module in names.modules.items()]
        self._modules = {module: name for name, module in named}
        self._sort = {name: (pattern(name), type(module)) for name, module in named}
        self._groups: dict[Any, Group | None] = {}
        self._numbers: dict[Group, int] = {}
        self._codes: list[CodeType | None] = []
        self._calls: dict[tuple[object, ...], tuple[Call, collections.Counter[int]]] = {}
        self._order: dict[str, Any] = {}
        self._functions: dict[_Sort, ModuleCode] = {}
        self._users: dict[str, str] = {}
        self._main = _Run()
        self._runs = {threading.get_ident(): self._main}
        self._iteration = 0
        self.error = ""

    def functions(self, module: str) -> ModuleCode:
        """The code that ran in the first module of a sort and after it, but its class's."""
        sort = self._sort.get(module, ("", torch.nn.Module))
        seen = self._functions.get(sort, ModuleCode())
        return dataclasses.replace(seen, user=self._users.get(sort[0], ""))

    def around(self) -> tuple[str, Phase | None]:
        """The module that runs now on this thread, cheaply; ``None`` outside of modules."""
        run = self._runs.get(threading.get_ident()) or self._run
        # The calls of this are counted in thousands: is_recomputing is one more for each.
        recomputes = torch._C._current_graph_task_id() != -1
        if run.stack:
            return run.stack[-1], Phase.RECOMPUTATION if recomputes else Phase.FORWARD
        if not recomputes or (node := torch._C._current_autograd_node()) is None:
            return "", None
        module = (run if run is self._main else self._main).made(node._sequence_nr())
        return (module, Phase.BACKWARD) if module else ("", None)

    def here(self) -> tuple[str, Phase]:
        """The module that runs now on this thread, and the part of the step."""
        place = self._place(Operation.ALL_REDUCE)
        return place.module, place.phase

    def ledger(self) -> RankLedger:
        """What was recorded, without the code of modules."""
        order = {name: digest.hexdigest() for name, digest in self._order.items()}
        return RankLedger(
            tuple(call for call, _ in self._calls.values()),
            tuple(tuple(map(Size._make, sizes.items())) for _, sizes in self._calls.values()),
            tuple(
                dataclasses.replace(group, order=order.get(group.communicator, ""))
                for group in self._numbers
            ),
            error=self.error,
        )

    @contextmanager
    def active(self, iteration: int) -> Iterator[None]:
        """Record what runs in this context. Everything is put back at its end."""
        self._iteration = iteration
        with ExitStack() as kept:
            try:
                self._attach(kept)
            except Exception as error:  # noqa: BLE001 - recording never harms training
                self.error = one_line(error)
                kept.close()
            yield

    def _attach(self, kept: ExitStack) -> None:
        # Another PyTorch may lack one of these; then it is missed here, and not in the step.
        torch._C._autograd._get_sequence_nr()
        torch._C._current_autograd_node()
        kept.callback(register_module_forward_pre_hook(self._begins).remove)
        kept.callback(register_module_forward_hook(self._ends, always_call=True).remove)
        methods = [(name, vars(dist.ProcessGroup).get(name)) for name in _METHODS]
        kept.enter_context(
            replaced((dist.ProcessGroup, name, self._method(name, m)) for name, m in methods if m)
        )
        functional = sys.modules.get(_FUNCOL)
        kept.enter_context(
            wrapped(
                (functional, name, functools.partial(self._functional, operation))
                for name, operation in _FUNCTIONAL.items()
            )
        )

    def _guard(self, work: Callable[..., None], *args: Any) -> None:
        """An error of ours never reaches the training run; nothing is recorded after it."""
        if self.error:
            return
        try:
            work(*args)
        except Exception as error:  # noqa: BLE001 - recording never harms training
            self.error = one_line(error)

    @property
    def _run(self) -> _Run:
        thread = threading.get_ident()
        # Asked for at each call of a function: a new one is made only if it is needed.
        return self._runs.get(thread) or self._runs.setdefault(thread, _Run())

    # Modules

    def _begins(self, module: torch.nn.Module, args: Any) -> None:
        name = self._modules.get(module)
        if name is not None:
            run = self._run
            sort, _ = self._sort[name]
            if sort not in self._sorts:
                self._sorts.add(sort)
                self._guard(self._entered)
            if not run.stack and sort not in self._users:
                self._guard(self._find_caller, sort)
            run.stack.append(name)
            run.changed()

    def _ends(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        name, run = self._modules.get(module), self._run
        if name is None or not run.stack:
            return
        run.stack.pop()
        run.changed()
        if self._sort[name] not in self._functions:
            self._guard(self._find_functions, name, output)

    def _find_caller(self, sort: str) -> None:
        """What calls the model: the schedule, which also scales its loss."""
        for frame in outwards(sys._getframe(1)):
            if sources.is_schedule(frame.f_code.co_filename):
                self._users[sort] = sources.shown(frame.f_code, frame.f_lineno)
                return

    def _find_functions(self, name: str, output: Any) -> None:
        """Find the Python autograd functions among the graph nodes that a module made itself."""
        run, inside = self._run, f"{name}."
        waiting = [(t.grad_fn, "") for _, t in tensors_in(output) if t.grad_fn is not None]
        seen = {node for node, _ in waiting}
        backward: list[tuple[int, bool, str]] = []
        while waiting and len(seen) < _NODES:
            node, user = waiting.pop()
            number = node._sequence_nr()
            maker = run.made(number)
            if not (maker == name or maker.startswith(inside) or (maker and name == ROOT)):
                continue
            if maker != name and user:
                self._users.setdefault(self._sort[maker][0], user)
                user = ""
            after = [one for one, _ in node.next_functions if one is not None]
            kind = getattr(type(node), "_forward_cls", None)
            if kind is not None and maker == name:
                place = sources.function_place(kind.backward)
                if place and not sources.in_torch(inspect.getfile(kind)):
                    accumulates = any(_accumulates(one) for one in after)
                    backward.append((number, accumulates, place))
                    user = place
            fresh = [one for one in after if one not in seen and not _accumulates(one)]
            seen.update(fresh)
            waiting += ((one, user) for one in fresh)
        if seen:
            backward.sort()
            weight = [place for _, accumulates, place in backward if accumulates]
            self._functions[self._sort[name]] = ModuleCode(
                backward=backward[0][2] if backward else "",
                weight=weight[0] if weight else "",
            )

    # Collectives

    def _method(self, name: str, original: Any) -> Callable[..., Any]:
        def method(group: Any, *args: Any, **kwargs: Any) -> Any:
            self._guard(self._note_method, name, group, args, kwargs)
            return original(group, *args, **kwargs)

        return method

    def _functional(self, operation: Operation, original: Any, *args: Any, **kwargs: Any) -> Any:
        self._guard(self._note_functional, operation, original, args, kwargs)
        return original(*args, **kwargs)

    def _note_method(self, name: str, group: Any, args: Any, kwargs: Any) -> None:
        what, coalesced = _METHODS[name], name.endswith("_coalesced")
        given = [*args, *kwargs.values()]
        receive(every_tensor(given[0]))
        reduction = _reduction(given) if what.operation.reduces else ""
        known = self._group(group)
        peer = -1 if what.peer is None else int(given[what.peer])
        inputs = given[what.input]
        agreed = () if what.agreed is None else given[what.agreed]
        pairs = zip(inputs, agreed, strict=True) if coalesced else [(inputs, agreed)]
        for tensors, alike in pairs:
            size = -1 if what.agreed is None else _bytes(every_tensor(alike))
            self._add(
                what.operation, reduction, known, every_tensor(tensors), agreed=size, peer=peer
            )

    def _note_functional(self, operation: Operation, original: Any, args: Any, kwargs: Any) -> None:
        given = inspect.signature(original).bind(*args, **kwargs).arguments
        c10d: Any = dist.distributed_c10d
        resolve = sys.modules[_FUNCOL]._resolve_group_name
        known = self._group(
            c10d._resolve_process_group(resolve(given["group"], given.get("tag", "")))
        )
        reduction = str(given.get("reduceOp", ""))
        for one in every_tensor(next(iter(given.values()))):
            size = -1 if operation is Operation.ALL_TO_ALL else _bytes([one])
            self._add(operation, reduction, known, [one], agreed=size)

    def _add(
        self,
        operation: Operation,
        reduction: str,
        group: Group | None,
        tensors: Sequence[torch.Tensor],
        *,
        agreed: int,
        peer: int = -1,
    ) -> None:
        if group is None or not tensors:
            return
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        place = self._place(operation)
        # Python hashes code, members of enumerations and dataclasses slowly; all of them are kept.
        objects = id(operation), id(group), id(place.phase), id(place.code)
        key = self._iteration, reduction, dtype, agreed, peer, place.line, place.module, *objects
        if (known := self._calls.get(key)) is None:
            call = Call(
                iteration=self._iteration,
                operation=operation,
                reduction=reduction,
                group=self._numbers.setdefault(group, len(self._numbers)),
                dtype=dtype,
                agreed=agreed,
                peer=peer,
                module=place.module,
                direction=place.phase,
                where="" if place.code is None else sources.shown(place.code, place.line),
            )
            known = self._calls[key] = call, collections.Counter()
            self._codes.append(place.code)
        known[1][_bytes(tensors)] += 1
        if operation not in (Operation.SEND, Operation.RECV):
            digest = self._order.setdefault(
                group.communicator, hashlib.blake2b(digest_size=8, usedforsecurity=False)
            )
            digest.update(f"{operation} {reduction} {dtype} {agreed};".encode())

    def _group(self, group: Any) -> Group | None:
        """A group by its PyTorch object; ``None`` for one of a single rank."""
        if group not in self._groups:
            members = dist.get_process_group_ranks(group)  # in rising order
            name = group_name(group.group_desc or "", members, self._mesh)
            known = Group(name, runs_of(members), group.group_name)
            self._groups[group] = known if len(members) > 1 else None
        return self._groups[group]

    def _place(self, operation: Operation) -> _Place:
        code, line, phase, nested = _site(operation)
        run = self._run
        if run.stack:
            forward = Phase.RECOMPUTATION if is_recomputing() else Phase.FORWARD
            return _Place(run.stack[-1], phase or forward, code, line)
        if not is_recomputing():
            return _Place("", phase or Phase.OTHER, code, line)
        node = torch._C._current_autograd_node()
        # Nodes that were made on another thread than autograd's, unless it recomputed them itself.
        made = (run if nested or run is self._main else self._main).made
        module = "" if node is None else made(node._sequence_nr())
        return _Place(module, phase or Phase.BACKWARD, code, line)


def _site(operation: Operation) -> tuple[CodeType | None, int, Phase | None, bool]:
    """Code and line that call a collective, the part of the step that they tell, and nesting.

    The code is the innermost frame of Megatron or of the training script on this side of autograd's
    engine; without one, of other code. Frames outside of the innermost module's call tell no part
    of the step: the data parallel wrapper is one of them.
    """
    code: CodeType | None = None
    other: tuple[CodeType | None, int] = (None, 0)
    line, phase = 0, None
    outside = nested = False
    for frame in outwards(sys._getframe(1)):
        own, file = frame.f_code, frame.f_code.co_filename
        if sources.enters_autograd(own):
            nested = True
            break
        if sources.in_torch(file):
            outside = outside or own.co_name == "_call_impl"
        elif sources.in_megatron(file) or sources.of_script(file):
            if code is None:
                code, line = own, frame.f_lineno
            if not outside:
                phase = sources.phase_of(file, operation)
        elif other[0] is None and not sources.is_own(file):
            other = own, frame.f_lineno
        if code is not None and (outside or phase):
            break
    return (code, line, phase, nested) if code is not None else (*other, phase, nested)


def _accumulates(node: Any) -> bool:
    """Whether a graph node is the end of the graph, at a leaf."""
    return hasattr(type(node), "variable")


def _reduction(given: Iterable[Any]) -> str:
    """``sum``, ``avg``, ``max`` ...: of the options of a collective, or the argument itself."""
    for one in given:
        if isinstance(one, (list, tuple, torch.Tensor)):
            continue
        value = getattr(one, "reduceOp", one)
        kind = getattr(value, "op", value)
        if isinstance(kind, dist.ReduceOp.RedOpType):
            return _reduction_name(kind)
    return ""


@functools.cache
def _reduction_name(kind: dist.ReduceOp.RedOpType) -> str:
    return str(kind).rpartition(".")[2].lower()


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
