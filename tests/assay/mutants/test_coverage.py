# SPDX-License-Identifier: Apache-2.0
"""Lines that run, and the modules in which functions run."""

import importlib
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch.nn.modules import module as hooks

from tests.assay.mutants import coverage
from tests.assay.mutants.coverage import Coverage, Function
from tests.assay.mutants.records import Phase, Ran

LAYERS = textwrap.dedent(
    """
    import torch


    def helper(x):
        return x * 1


    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return undo(grad)

        @staticmethod
        def set(value):
            Scale.value = value


    def undo(grad):
        return grad * 2


    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.make()

        def make(self):
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x):
            return Scale.apply(helper(x)) * self.weight
    """
)
STEP = textwrap.dedent(
    """
    def step(model, x, loss):
        loss(model(x)).backward()
        reduce()


    def reduce():
        pass
    """
)


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Coverage:
    """A step of a model of two layers."""
    files: dict[str, Phase | None] = {}
    for name, text, phase in [("layers_here", LAYERS, None), ("step_here", STEP, Phase.GRADIENTS)]:
        (tmp_path / f"{name}.py").write_text(text)
        files[str(tmp_path / f"{name}.py")] = phase
    monkeypatch.syspath_prepend(str(tmp_path))
    used = sys.monitoring.get_tool
    before = [used(tool) for tool in range(6)]
    own = [hooks._global_forward_pre_hooks, hooks._global_forward_hooks]
    kept = [dict(one) for one in own]
    log = tmp_path / "lines" / "rank-0.jsonl"
    layers, step = (importlib.import_module(name) for name in ("layers_here", "step_here"))
    try:
        coverage.record(files, log)
        model = torch.nn.Module()
        model.layers = torch.nn.ModuleList([layers.Layer(), layers.Layer()])
        model.forward = lambda x: model.layers[1](model.layers[0](x))
        layers.helper(1)
        step.step(model, torch.ones(3, requires_grad=True), torch.sum)
        layers.Scale.set(1)
    finally:
        for tool in range(6):
            if before[tool] is None and used(tool) is not None:
                sys.monitoring.set_events(tool, 0)
                sys.monitoring.free_tool_id(tool)
        for one, old in zip(own, kept, strict=True):
            one.clear()
            one.update(old)
        del sys.modules["layers_here"], sys.modules["step_here"]
    return coverage.read([log])


def test_lines(found: Coverage) -> None:
    """Lines inside the functions that ran, of both files."""
    names = {(Path(file).stem, line) for file, line in found.lines}
    assert {("layers_here", 6), ("layers_here", 16), ("step_here", 3), ("step_here", 8)} <= names
    assert ("step_here", 2) not in names


def test_places(found: Coverage) -> None:
    """Forward, backward, constructor, and outside of modules."""
    ran = {function.qualname: function.ran for function in found.functions}
    layer = ("layers.*",)
    assert ran["helper"] == Ran(layer, (Phase.SETUP,))
    assert ran["Layer.make"] == ran["Layer.__init__"] == ran["Layer.forward"] == Ran(layer)
    assert ran["undo"] == ran["Scale.backward"] == ran["Scale.forward"] == Ran(layer)
    assert ran["Scale.set"] == Ran(layer, (Phase.LOGGING,))
    assert ran["step"] == ran["reduce"] == Ran((), (Phase.GRADIENTS,))


def test_where_a_mutated_line_ran() -> None:
    """In the innermost function around it, and where classes near it run."""
    functions = (
        Function("a", "outer", 1, 9, Ran((), (Phase.SCHEDULE,))),
        Function("a", "outer.<locals>.inner", 4, 5, Ran(("decoder",))),
        Function("b", "Scaler.forward", 1, 3, Ran(("router",))),
    )
    found = Coverage(set(), functions)
    assert found.ran("a", 2) == Ran((), (Phase.SCHEDULE,))
    assert found.ran("a", 5) == Ran(("decoder",))
    assert found.ran("a", 2, ["Scaler"]) == Ran(("router",), (Phase.SCHEDULE,))
    assert found.ran("c", 2) == Ran()
