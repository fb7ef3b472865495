# SPDX-License-Identifier: Apache-2.0
"""Functions by where they ran, what passed, what names say; numbers and groups passed on."""

import dataclasses

import pytest

from megatron_ttrace.diagnose.code import (
    BUILDING,
    Code,
    Outcomes,
    choosing_without,
    communicates,
    loss_of,
    origins,
    tokens,
)
from megatron_ttrace.trace.collectives import (
    Calls,
    Function,
    FunctionCall,
    Ledger,
    Lookup,
    ModuleCode,
    Phase,
    Sources,
)
from megatron_ttrace.trace.executed import ChangedFunction, Execution
from megatron_ttrace.trace.findings import Loss
from megatron_ttrace.trace.records import Kind, Outcome
from tests.diagnose.judged_by_hand import judged
from tests.diagnose.ran_by_hand import FUNCTIONS, B, C, F, lookup, record, where

NAMES = list(FUNCTIONS)
LINEAR = "decoder.layers.*.linear"


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ((), ["f", "f.inner", "f.inner.<lambda>", "f.<lambda>"]),
        (("f",), ["f", "f.<lambda>"]),
        (("f.inner",), ["f.inner", "f.inner.<lambda>"]),
        (("f.not_run",), []),
    ],
)
def test_what_changed_inside_of_a_function(parts: tuple[str, ...], names: list[str]) -> None:
    """What has no name of its own belongs to what it is written in."""
    all_names = ["f", "f.inner", "f.inner.<lambda>", "f.<lambda>", "fine"]
    functions = tuple(Function("m.py", 1, name) for name in all_names)
    code = Code(Ledger(sources=Sources(calls=Calls(functions=functions))))
    edit = ChangedFunction("m.py", "f", 3, Execution.ELSEWHERE, parts=parts)
    assert [all_names[number] for number in code.changed(edit)] == names


def test_code() -> None:
    """Chains stay in a module and a part of the step; contexts are those of steps."""
    code = Code(record())

    def number(name: str) -> int:
        numbered_function = code.number(where(name, 99))
        assert numbered_function is not None
        return numbered_function

    def names(numbers: list[int]) -> list[str]:
        return [NAMES[function] for function in numbers]

    forward = LINEAR, Phase.FORWARD
    assert names(code.chain(number("reduce"), forward)) == ["reduce", "Linear.forward"]
    assert names(code.callers(number("reduce"), forward)) == ["Linear.forward"]
    built, offset = number("Linear.__init__"), number("offset")
    reset = number("Linear.reset_parameters")
    assert code.below(built, BUILDING) == {built: 0, offset: 1, reset: 1}
    assert code.below(built, BUILDING, {offset, reset}) == {built: 0}
    assert len(code.contexts[number("reduce")]) == 3
    assert not code.contexts[number("offset")]
    assert code.number("elsewhere.py:1 (f)") is None
    assert code.number("no place") is None


def test_outcomes() -> None:
    """A name passes if all its tensors of a kind do, in all layers."""
    outcomes = Outcomes(
        [
            judged(Kind.OUTPUT, "layers.0.a"),
            judged(Kind.OUTPUT, "layers.1.a", Outcome.DIVERGED),
            judged(Kind.OUTPUT, "layers.0.b"),
            judged(Kind.OUTPUT, "c", Outcome.UNCHECKED),
        ]
    )
    for name, is_right in (("layers.*.a", False), ("layers.*.b", True), ("c", False)):
        assert outcomes.count([(name, Phase.FORWARD)], Kind.OUTPUT) == (is_right, 0)
    assert outcomes.count([("layers.*.b", Phase.BACKWARD)], Kind.OUTPUT) == (0, 0)
    assert (outcomes.share(Kind.OUTPUT), outcomes.share(Kind.MAIN_GRAD)) == (0.5, 0.0)
    # A module that makes the right gradient of its input, and a wrong one of its weight.
    failed = Outcomes(
        [judged(Kind.GRAD_INPUT, "a"), judged(Kind.MAIN_GRAD, "a.w", Outcome.DIVERGED)]
    )
    assert failed.count([("a", Phase.BACKWARD)], Kind.MAIN_GRAD) == (0, 1)
    assert failed.count([("a", Phase.BACKWARD)], Kind.GRAD_INPUT) == (1, 0)
    # What is counted passes as a whole: one of all parameters.
    gradients = [judged(Kind.MAIN_GRAD, name) for name in "abcd"]
    counted = [judged(Kind.COUNTED, name, Outcome.DIVERGED) for name in "ae"]
    assert Outcomes([*gradients, *counted]).share(Kind.COUNTED) == 2 / 5
    experts = [judged(Kind.MAIN_GRAD, f"mlp.experts.{name}", Outcome.DIVERGED) for name in "ab"]
    outcomes = Outcomes([*gradients, *experts])
    names = ("", "c", "mlp.experts.a")
    assert [outcomes.share(Kind.MAIN_GRAD, name) for name in names] == [2 / 6, 0.0, 1.0]
    # The weights of many experts are not most of the model's; a group passes as a whole, too.
    weights = [judged(Kind.MAIN_GRAD, f"fc.weight{n}", Outcome.DIVERGED) for n in range(16)]
    assert Outcomes([*gradients, *weights]).share(Kind.MAIN_GRAD) == 1 / 5
    other = judged(Kind.HYPERPARAMETERS, "a", Outcome.DIVERGED)
    assert Outcomes([*gradients, other]).share(Kind.HYPERPARAMETERS) == 1 / 4


