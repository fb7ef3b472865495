# SPDX-License-Identifier: Apache-2.0
"""The records of the collectives of a traced step, and of the code that ran in it.

docs/flags-and-files.md ("Collectives") explains the fields of what is written to files.
"""

import dataclasses
import re
from enum import StrEnum
from typing import NamedTuple

from megatron_ttrace.trace.codec import Count, Rank, Record
from megatron_ttrace.trace.counted import Runs


class Operation(StrEnum):
    """What a collective does."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    ALL_TO_ALL = "all_to_all"
    BROADCAST = "broadcast"
    GATHER = "gather"
    SCATTER = "scatter"
    SEND = "send"
    RECV = "recv"

    @property
    def reduces(self) -> bool:
        """Whether the result combines the values of several ranks."""
        return self in (Operation.ALL_REDUCE, Operation.REDUCE, Operation.REDUCE_SCATTER)


class Phase(StrEnum):
    """The part of a training step in which a collective ran."""

    __hash__ = str.__hash__  # not an enumeration's, which is Python: each call is looked up by it
    INITIALIZATION = "initialization"
    CONSTRUCTION = "construction"
    SCHEDULE = "schedule"
    SCRIPT = "script"
    """What the training script's own functions call, outside of modules."""
    FORWARD = "forward"
    RECOMPUTATION = "recomputation"
    BACKWARD = "backward"
    GRADIENTS = "gradient_reduction"
    OPTIMIZER = "optimizer"
    PARAMETERS = "parameter_gather"
    OTHER = "other"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collective(Record):
    """Equal collectives of one module: one line of ``collectives.jsonl``."""

    iteration: Count
    operation: Operation
    reduction: str
    group: str
    size: Count
    dtype: str
    bytes: Count
    module: str
    direction: Phase
    where: str
    count: Count
    ranks: tuple[Rank, ...]

    @property
    def axes(self) -> set[str]:
        """The axes of the group; the copies of the embeddings are on pipeline stages."""
        axes = set(self.group.split("-"))
        return axes | {"pp"} if "embedding" in axes else axes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveRow(Record):
    """Alike collectives of all layers: one row of the table in a report."""

    operation: Operation
    reduction: str
    group: str
    size: Count
    dtype: str
    least: Count
    most: Count
    module: str
    modules: Count
    direction: Phase
    where: str
    count: Count


@dataclasses.dataclass(frozen=True, slots=True)
class Group(Record):
    """A process group as one of its ranks knows it.

    Attributes:
        name: the mesh axes that it spans, if its own name shows them.
        communicator: its name, the same on all of them.
        order: the checksum of the sequence of its collectives; messages between two ranks are not
            in it.
    """

    name: str
    members: Runs
    communicator: str
    order: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Call(Record):
    """Equal collectives of one rank. Ranks in groups of one structure have equal ones.

    Attributes:
        group: the number of the group in this rank's list.
        agreed: bytes that are the same on all members; -1 if each may have its own number.
        peer: number of the member that a message is sent to or received from; -1 if there is none,
            or any.

    The others as in :class:`Collective`.
    """

    iteration: Count
    operation: Operation
    reduction: str
    group: Count
    dtype: str
    agreed: int
    peer: int
    module: str
    direction: Phase
    where: str


class Size(NamedTuple):
    """Bytes of the input of a collective, and how many times it ran with these."""

    bytes: Count
    times: Count


@dataclasses.dataclass(frozen=True, slots=True)
class ModuleCode:
    """Where the code of a module is; each as ``file:line (function)``, empty if not known.

    Attributes:
        forward: its class's ``forward``.
        backward: ``backward`` of the last autograd function of its backward pass, which makes the
            gradient of its input.
        weight: the same for the function that computes the gradient of its weight.
        user: the code that uses its output: ``backward`` of an autograd function, which makes the
            gradient of that, else what called the module.
        built: its class's constructor.
        described: its class's description for checkpoints.
    """

    forward: str = ""
    backward: str = ""
    weight: str = ""
    user: str = ""
    built: str = ""
    described: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Function:
    """A function of Megatron that ran, and properties of its code.

    Attributes:
        file, line, name: where it is, and its qualified name.
        scales: whether it multiplies or divides.
        moves: whether it fills or copies buffers.
        loops: whether it goes through items.
        marks: the marks of parameters that it names.
        axes: the mesh axes that its names contain.
        strings: names that it has as text.
        factors: names of factors, as ``loss_scale``, that occur in it.
        sets: those of its local variables that are none of its arguments.
        part: the part of a step that all code of its file belongs to, if it does.
        own: whether it is the user's own, and not of Megatron's checkout.
        size: bytes of its code.
    """

    file: str
    line: Count
    name: str
    scales: bool = False
    moves: bool = False
    loops: bool = False
    marks: tuple[str, ...] = ()
    axes: tuple[str, ...] = ()
    strings: tuple[str, ...] = ()
    factors: tuple[str, ...] = ()
    sets: tuple[str, ...] = ()
    part: Phase | None = None
    own: bool = False
    size: Count = 0

    @property
    def where(self) -> str:
        """``file:line (function)``."""
        return f"{self.file}:{self.line} ({self.name})"


