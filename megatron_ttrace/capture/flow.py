# SPDX-License-Identifier: Apache-2.0
"""What a number is computed from: elements of parameters, followed through their computation.

A tensor is identified by where it lies in memory (:class:`Memory`). What is computed from it is
followed through every operation and collective (:class:`Flow`), so that nothing needs to be known
about how the computation chooses its operands.
"""

import bisect
import dataclasses
import functools
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ttrace.mcore.parameters import ParameterPlace, reduced_over
from megatron_ttrace.mcore.sharded_weights import local
from megatron_ttrace.placement.boxes import Box
from megatron_ttrace.placement.mesh import Mesh
from megatron_ttrace.trace.counted import Part, Runs, Sum, Term, runs_of
from megatron_ttrace.trace.views import every_tensor

Terms = Counter[tuple[bool, int]]
"""How often each part, or (``True``) each result of a collective, is added; by number."""
_UNKNOWN = (False, -1)
"""Stands for a tensor of no known parameter."""


class _Run(NamedTuple):
    """Where elements lie one after the other; ``size``: bytes of one."""

    address: int
    end: int
    size: int
    numel: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Span:
    """Elements from ``first`` on of a rank's flattened parameter of ``numel``, where they lie."""

    run: _Run
    place: ParameterPlace
    first: int
    numel: int
    tensor: torch.Tensor
    """Kept, so that nothing else is put at its address."""