def test_marks_that_only_what_fails_has() -> None:
    """All failing parameters have them, and no other."""
    marked = {"a": ("x", "y"), "b": ("x", "z"), "c": ("z",)}
    outcomes = Outcomes([judged(Kind.MAIN_GRAD, name, Outcome.DIVERGED) for name in "ab"])
    assert outcomes.separating(Kind.MAIN_GRAD, marked) == {"x"}
    assert outcomes.separating(Kind.PARAM_DELTA, marked) == set()
    assert outcomes.separating(Kind.MAIN_GRAD, {**marked, "c": ("x",)}) == set()


def test_what_is_logged() -> None:
    """By a word in its name."""
    diverged = Outcome.DIVERGED
    verdicts = [judged(Kind.METRIC, "z_loss", diverged), judged(Kind.METRIC, "aux_loss")]
    verdicts += [judged(Kind.METRIC, "lossless"), judged(Kind.COUNTED, "a", diverged)]
    outcomes = Outcomes([*verdicts, judged(Kind.COUNTED, "a", diverged, index=4)])
    assert outcomes.losses() == {"z_loss": False, "aux_loss": True}
    assert outcomes.names(Kind.COUNTED) == {"a"}


def test_tokens() -> None:
    """Words in both spellings; numbers are none."""
    assert tokens("_AllToAll.forward_2d") == ("all", "to", "all", "forward", "d")


@pytest.mark.parametrize(
    ("name", "sends"),
    [
        ("all_to_all_sp2hp", True),
        ("_AllToAll.forward", True),
        ("AllToAllDispatcher.preprocess", False),
        ("AllToAllDispatcher.gather", True),
        ("gather_heads", True),
        ("all", False),
    ],
)
def test_communicates(name: str, sends: bool) -> None:
    """By any word for it in the name of the function, or of an autograd function's class."""
    assert communicates(Function("m.py", 1, name)) is sends


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("Router._apply_seq_aux_loss", Loss.SEQUENCE),
        ("Router._apply_aux_loss", Loss.AUXILIARY),
        ("z_loss_func", Loss.Z),
        ("loss_func", None),
    ],
)
def test_loss_of(name: str, loss: Loss | None) -> None:
    """The loss with most of its words in the name."""
    assert loss_of(Function("m.py", 1, name)) is loss


@pytest.mark.parametrize(
    ("module", "ran"),
    [
        ("layers.0.mixer", {"A.forward", "both", "engine"}),
        ("layers.0.mixer.linear", {"A.forward", "both", "engine"}),
        ("layers.1.mixer", {"B.forward", "both", "engine", "P.forward", "P.backward"}),
        # Both are inside of it.
        ("layers", {"A.forward", "B.forward", "both", "engine", "P.forward", "P.backward"}),
        # A layer without it.
        ("layers.2.mlp", set()),
    ],
)
def test_layers_of_several_kinds(module: str, ran: set[str]) -> None:
    """What only the forward pass of another layer's module led to did not run in this one."""
    names = ["A.forward", "both", "B.forward", "P.forward", "engine", "P.backward"]
    pairs = (0, -1), (1, 0), (2, -1), (1, 2), (3, 2)
    calls = [FunctionCall(*pair, "layers.*.mixer", F) for pair in pairs]
    calls += [FunctionCall(number, -1, "layers.*.mixer", B) for number in (4, 5)]
    modules = {f"layers.{n}.mixer": n for n in range(2)}
    codes = tuple(ModuleCode(forward=f"m.py:1 ({name}.forward)") for name in "AB")
    functions = tuple(Function("m.py", 1, name) for name in names)
    code = Code(Ledger(sources=Sources(modules, codes, calls=Calls(functions, tuple(calls)))))
    here = [*code.ran(("layers.*.mixer", F), module), *code.ran(("layers.*.mixer", B), module)]
    assert {names[number] for number in here} == ran


STEP, COUNT, FINALIZE, SCALE = range(4)
CALLED = ("step", "count", "finalize", "scale")
RIGHT = {"count": {"": (8.0,)}, "finalize": {"tokens": (8.0,)}, "scale": {"factor": (0.125,)}}


def ledger(numbers: dict[str, dict[str, tuple[float, ...]]]) -> Ledger:
    """A step counts tokens and finalizes; that scales."""
    functions = tuple(Function("m.py", 1, name) for name in CALLED)
    pairs = (STEP, -1), (COUNT, STEP), (FINALIZE, STEP), (SCALE, FINALIZE)
    calls = tuple(FunctionCall(*pair, "", Phase.OTHER) for pair in pairs)
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
        chosen = Lookup(FINALIZE, 1, group, 2, Phase.GRADIENTS)
        sources = Sources(calls=dataclasses.replace(calls, lookups=(chosen,)))
        known = dataclasses.replace(known, sources=sources)
        assert origins(known, numbered(RIGHT), [2.0]) == {first}


@pytest.mark.parametrize(
    ("axis", "part", "expected"),
    [("tp", None, {STEP}), ("dp", None, {FINALIZE}), ("dp", Phase.SCHEDULE, set())],
)
def test_a_share_of_the_size_of_the_error(
    axis: str, part: Phase | None, expected: set[int]
) -> None:
    """No group over data-parallel ranks was chosen; a schedule has fewer microbatches."""
    known = ledger(RIGHT | {"finalize": {"tokens": (4.0,)}, "scale": {"factor": (0.25,)}})
    calls = known.sources.calls
    functions = tuple(dataclasses.replace(function, part=part) for function in calls.functions)
    sources = Sources(calls=dataclasses.replace(calls, functions=functions))
    known = dataclasses.replace(known, sources=sources)
    assert origins(known, numbered(RIGHT), [2.0], [axis]) == expected


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
    assert choosing_without(known, {"dp"}) == ({number: 7} if lacks else {})
    assert choosing_without(known, {"pp"}) == {}