class FunctionCall(NamedTuple):
    """A function ran in a module and a part of the step, called by another one.

    ``function`` and ``caller`` are numbers in :class:`Calls`; ``caller`` is -1 for code that is not
    Megatron's. Layers of ``module`` are not numbered.
    """

    function: Count
    caller: int
    module: str
    phase: Phase


class Norm(NamedTuple):
    """The number of a tensor's elements, and their Euclidean norm."""

    elements: Count
    norm: float


@dataclasses.dataclass(frozen=True, slots=True)
class CallNorms:
    """The first call of a function in a module, forward or backward.

    Attributes:
        function: as ``file:line (function)``.
        module: its name in the whole model.
        given: tensors among its arguments, when it began.
        returned: tensors in its result.
    """

    function: str
    module: str
    phase: Phase
    given: tuple[Norm, ...] = ()
    returned: tuple[Norm, ...] = ()


class Agreement(StrEnum):
    """How a function's call compares with the reference's, by norms.

    ``ALIKE``: what it returned has the reference's norms. ``STRAYS``: that has other ones, what it
    was given has not. ``RETURNED_OTHER``: that has other ones, what it was given is not known.
    ``GIVEN_OTHER``: what it was given has other ones.
    """

    ALIKE = "alike"
    STRAYS = "strays"
    RETURNED_OTHER = "returned_other"
    GIVEN_OTHER = "given_other"


class Compared(NamedTuple):
    """A function's agreement in a module, whose layers are not numbered."""

    function: str
    module: str
    phase: Phase
    agreement: Agreement


class Lookup(NamedTuple):
    """A line of a function chose a process group that the function was not given.

    ``function`` is a number in :class:`Calls`, ``group`` the axes that it spans, joined by ``-``,
    or its description; ``size`` is its number of ranks.
    """

    function: Count
    line: Count
    group: str
    size: Count
    phase: Phase


@dataclasses.dataclass(frozen=True, slots=True)
class Calls(Record):
    """Which functions of Megatron ran, each call once, in the order of the first ones.

    Attributes:
        marks: those of parameters that are set, by the parameter's name.
        partial: those that only some of the ranks with the parameter have set.
        lookups: of process groups by these functions.
        buckets: by parameter, the gradient bucket in which ranks divide it.
    """

    functions: tuple[Function, ...] = ()
    calls: tuple[FunctionCall, ...] = ()
    marks: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    lookups: tuple[Lookup, ...] = ()
    buckets: dict[str, str] = dataclasses.field(default_factory=dict)
    partial: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def contradiction(self) -> str:
        """Why the fields contradict each other."""
        numbers = range(-1, len(self.functions))
        fit = all(c.function in numbers and c.caller in numbers for c in self.calls)
        fit = fit and all(lookup.function in numbers for lookup in self.lookups)
        return "" if fit else "a call of a function that is not listed"


Numbers = dict[str, dict[str, tuple[float, ...]]]
"""Numbers that functions were given or returned, by :attr:`Function.where` and argument, which is
empty for what was returned; and those that modules have as attributes, by module."""


class Shard(NamedTuple):
    """The elements ``start`` to ``end`` of the ``size`` of a flat parameter that a rank steps."""

    start: Count
    end: Count
    size: Count


