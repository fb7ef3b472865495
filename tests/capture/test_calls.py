# SPDX-License-Identifier: Apache-2.0
"""Functions of Megatron that run, with their callers; others are not reported."""

import math
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_ttrace.capture.calls import CallTap
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.quiet import Off
from megatron_ttrace.trace.collectives import Calls, Phase

MODEL = """
def build():
    return mark()
def mark(name="sequence_parallel"):
    return name
def forward(x):
    return primitive(x, 2.5)
def primitive(x, scaling_factor, *, coeff=None):
    return x * scaling_factor
"""
OPTIMIZER = """
def step(grads):
    for grad in grads:
        scale(grad)
def scale(grad):
    grad.mul_(2)
"""


RESULTS = """
def norm(grad):
    return grad / 2
def loss(tokens):
    return 0.25, tokens, "lm loss"
"""
LOOKUPS = """
def get_group(make):
    known = make()
    return known
def forward(make):
    return primitive(1, get_group(make))
def primitive(x, group):
    return reduce(x, group=group)
def reduce(x, *, group):
    return x
class Layer:
    def __init__(self, group):
        self.group = group
    def forward(self):
        return primitive(1, self.group)
"""


WRAPPER = """
def forward(model):
    return model(1.0)
def sync():
    return None
"""


def made(text: str, file: str) -> dict[str, Any]:
    """The functions of a file of Megatron's, which is imported."""
    module = types.ModuleType(f"megatron.made_{len(sys.modules)}")
    module.__file__ = sources.megatron_folder() + file
    exec(compile(text, module.__file__, "exec"), vars(module))
    sys.modules[module.__name__] = module
    return vars(module)


@pytest.fixture(autouse=True)
def forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No other test sees the modules that were made; these tests are no user's code."""
    monkeypatch.setattr(sources, "of_script", lambda file: file.startswith("/mine/"))
    before = {*sys.modules}
    yield
    for name in [name for name in sys.modules if name.startswith("megatron.made_")]:
        if name not in before:
            del sys.modules[name]


@pytest.fixture
def tap() -> Iterator[CallTap]:
    """Records."""
    tap = CallTap()
    tap.start()
    assert not tap.error
    yield tap
    tap.stop()


def named(calls: Calls) -> set[tuple[str, str, str, Phase]]:
    """The calls with names."""
    names = [one.name for one in calls.functions]
    return {
        (names[function], names[caller] if caller >= 0 else "", module, phase)
        for function, caller, module, phase in calls.calls
    }


def test_what_is_imported_late(tap: CallTap) -> None:
    """While a model is built: what is imported then, once that has ended."""
    model = made(MODEL, "core/m.py")
    tap.entered()
    late = made(WRAPPER, "core/late.py")
    module = next(m for m in sys.modules.values() if vars(m) is late)
    module.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    model["build"]()
    late["sync"]()
    module.__spec__ = None
    model["forward"](torch.ones(2))
    late["forward"](lambda x: x)
    assert {function for function, _, _, _ in named(tap.calls([]))} >= {"build", "forward"}
    assert {one.name for one in tap.calls([]).functions if one.file.endswith("late.py")} == {
        "forward"
    }


