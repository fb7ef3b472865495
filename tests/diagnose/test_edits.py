# SPDX-License-Identifier: Apache-2.0
"""How near to a failure the user's changes ran."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from megatron_ttrace.diagnose import edits
from megatron_ttrace.diagnose.code import Code
from megatron_ttrace.diagnose.places import Places
from megatron_ttrace.trace.collectives import Phase
from megatron_ttrace.trace.executed import ChangedFunction, Execution
from megatron_ttrace.trace.findings import Explanation
from megatron_ttrace.trace.places import Clue, Place
from megatron_ttrace.trace.records import ROOT, Kind
from tests.diagnose.judged_by_hand import diagnosed
from tests.diagnose.ran_by_hand import LINEAR, NORM, WEIGHT, B, C, F, S, collective, record, wrong
from tests.diagnose.test_places import GRADIENTS, NORMS, PARTIAL

OTHER = Phase.OTHER


def changed(name: str, phase: Phase, *modules: str) -> ChangedFunction:
    """A function of a plug-in."""
    return ChangedFunction("m.py", name, 8, Execution.ELSEWHERE, modules, (phase,), replaces=True)


@pytest.mark.parametrize(
    ("kind", "functions", "near"),
    [
        (Kind.OUTPUT, [changed("Product.forward", F, "decoder.layers.*.linear")], True),
        # The module around it makes its input, and uses its output.
        (Kind.OUTPUT, [changed("Layer.forward", F, "decoder.layers.*")], True),
        (Kind.OUTPUT, [changed("Norm.forward", F, "decoder.layers.*.norm")], False),
        # The step of the optimizer begins inside of it.
        (Kind.EXP_AVG, [changed("run", S)], True),
        (Kind.GRAD_INPUT, [changed("run", S)], False),
        (Kind.GRAD_INPUT, [changed("absent", B)], False),
        # The whole model is around all of its modules.
        (Kind.OUTPUT, [changed("attach", F, ROOT)], True),
        # What runs the schedule averages what is reported.
        (Kind.LOSS, [changed("train", OTHER)], True),
        (Kind.EXP_AVG, [changed("train", OTHER)], False),
    ],
)
def test_what_is_near(kind: Kind, functions: list[ChangedFunction], near: bool) -> None:
    """By the module and the part of the step that it ran in."""
    failure = wrong(kind, LINEAR)
    found, far = edits.nearest(functions, Code(record()), (), failure)
    assert (list(found.values()), far) == (functions * near, set())
    built = changed("Model.__init__", C)
    found, far = edits.nearest([*functions, built], Code(record()), (), failure)
    in_pass = kind in (Kind.OUTPUT, Kind.GRAD_INPUT)
    assert (list(found.values()), bool(far)) == (functions if near else [built], in_pass > near)


@pytest.mark.parametrize("kind", [Kind.OUTPUT, Kind.GRAD_INPUT, Kind.BUFFER, Kind.MAIN_GRAD])
def test_constructors_are_farther_than_what_ran_in_a_pass(kind: Kind) -> None:
    """Of what was changed; marks of parameters are set by constructors."""
    names = "Linear.__init__", "Product.forward"
    functions = [changed(name, F, "decoder.layers.*.linear") for name in names]
    failure = wrong(kind, LINEAR if kind is not Kind.MAIN_GRAD else WEIGHT)
    found, far = edits.nearest(functions, Code(record()), (), failure)
    assert [*found.values()] == functions
    built = [functions[0]] * (kind is not Kind.MAIN_GRAD)
    assert [found[number] for number in far] == built
    assert edits.nearest(functions[:1], Code(record()), (), failure)[1] == set()
    # It does not hide what runs around the module.
    functions[1] = changed("Layer.forward", F, "decoder.layers.*")
    assert [*edits.nearest(functions, Code(record()), (), failure)[0].values()] == functions


def test_the_innermost_module_around_it() -> None:
    """What ran in modules farther outside is farther away."""
    near, far = changed("Layer.forward", F, "decoder.layers.*"), changed("attach", F, "decoder")
    failure = wrong(Kind.INPUT, NORM)
    assert [*edits.nearest([far, near], Code(record()), (), failure)[0].values()] == [near]
    assert [*edits.nearest([far], Code(record()), (), failure)[0].values()] == [far]


@pytest.mark.parametrize(
    ("kind", "own", "first"),
    [
        (Kind.OUTPUT, "Product.forward", True),
        (Kind.OUTPUT, "Norm.forward", False),
        # Parts of losses are right if the gradients of activations are.
        (Kind.MAIN_GRAD, "loss_func", False),
        (Kind.MAIN_GRAD, "finalize", True),
        # What a script does to the model that it has built.
        (Kind.INITIAL, "set_seed", True),
    ],
)
def test_the_users_own_code(kind: Kind, own: str, first: bool) -> None:
    """It is first if it ran between what is right and what is wrong, whatever Megatron's did."""
    ledger = record(collective("reduce", module=LINEAR, direction=F), GRADIENTS)
    calls = ledger.sources.calls
    functions = tuple(dataclasses.replace(f, own=f.name == own) for f in calls.functions)
    sources = dataclasses.replace(
        ledger.sources, calls=dataclasses.replace(calls, functions=functions)
    )
    failure = wrong(kind, LINEAR if kind is Kind.OUTPUT else WEIGHT)
    assert Places(ledger, [failure]).ranked(failure, PARTIAL)[0][1].function != own
    ledger = dataclasses.replace(ledger, sources=sources)
    place = Places(ledger, [failure]).ranked(failure, PARTIAL)[0][1]
    assert ((place.function, place.clue) == (own, Clue.OWN)) is first


