# SPDX-License-Identifier: Apache-2.0
"""Places: functions that return something else, though given the same; a module's own code."""

import dataclasses

import pytest

from megatron_ttrace.diagnose.by_norms import ByNorms
from megatron_ttrace.diagnose.code import Code, Outcomes
from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.trace.collectives import Agreement, Compared, Ledger, Phase, pattern
from megatron_ttrace.trace.findings import Cause, ConstantFactor, Explanation, Finding
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.places import Clue
from megatron_ttrace.trace.records import Kind
from tests.diagnose.judged_by_hand import diagnosed, judged
from tests.diagnose.ran_by_hand import LINEAR, NORM, B, F, collective, record, where, wrong

SUMMANDS, TWICE = Finding(Cause.PARTIAL, ("tp",)), ConstantFactor(Cause.TOO_LARGE, ratio=2.0)
OUTPUT = wrong(Kind.OUTPUT, LINEAR)
ALIKE, STRAYS, GIVEN_OTHER = Agreement.ALIKE, Agreement.STRAYS, Agreement.GIVEN_OTHER


def compared(
    function: str, agreement: Agreement, module: str = LINEAR, phase: Phase = F
) -> Compared:
    """Of one function in one module."""
    return Compared(where(function), pattern(module), phase, agreement)


def recorded(*calls: Compared, apart: tuple[str, ...] = ()) -> Ledger:
    """The step made by hand."""
    return dataclasses.replace(record(), compared=calls, apart=tuple(map(where, apart)))


def points(*calls: Compared, apart: tuple[str, ...] = ()) -> dict[str, float]:
    """Of all suspects of the wrong output."""
    ranked = Places(recorded(*calls, apart=apart), [OUTPUT]).ranked(OUTPUT, None)
    return {place.function: points for points, place in reversed(ranked)}  # the best of one name


def names(ledger: Ledger, failure: Judged, *others: Judged) -> dict[str, float]:
    """The functions that stray, with their weights."""
    norms = ByNorms(code := Code(ledger), ledger, Outcomes([failure, *others]), failure)
    return {code.functions[number].name: share for number, share in norms.straying.items()}


def test_the_innermost_one():
    """What calls it returns something else, too; so does a module around."""
    calls = compared("Linear.forward", STRAYS), compared("Product.forward", STRAYS)
    ledger = recorded(*calls, compared("prepare", STRAYS, "model"))
    assert names(ledger, OUTPUT) == {"Product.forward": 1.0}
    ledger = recorded(compared("Linear.forward", STRAYS), compared("Product.forward", GIVEN_OTHER))
    assert names(ledger, OUTPUT) == {"Linear.forward": 1.0}


def test_what_was_given_something_that_is_not_known():
    """It is one of these if what called it is."""
    unknown = compared("Product.forward", Agreement.RETURNED_OTHER)
    assert names(recorded(unknown), OUTPUT) == {}
    ledger = recorded(unknown, compared("Linear.forward", STRAYS))
    assert names(ledger, OUTPUT) == {"Product.forward": 1.0}


def test_the_forward_pass_comes_first():
    """What it returned wrongly may have been kept for the backward pass; not the other way."""
    ledger = recorded(
        compared("Product.backward", STRAYS, phase=B), compared("Product.forward", STRAYS)
    )
    assert names(ledger, wrong(Kind.GRAD_INPUT, LINEAR)) == {
        "Product.forward": 1.0,
        "Product.backward": 0.5,
    }
    assert names(ledger, OUTPUT) == {"Product.forward": 1.0}


@pytest.mark.parametrize("passes", [True, False])
def test_what_strays_by_design(passes):
    """In another module, whose output is right, it does so as well."""
    ledger = recorded(compared("reduce", STRAYS), compared("reduce", STRAYS, NORM))
    other = judged(Kind.OUTPUT, NORM) if passes else wrong(Kind.OUTPUT, NORM)
    assert names(ledger, OUTPUT, other) == ({} if passes else {"reduce": 1.0})


def test_places():
    """It is the first one; what it called in this layout only, follows."""
    ledger = recorded(compared("Linear.forward", STRAYS))
    found = Places(ledger, [OUTPUT]).of(diagnosed(OUTPUT, Explanation(None))).why.places
    assert (found[0].function, found[0].clue) == ("Linear.forward", Clue.STRAYS)
    more = points(compared("Linear.forward", STRAYS), apart=("reduce",))
    assert more["reduce"] > points(apart=("reduce",))["reduce"] > points()["reduce"]
    assert more["Linear.forward"] > more["reduce"]


@pytest.mark.parametrize("agreement", [ALIKE, GIVEN_OTHER])
@pytest.mark.parametrize("is_shown", [True, False])
def test_what_is_right_or_was_given_something_wrong(agreement, is_shown):
    """Both speak against a function, in the direction that fails, if the norms show the fault."""
    strays = [compared("reduce", STRAYS)] * is_shown
    less = points(*strays, compared("Product.forward", agreement))["Product.forward"]
    same = points(*strays, compared("Product.forward", agreement, phase=B))["Product.forward"]
    assert (less < same) == is_shown
    assert same == points()["Product.forward"]


@pytest.mark.parametrize("module", [LINEAR, NORM])
def test_what_need_not_communicate(module):
    """It did not in another module, and its result is right there."""
    ledger = record(collective("reduce", module=NORM, direction=F))
    ledger = dataclasses.replace(ledger, compared=(compared("gather", ALIKE, module, B),))
    failure = wrong(Kind.GRAD_INPUT, LINEAR)
    clues = {p.function: p.clue for _, p in Places(ledger, [failure]).ranked(failure, None)}
    assert (clues["gather"] is Clue.SILENT) == (module == LINEAR)


@pytest.mark.parametrize("finding", [SUMMANDS, TWICE])
def test_a_module_has_to_add_up_what_it_computes(finding):
    """Its own code is likelier than a function in it that knows the axis; not of a factor."""
    ledger = record()
    calls = ledger.sources.calls
    functions = tuple(
        dataclasses.replace(f, axes=("tp",), size=9000, scales=True)
        if f.name == "Product.forward"
        else f
        for f in calls.functions
    )
    sources = dataclasses.replace(
        ledger.sources, calls=dataclasses.replace(calls, functions=functions)
    )
    ledger = dataclasses.replace(ledger, sources=sources)
    (_, first), *_ = Places(ledger, [OUTPUT]).ranked(OUTPUT, finding)
    assert first.function == ("Linear.forward" if finding is SUMMANDS else "Product.forward")