@dataclasses.dataclass(frozen=True, slots=True)
class Sources(Record):
    """The code that ran, as ``file:line (function)``.

    Attributes:
        modules: number in ``codes`` by canonical name.
        optimizer: the optimizer's ``step``.
        finalize: what reduces the gradients after the last microbatch.
        step: the training script's forward step, which reads the batch and computes the loss.
        metrics: what reports each number that is logged, by its name.
        inputs: names of what the model is given, by position.
        optimizer_state: the optimizer's description of its state for checkpoints.
        loaders: what loads a number of a checkpoint, by beginnings of their names.
        sharding: what divided the parameters among data-parallel ranks.
    """

    modules: dict[str, Count] = dataclasses.field(default_factory=dict)
    codes: tuple[ModuleCode, ...] = ()
    optimizer: str = ""
    finalize: str = ""
    step: str = ""
    metrics: dict[str, str] = dataclasses.field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    optimizer_state: str = ""
    loaders: dict[str, str] = dataclasses.field(default_factory=dict)
    sharding: str = ""
    calls: Calls = Calls()

    def of(self, module: str) -> ModuleCode | None:
        """The code of a module, or of the innermost known module that contains it."""
        while module:
            number = self.modules.get(module)
            if number is not None and number < len(self.codes):
                return self.codes[number]
            module = module.rpartition(".")[0]
        return None


@dataclasses.dataclass(frozen=True, slots=True)
class RankLedger(Record):
    """What one rank recorded.

    ``sizes`` are those of each of ``calls``. ``error`` is why the record is not complete.
    ``shards`` are those that a distributed optimizer gave to this rank, by parameter; ``apart`` are
    functions of which lines ran that the reference did not run; ``norms`` are of calls
    in the reference's first microbatch, ``factor`` is the expected ratio of gradients there.
    """

    calls: tuple[Call, ...] = ()
    sizes: tuple[tuple[Size, ...], ...] = ()
    groups: tuple[Group, ...] = ()
    sources: Sources = Sources()
    error: str = ""
    numbers: Numbers = dataclasses.field(default_factory=dict)
    shards: dict[str, Shard] = dataclasses.field(default_factory=dict)
    apart: tuple[str, ...] = ()
    norms: tuple[CallNorms, ...] = ()
    factor: float = 1.0

    def contradiction(self) -> str:
        """Why the fields contradict each other."""
        if any(call.group >= len(self.groups) for call in self.calls):
            return "a collective in a group that is not listed"
        return "" if len(self.sizes) == len(self.calls) else "collectives without sizes"


class LedgerFault(StrEnum):
    """What is wrong with collectives."""

    COUNT = "count"
    ORDER = "order"
    PRECISION = "precision"


@dataclasses.dataclass(frozen=True, slots=True)
class RanHere:
    """What some ranks ran: ``count`` times, first at ``where`` in ``module``."""

    ranks: tuple[Rank, ...]
    count: Count
    module: str = ""
    where: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LedgerFinding(Record):
    """A fault that the collectives themselves show, whatever the tensors' values are."""

    fault: LedgerFault
    group: str
    members: tuple[Rank, ...]
    ran: tuple[RanHere, ...]
    operation: Operation | None = None
    reduction: str = ""
    dtype: str = ""
    bytes: int = -1
    expected: str = ""
    groups: Count = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Ledger(Record):
    """The collectives of all ranks, what is wrong with them, and the code that ran.

    ``recorded`` is false if the collectives of some rank are not known. Over the axes ``unseen``
    the run may communicate outside of PyTorch's process groups. ``torn`` are parameters
    whose shards, over all ranks, lack elements or have some more often than others. ``apart`` are
    functions of which lines ran on a rank, but not in the reference. ``compared`` are calls of
    functions against the reference's.
    """

    collectives: tuple[Collective, ...] = ()
    findings: tuple[LedgerFinding, ...] = ()
    sources: Sources = Sources()
    recorded: bool = True
    unseen: tuple[str, ...] = ()
    numbers: Numbers = dataclasses.field(default_factory=dict)
    torn: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    compared: tuple[Compared, ...] = ()


UNRECORDED = Ledger(recorded=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Citation:
    """The collectives that ran in a culprit, and those that its siblings ran in addition.

    Attributes:
        ran: inside the culprit (for gradients: over the axes concerned).
        without: axes of the finding over which no reduction ran there.
        lacking: operation and group of what each sibling ran and the culprit did not.
        siblings: number of modules of other layers that correspond to the culprit.
    """

    direction: Phase
    ran: tuple[Collective, ...] = ()
    without: tuple[str, ...] = ()
    lacking: tuple[tuple[Operation, str], ...] = ()
    siblings: int = 0

    @property
    def summed(self) -> set[str]:
        """The axes over which something was added up there, not only over a part of them."""
        adds = (c for c in self.ran if c.operation.reduces and c.reduction not in ("max", "min"))
        return {axis for call in adds if "part" not in call.axes for axis in call.axes}


def pattern(module: str) -> str:
    """A module's name without the numbers of its layer and its expert."""
    return re.sub(r"\b\d+\b", "*", module)