def test_calls(tap: CallTap) -> None:
    """Before a step, in a module, in a part of the step; what is called has its caller's part."""
    model, optimizer = made(MODEL, "core/m.py"), made(OPTIMIZER, "core/optimizer/o.py")
    tap.entered()
    place: list[tuple[str, Phase | None]] = [("", None)]
    model["build"]()
    tap.in_steps(lambda: place[0])
    place[0] = "layers.3.mlp", Phase.FORWARD
    model["forward"](torch.ones(2))
    place[0] = "layers.4.mlp", Phase.FORWARD
    model["forward"](torch.ones(2))
    place[0] = "", None
    optimizer["step"]([torch.ones(2)] * 200)
    tap.stop()
    model["build"]()
    weight = torch.nn.Parameter(torch.ones(1))
    weight.sequence_parallel, weight.allreduce = True, False
    calls = tap.calls([Names({}, {"layers.3.mlp.weight": weight}, {}, frozenset())])
    assert named(calls) == {
        ("build", "", "", Phase.CONSTRUCTION),
        ("mark", "build", "", Phase.CONSTRUCTION),
        ("forward", "", "layers.*.mlp", Phase.FORWARD),
        ("primitive", "forward", "layers.*.mlp", Phase.FORWARD),
        ("step", "", "", Phase.OPTIMIZER),
        ("scale", "step", "", Phase.OPTIMIZER),
    }
    assert calls.marks == {"layers.*.mlp.weight": ("allreduce", "sequence_parallel")}
    functions = {one.name: one for one in calls.functions}
    assert tap.numbers() == {functions["primitive"].where: {"scaling_factor": (2.5,)}}
    assert functions["primitive"].scales
    assert functions["scale"].scales
    assert functions["scale"].part is Phase.OPTIMIZER
    assert not functions["forward"].scales
    assert Calls.from_json(calls.to_json()) == calls


def test_a_wrapper_calls_the_model(tap: CallTap) -> None:
    """It is in the folder of what reduces gradients: the model is no part of that."""
    model, wrapper = made(MODEL, "core/m.py"), made(WRAPPER, "core/distributed/w.py")
    tap.in_steps(lambda: ("", None))
    wrapper["forward"](model["forward"])
    wrapper["sync"]()
    phases = {name: phase for name, _, _, phase in named(tap.calls([]))}
    forward = dict.fromkeys(("forward", "primitive"), Phase.FORWARD)
    assert phases == forward | {"sync": Phase.GRADIENTS}


def test_the_users_function_that_replaces_one_of_megatrons(tap: CallTap) -> None:
    """It is followed as Megatron's own."""
    other: dict[str, Any] = {"len": lambda: None}
    exec(compile("def primitive(*_):\n    return len()\n", "/mine/code.py", "exec"), other)
    functions = made(MODEL, "core/models/made.py")
    functions["primitive"] = other["primitive"]
    tap.in_steps(lambda: ("decoder", Phase.FORWARD))
    functions["forward"](1)
    assert named(tap.calls([])) == {
        ("forward", "", "decoder", Phase.FORWARD),
        ("primitive", "forward", "decoder", Phase.FORWARD),
    }
    assert [code.co_name for code in tap.replacing.values()] == ["primitive"]


def test_numbers_in_tensors(tap: CallTap) -> None:
    """Of one element, with the value at the call; read after the step, and none without a value."""
    model = made(MODEL, "core/m.py")
    tap.in_steps(lambda: ("mlp", Phase.FORWARD))
    factor = torch.full((1,), 4.0)
    model["primitive"](torch.ones(2), factor, coeff=torch.ones(3))
    factor.zero_()
    tap.in_steps(lambda: ("other", Phase.FORWARD))
    model["primitive"](torch.ones(2, device="meta"), torch.ones(1, device="meta"))
    tap.in_steps(lambda: ("odd", Phase.FORWARD))
    for odd in (torch.full((1,), 1j), torch.ones(1, dtype=torch.bool), torch.full((1,), math.nan)):
        model["primitive"](torch.ones(2), odd)
    tap.in_steps(lambda: ("mapped", Phase.FORWARD))
    torch.func.vmap(lambda row: model["primitive"](torch.ones(2), row))(torch.ones(3, 1))
    tap.stop()
    assert list(tap.numbers().values()) == [{"scaling_factor": (4.0,)}]


