# SPDX-License-Identifier: Apache-2.0
"""Functions by what they are for.

They mark parameters, or choose among marked ones; compute gradients of weights after the backward
pass; compute a statistic, or write what is logged; divide by the number of microbatches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from megatron_ttrace.diagnose.code import BUILDING, COMPUTE, Code, tokens
from megatron_ttrace.trace.collectives import Phase
from megatron_ttrace.trace.findings import Lack
from megatron_ttrace.trace.records import Kind

SCHEDULED = "scheduled-samples"
"""The metric by how many samples the schedule advanced."""
LATE = {"dw", "wgrad"}
"""Words in the names of functions that compute gradients of weights after the backward pass."""


_INITIALIZING = {"init", "method"}
"""Words in the names of functions that make what draws initial values."""


def initializing(code: Code, kind: Kind) -> Iterator[int]:
    """What makes the functions that draw initial values, which modules are given; if these fail."""
    makers = code.calling(_INITIALIZING, BUILDING) if kind is Kind.INITIAL else ()
    return (n for n in makers if not code.functions[n].name.endswith(".__init__"))


def choosing(code: Code, lack: Lack | None, index: int) -> Iterator[int]:
    """What names marks where parameters are divided among optimizers, or left out of a sum."""
    step = "", Phase.OPTIMIZER
    for number in code.at[BUILDING if lack is Lack.UNGROUPED else step]:
        function = code.functions[number]
        if function.marks and lack is Lack.UNGROUPED:
            yield from [number] * (function.part in (Phase.OPTIMIZER, Phase.GRADIENTS))
        elif function.marks and lack is Lack.LEFT_OUT:
            yield from [number] * code.compute(code.chain(number, step), index)


def marking(code: Code, constructor: int | None) -> dict[int, float]:
    """What names marks before the step, with weights: a module's constructor likelier than others.

    ``constructor`` is that of the module whose parameters are wrong.
    """
    marked = [number for number in code.at[BUILDING] if code.functions[number].marks]
    own = {} if constructor is None else code.below(constructor, BUILDING)
    if own.keys().isdisjoint(marked):
        return dict.fromkeys(marked, 0.8)
    return {number: 1.0 if number in own else 0.6 for number in marked}


def grouping(code: Code, own: Collection[int | None]) -> Iterator[tuple[int, int]]:
    """What gives parameters marks, by which optimizers choose groups, and how many of these.

    Constructors are those of the module and of what it is in (``own``), not of other modules.
    """
    functions, built = code.functions, code.at[BUILDING]
    of_optimizer = (n for n in built if functions[n].part is Phase.OPTIMIZER)
    chosen = {mark for number in of_optimizer for mark in functions[number].marks}
    for number in (n for n in built if functions[n].part is None):
        marks = chosen.intersection(functions[number].marks)
        if marks and (number in own or not functions[number].name.endswith("__init__")):
            yield number, len(marks)


def late(code: Code, constructors: Iterable[int | None]) -> Iterator[tuple[int, int]]:
    """Methods that compute gradients of weights late, of the classes with these constructors.

    Modules call those of the modules inside of them, one by one. Each is yielded with the number
    of its class.
    """
    for distance, start in enumerate(constructors):
        if start is None or not code.functions[start].name.endswith(".__init__"):
            continue
        built = code.functions[start]
        for number in code.contexts:
            function = code.functions[number]
            is_method = function.file == built.file and (
                function.name.startswith(built.name.removesuffix("__init__"))
            )
            if is_method and not LATE.isdisjoint(tokens(function.name)):
                yield number, distance


def computing(code: Code, metric: str) -> Iterator[int]:
    """What computes, by its name, the statistic that a logged number is, or steps the schedule."""
    for context in code.at if metric == SCHEDULED else ():
        yield from code.calling({"scheduler", "step"}, context)
    fitting = (words for words in COMPUTE.values() if words <= {*tokens(metric)})
    if words := max(fitting, key=len, default=None):
        for number in code.contexts:
            yield from [number] * (words <= {*tokens(code.functions[number].name)})


def dividing(code: Code, numbers: Iterable[int]) -> Iterator[int]:
    """Which of some functions know the number of microbatches, and multiply or divide."""
    functions = code.functions
    return (n for n in numbers if functions[n].scales and "microbatches" in functions[n].axes)


def writing(code: Code, logger: int) -> Iterator[int]:
    """What calls, in a module, a method of the class of a function that logs numbers."""
    logs = code.functions[logger]
    head = logs.name[: logs.name.rfind(".") + 1]
    for number, function in enumerate(code.functions if head else ()):
        if function.file == logs.file and function.name.startswith(head):
            inside = (context for context in code.contexts[number] if context[0])
            yield from (c for context in inside for c in code.callers(number, context))