class Parts:
    """The numbered pieces of parameters that a rank speaks of."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._numbers: dict[tuple[str, int, int, bool], int] = {}
        self.parts: list[Part] = []

    def number(
        self, place: ParameterPlace, first: int, last: int, numel: int, *, of_rank: bool = False
    ) -> int:
        """Of the elements ``first`` to ``last`` of a rank's flattened parameter of ``numel``.

        ``of_rank``: of this rank's gradient of them, to which other ranks' are added.
        """
        key = (place.name, first, last, of_rank)
        if key not in self._numbers:
            where = place if (first, last) == (0, numel) else place.flat(first, last)
            part = Part(place.name, place.logical_shape, where.boxes(self._mesh))
            self._numbers[key] = len(self.parts)
            self.parts.append(self._of_rank(part) if of_rank else part)
        return self._numbers[key]

    def _of_rank(self, part: Part) -> Part:
        """With a first dim: the ranks whose gradients are added up."""
        ranks, own = 1, 0
        for axis in reduced_over(part.name):
            size = self._mesh.size(axis)
            ranks, own = ranks * size, own * size + self._mesh.at(axis)
        boxes = tuple(Box((own, *b.logical), (1, *b.extent), (0, *b.local)) for b in part.boxes)
        return Part(part.name, (ranks, *part.shape), boxes)


class Memory:
    """Which elements of which parameters are at which addresses."""

    def __init__(self, parts: Parts, *, of_rank: bool = False) -> None:
        """Prepare; ``of_rank`` as in :meth:`Parts.number`."""
        self._number = functools.partial(parts.number, of_rank=of_rank)
        self._addresses: list[int] = []
        self._spans: list[_Span] = []
        """In the order of ``_addresses``."""

    def add(self, tensor: Any, place: ParameterPlace, span: tuple[int, int], numel: int) -> None:
        """Remember a tensor that holds the elements ``span`` of a parameter of ``numel``.

        Of two tensors that share memory the first is remembered.
        """
        run = _run(tensor)
        if run is None or run.numel != span[1] - span[0] or self._overlapping(run):
            return
        at = bisect.bisect_right(self._addresses, run.address)
        self._addresses.insert(at, run.address)
        self._spans.insert(at, _Span(run, place, first=span[0], numel=numel, tensor=tensor))

    def find(self, tensor: torch.Tensor) -> list[int]:
        """The numbers of the parts in a tensor; what lies between parameters is padding."""
        run = _run(tensor)
        if run is None:
            return []
        parts = []
        for span in self._overlapping(run):
            low, high = max(run.address, span.run.address), min(run.end, span.run.end)
            first = span.first + (low - span.run.address) // run.size
            last = first + (high - low) // run.size
            parts.append(self._number(span.place, first, last, span.numel))
        return parts

    def _overlapping(self, run: _Run) -> list[_Span]:
        first = max(0, bisect.bisect_right(self._addresses, run.address) - 1)
        last = bisect.bisect_left(self._addresses, run.end, first)
        near = self._spans[first:last]
        return [s for s in near if s.run.end > run.address and s.run.size == run.size]


class Flow(TorchDispatchMode):
    """Follows elements through one computation, which runs in its context.

    Every operation is taken for a sum of its distinct inputs: true of all that norms and counts
    are made with (``x * x``, ``a + b``, ``stack``, ``sqrt``). What cannot be followed is unknown:
    parts of what was computed, numbers of Python's, and collectives except :meth:`reduced`.
    """

    def __init__(self, memory: Memory, orders: Counter[Runs]) -> None:
        """Prepare; ``orders`` counts the collectives over each group in a step."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self._orders = orders
        self._known: dict[int, tuple[StorageWeakRef, Terms]] = {}
        """By address, on which there may be something else once the memory is free."""
        self._unknown = ""
        self.made: list[Sum] = []
        self.reads: list[Terms] = []
        """Of tensors that became numbers of Python's, which are followed no further."""
        self.unknown = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and note what its outputs are made of."""
        # Asked before the operation overwrites its inputs.
        operation = func._schema.name.removeprefix("aten::")
        terms = self._made_by(operation, args, kwargs)
        out = func(*args, **(kwargs or {}))
        # Collectives need not return what they write to.
        self.set((out, args) if "c10d" in operation else out, terms)
        return out

    def of(self, values: Any) -> Terms:
        """What tensors hold together; each tensor counts once."""
        tensors = {id(tensor): tensor for tensor in every_tensor(values)}
        total: Terms = Counter()
        for tensor in tensors.values():
            total.update(self._of(local(tensor)))
        return total

    def set(self, values: Any, terms: Terms) -> None:
        """Note that tensors are made of these terms."""
        for tensor in every_tensor(values):
            storage = _storage(local(tensor))
            if storage is not None:
                self._known[storage.data_ptr()] = StorageWeakRef(storage), terms

    def reduced(self, tensor: torch.Tensor, ranks: Runs) -> None:
        """A collective has added up this tensor over a group."""
        self.made.append(self.collective(ranks, self.of(tensor)))
        self.set(tensor, Counter({(True, len(self.made) - 1): 1}))

    def collective(self, ranks: Runs, terms: Terms) -> Sum:
        """The next sum over a group."""
        order = self._orders[ranks]
        self._orders[ranks] += 1
        return Sum(ranks, order, *self.added(terms))

    def added(self, terms: Terms) -> tuple[tuple[Term, ...], tuple[Term, ...]]:
        """Parts and sums that go into a result, apart; notes what is unknown among them."""
        split: tuple[list[Term], list[Term]] = [], []
        for (is_sum, number), times in sorted(terms.items()):
            if (is_sum, number) == _UNKNOWN:
                self.unknown = self._unknown
            else:
                split[is_sum].append(Term(number, times))
        return tuple(split[0]), tuple(split[1])

    def parts(self, values: Any) -> tuple[Term, ...]:
        """The parts of parameters that tensors hold, without anything unknown."""
        terms = sorted(self.of(values).items())
        return tuple(Term(key[1], times) for key, times in terms if not key[0] and key != _UNKNOWN)

    def result(self, value: Any) -> Terms:
        """What a returned number consists of; a Python number was read from a tensor."""
        if torch.is_tensor(value):
            return self.of(value)
        if any(read != self.reads[0] for read in self.reads):
            return self._not_known("several numbers that were read from tensors")
        return self.reads[0] if self.reads else Counter()

    def _made_by(self, operation: str, args: Any, kwargs: Any) -> Terms:
        if "c10d" in operation:
            return self._not_known(operation)
        if operation.endswith("_like") or operation.startswith("new_"):
            return Counter()  # of the same shape, and nothing else
        if operation in ("zero_", "fill_", "copy_"):
            kept = args[:1] if _is_part(args[0]) else ()
            return self.of((*kept, args[1:]))
        terms = self.of((args, kwargs))
        if operation == "_local_scalar_dense" and terms and args[0].dtype != torch.bool:
            self.reads.append(terms)
        return terms

    def _not_known(self, what: str) -> Terms:
        self._unknown = what
        return Counter([_UNKNOWN])

    def _of(self, tensor: torch.Tensor) -> Terms:
        if not tensor.numel():
            return Counter()
        if parts := self._memory.find(tensor):
            return Counter((False, part) for part in parts)
        storage = _storage(tensor)
        ref, known = self._known.get(storage.data_ptr() if storage else 0, (None, None))
        if ref is not None and ref.expired():
            known = None
        if known is None and tensor.numel() > 1:
            return self._not_known(f"a tensor of shape {tuple(tensor.shape)}")
        if known is None and self.reads:
            return self._not_known("a number that was read from a tensor")
        if known and _is_part(tensor):
            return self._not_known(f"a part of a tensor, of shape {tuple(tensor.shape)}")
        return known or Counter()


def group_ranks(group: Any) -> Runs:
    """The ranks of a process group; of all ranks for ``None``."""
    return runs_of(dist.get_process_group_ranks(dist.group.WORLD if group is None else group))


def _run(tensor: Any) -> _Run | None:
    """Where a tensor's elements lie one after the other; ``None`` if they do not."""
    try:
        if not torch.is_tensor(tensor) or local(tensor) is not tensor:
            return None  # sharded: only its local part has an address
        numel, address = tensor.numel(), tensor.data_ptr()
        if not (numel and address and tensor.is_contiguous()):
            return None
    except RuntimeError:  # a wrapper without memory of its own, such as a quantised weight
        return None
    size = tensor.element_size()
    return _Run(address, address + numel * size, size, numel)


def _is_part(tensor: torch.Tensor) -> bool:
    """Whether a tensor shares its memory with more elements."""
    storage = _storage(tensor)
    return storage is not None and tensor.nbytes < storage.nbytes()


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor, if it has any."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except (RuntimeError, NotImplementedError):
        return None