def test_results_that_are_numbers(tap: CallTap) -> None:
    """Also in a tuple; of other results nothing is kept. All are plain: a file has them."""
    functions = made(RESULTS, "core/m.py")
    tap.in_steps(lambda: ("", None))
    functions["norm"](torch.tensor(3.0))
    tap.in_steps(lambda: ("mlp", Phase.FORWARD))
    functions["norm"](Off(0.0))
    functions["loss"](torch.tensor(6, dtype=torch.int32))
    tap.stop()
    found = {where.split()[1]: known for where, known in tap.numbers().items()}
    assert found == {
        "(norm)": {"grad": (0.0, 3.0), "": (0.0, 1.5)},
        "(loss)": {"tokens": (6.0,), "": (0.25, 6.0)},
    }
    assert {type(value) for value in found["(norm)"]["grad"]} == {float}


def test_lookups_of_groups(tap: CallTap, group: dist.ProcessGroup) -> None:
    """By what got a group returned, or passed on one that it was not given itself."""
    functions = made(LOOKUPS, "core/m.py")
    tap.in_steps(lambda: ("mlp", Phase.FORWARD))
    functions["forward"](lambda: group)
    functions["Layer"](group).forward()
    tap.stop()
    calls = tap.calls([], lambda known: {group: "tp"}[known])
    found = {
        (calls.functions[lookup.function].name, lookup.line, *lookup[2:])
        for lookup in calls.lookups
    }
    assert found == {
        ("forward", 6, "tp", 1, Phase.FORWARD),
        ("Layer.forward", 15, "tp", 1, Phase.FORWARD),
    }
    assert Calls.from_json(calls.to_json()) == calls


@pytest.fixture
def group() -> dist.ProcessGroup:
    """Of one rank."""
    return dist.ProcessGroup(0, 1)


def test_a_function_that_runs_often_is_reported_no_more(tap: CallTap) -> None:
    """After it showed nothing new; until the next part of the job."""
    functions = made(OPTIMIZER, "core/optimizer/o.py")
    counted = 0
    note = tap._note

    def counting(*args: Any) -> Any:
        nonlocal counted
        counted += 1
        return note(*args)

    tap._note = counting  # type: ignore[method-assign]
    tap.in_steps(lambda: ("", None))
    functions["step"]([torch.ones(1)] * 1000)
    assert counted < 100
    before = counted
    functions["step"]([torch.ones(2)] * 9)
    assert counted - before <= 1
    tap.entered()
    functions["step"]([torch.ones(2)] * 9)
    assert 3 <= counted - before <= 10
    tap.in_steps(lambda: ("", None))
    functions["step"]([torch.ones(2)])
    assert counted < 110


BRANCHES = """
def forward(size):
    if size > 1:
        size = gather(size)
        size += 1
    return size
def gather(size):
    return size
"""


def test_lines_that_ran_in_one_run_only(tap: CallTap) -> None:
    """By function, with those that the other run did not call at all; none of an unknown run."""
    functions = made(BRANCHES, "core/m.py")
    functions["forward"](1)
    tap.entered()
    functions["forward"](1)
    alone = tap.lines()
    assert list(alone.values()) == [f"{0b10010:x}"]
    functions["forward"](2)
    functions["forward"](1)
    assert [where.split()[1] for where in tap.apart(alone)] == ["(forward)", "(gather)"]
    assert tap.apart(tap.lines()) == tap.apart({}) == ()


def test_an_error_is_kept() -> None:
    """Never raised in the job; nothing is recorded after it."""

    def fail() -> tuple[str, Phase | None]:
        raise ValueError("broken")

    tap = CallTap()
    tap.start()
    functions = made(OPTIMIZER, "core/schedule.py")
    tap.in_steps(fail)
    functions["step"]([torch.ones(1)])
    tap.stop()
    assert "broken" in tap.error


def test_no_room_for_a_tool() -> None:
    """Other tools use all: nothing is recorded, and that is known."""
    free = [tool for tool in range(6) if sys.monitoring.get_tool(tool) is None]
    for tool in free:
        sys.monitoring.use_tool_id(tool, "test")
    try:
        tap = CallTap()
        tap.start()
        tap.stop()
    finally:
        for tool in free:
            sys.monitoring.free_tool_id(tool)
    assert tap.error
    assert tap.calls([]) == Calls()
    assert tap.lines() == {}