def test_a_change_that_ran_elsewhere() -> None:
    """One of a few, before what nothing speaks for; not what ran before the step alone."""
    code, functions = Code(record()), [changed(name, OTHER) for name in ("log", "report")]
    far, early = Place("m.py", 8, "log", Clue.REPLACES), changed("set_seed", C)
    names = ("Norm.forward", Clue.RAN), ("reduce", Clue.REDUCES), ("gather", Clue.AXIS)
    ran, *others = places = [Place("m.py", 1, *name) for name in names]
    add = functools.partial(edits.with_elsewhere, code=code)
    assert add([ran], functions) == [far, ran]
    assert add(others, functions) == [*others, far]
    assert add(places, functions) == [*places[:2], far]
    assert add([far], functions[1:]) == [far]
    many = [changed(name, OTHER) for name in ("log", "report", "aggregate", "train")]
    whole = dataclasses.replace(changed("", OTHER), line=0)  # any line of the file
    assert add([ran], [early]) == add([ran], many) == add([ran], [whole]) == [ran]


@pytest.mark.parametrize(("name", "is_first"), [("Linear.__init__", True), ("set_seed", False)])
def test_a_change_before_what_was_loaded(name: str, is_first: bool) -> None:
    """It is first if it led to what set the value."""
    code, sets = Code(record()), "Linear.reset_parameters"
    found = edits.with_elsewhere(
        [Place("m.py", 1, sets, Clue.RAN)],
        [changed(name, C)],
        code,
        code.named("m.py", sets),
        is_loaded=True,
    )
    assert [place.function for place in found] == ([name, sets] if is_first else [sets, name])


def test_what_has_no_name_of_its_own() -> None:
    """It is shown once, as what it is written in."""
    failure = wrong(Kind.OUTPUT, LINEAR)
    edit = changed("Linear.forward", F, LINEAR)
    made = Places(record(), [failure], changed=[edit]).of(diagnosed(failure, Explanation()))
    found = made.why.places
    names = [place.function for place in found]
    assert (names[0], len({*names})) == ("Linear.forward", 3)


def test_the_changed_line_of_what_other_evidence_names() -> None:
    """The clue may be another one: the line is that of the change."""
    failure = wrong(Kind.MAIN_GRAD)
    edit = ChangedFunction(
        "m.py", "Linear.__init__", 8, Execution.ELSEWHERE, ("",), (Phase.CONSTRUCTION,)
    )
    made = Places(record(NORMS), [failure], changed=[edit])
    _, first = made.ranked(failure, PARTIAL)[0]
    assert (first.function, first.clue, first.line) == ("Linear.__init__", Clue.MARKS, 8)


@pytest.mark.parametrize("is_near", [True, False])
def test_marks_of_unchanged_code(is_near: bool) -> None:
    """What the user changed may have removed them, if it ran near."""
    failure, near, far = (
        wrong(Kind.MAIN_GRAD),
        changed("finalize", Phase.GRADIENTS),
        changed("step", OTHER),
    )
    edit = dataclasses.replace(near if is_near else far, replaces=False)
    _, first = Places(record(NORMS), [failure], changed=[edit]).ranked(failure, PARTIAL)[0]
    marks = "Linear.__init__", Clue.MARKS
    assert (first.function, first.clue) == (("finalize", Clue.CHANGED) if is_near else marks)
