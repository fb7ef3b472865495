# SPDX-License-Identifier: Apache-2.0
"""What makes a number that the reference does not have, or chooses a group over other axes."""

import dataclasses

import pytest

from megatron_ttrace.diagnose.passed import origins, without
from megatron_ttrace.trace.collectives import (
    Calls,
    Function,
    FunctionCall,
    Ledger,
    Lookup,
    Phase,
    Sources,
)
from tests.diagnose.ran_by_hand import FUNCTIONS, C, lookup, record

STEP, COUNT, FINALIZE, SCALE = range(4)
NAMES = ("step", "count", "finalize", "scale")
RIGHT = {"count": {"": (8.0,)}, "finalize": {"tokens": (8.0,)}, "scale": {"factor": (0.125,)}}


def ledger(numbers: dict[str, dict[str, tuple[float, ...]]]) -> Ledger:
    """A step counts tokens and finalizes; that scales."""
    functions = tuple(Function("m.py", 1, name) for name in NAMES)
    pairs = (STEP, -1), (COUNT, STEP), (FINALIZE, STEP), (SCALE, FINALIZE)
    calls = tuple(FunctionCall(*pair, "", Phase.OTHER, 1) for pair in pairs)
    sources = Sources(calls=Calls(functions, calls))
    return Ledger(sources=sources, numbers=numbered(numbers))


def numbered(
    numbers: dict[str, dict[str, tuple[float, ...]]],
) -> dict[str, dict[str, tuple[float, ...]]]:
    """By places."""
    return {f"m.py:1 ({name})": known for name, known in numbers.items()}


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        # The last is off although what it is made of is right.
        ({"scale": {"factor": (0.0625,)}}, {FINALIZE}),
        ({"finalize": {"tokens": (16.0,)}, "scale": {"factor": (0.0625,)}}, {STEP}),
        ({"count": {"": (16.0,)}, "finalize": {"tokens": (16.0,)}}, {COUNT}),
        # By another ratio; of the reference's as well.
        ({"scale": {"factor": (0.1,)}}, set()),
        ({"scale": {"factor": (0.125, 0.125001)}}, set()),
        ({"scale": {"other": (0.0625,)}}, set()),
    ],
)
def test_where_a_number_is_first_off(
    wrong: dict[str, dict[str, tuple[float, ...]]], expected: set[int]
) -> None:
    """By the ratio or its inverse: what makes it was not given one itself."""
    assert origins(ledger(RIGHT | wrong), numbered(RIGHT), [2.0]) == expected
    assert origins(ledger(RIGHT | wrong), numbered(RIGHT), [1.0]) == set()
    assert origins(ledger(RIGHT | wrong), {}, [2.0]) == set()


def test_a_share_that_is_summed_later() -> None:
    """Half of the reference's number on each of two data-parallel ranks."""
    share = {"finalize": {"tokens": (4.0,)}, "scale": {"factor": (0.25,)}}
    known = ledger(RIGHT | share)
    assert origins(known, numbered(RIGHT), [2.0]) == {STEP}
    calls = known.sources.calls
    for group, first in (("dp-cp", FINALIZE), ("tp", STEP)):
        chosen = Lookup(FINALIZE, 1, group, 2, "", Phase.GRADIENTS)
        sources = Sources(calls=dataclasses.replace(calls, lookups=(chosen,)))
        known = dataclasses.replace(known, sources=sources)
        assert origins(known, numbered(RIGHT), [2.0]) == {first}


@pytest.mark.parametrize(
    ("chosen", "lacks"),
    [
        ([("tp", 2)], True),
        ([("TENSOR_MODEL_PARALLEL_GROUP", 1)], True),
        ([("tp", 2), ("dp-cp", 4)], False),
        ([("dp", 2)], False),
        # Its axes are not known.
        ([("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", 2)], False),
        ([], False),
    ],
)
def test_groups_without_the_axis(chosen: list[tuple[str, int]], lacks: bool) -> None:
    """Of a function that names it."""
    built = lookup("sync_grads", "dp", phase=C)
    known = record(lookups=(built, *(lookup("sync_grads", *group) for group in chosen)))
    number = list(FUNCTIONS).index("sync_grads")
    assert without(known, {"dp"}) == {number} & ({number} if lacks else set())
    assert without(dataclasses.replace(known), {"pp"}) == set()
