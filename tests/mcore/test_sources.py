# SPDX-License-Identifier: Apache-2.0
"""Places are those of the Megatron that is imported, and of nothing in between."""

import dataclasses
import functools
import importlib.util
import json
import math
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ttrace.cpu.te import base
from megatron_ttrace.mcore import sources
from megatron_ttrace.mcore.imported import imported_code
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.trace.collectives import ModuleCode, Operation, Phase
from megatron_ttrace.trace.executed import Edit

HERE = "tests/mcore/test_sources.py"


class Own(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The code of this class."""
        return x


class Heir(Own):
    """Has no code of its own."""


class Optimizer:
    def step(self) -> None:
        """Not all have ``step_with_ready_grads``."""


def forward_step() -> None:
    """A training script's."""


def test_the_users_code_that_replaces_megatrons(monkeypatch: pytest.MonkeyPatch) -> None:
    """A function, a method and a class; of a library that Megatron imports, nothing."""
    module = types.ModuleType("megatron.made")
    module.__file__ = f"{sources.megatron_folder()}core/made.py"
    monkeypatch.setitem(sys.modules, module.__name__, module)
    known = {*sys.modules} - {module.__name__}
    layer = type("Layer", (), {"__module__": module.__name__, "forward": Own.forward})
    vars(module).update(f=forward_step, Layer=layer, Optimizer=Optimizer, linear=torch.nn.Linear)
    codes = [*imported_code(known, sources.in_megatron)]
    importlib.import_module("megatron.core.utils")
    assert {"torch", "megatron"} <= sources.libraries()
    for imported, names in (
        ("torch", ["forward_step", "Own.forward", "Optimizer.step"]),
        ("tests", []),
    ):
        monkeypatch.setattr(sources, "_libraries", lambda _, name=imported: {name})
        sources.of_script.cache_clear()
        of_script = [code for code in codes if sources.of_script(code.co_filename)]
        assert [code.co_qualname for code in of_script] == names
        assert [sources.function_of(code).own for code in of_script] == [True] * len(names)
    # Megatron-LM's own script is not the user's, wherever it is.
    launched = compile("", str(Path(sources.__file__).parents[2] / "launch" / "train.py"), "exec")
    assert not sources.function_of(launched).own
    sources.of_script.cache_clear()
    inner = (lambda: None).__code__
    name = "test_the_users_code_that_replaces_megatrons"
    edit = Edit(HERE, name, inner.co_firstlineno, is_seen=False, replaces=True)
    assert sources.replacements([inner]) == [edit]
    program = str(Path(sysconfig.get_path("scripts"), "ttrace"))
    foreign = "", sources.__file__, torch.__file__, types.__file__, program
    assert not any(map(sources.is_users, foreign))


def test_the_training_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the user's modules, but neither Megatron, its libraries, nor what is installed."""
    monkeypatch.setattr(
        sys.modules["__main__"], "__file__", str(tmp_path / "train.py"), raising=False
    )
    cached = (sources._script_folder, sources.of_script, sources.part_of)
    for function in cached:
        function.cache_clear()
    try:
        for name in ("train.py", "mine/losses.py", "../spec.py"):
            assert sources.of_script(str(tmp_path / name))
            assert sources.part_of(str(tmp_path / name)) is Phase.SCRIPT
        monkeypatch.setattr(sources, "_package_of", lambda file: Path(file).parts[-2])
        (tmp_path / "packages" / "made-1.0.dist-info").mkdir(parents=True)
        monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path / "packages")])
        others = "lib/site-packages/x.py", "../megatron/bridge.py", "packages/made/x.py"
        assert not any(sources.of_script(str(tmp_path / other)) for other in others)
        assert not sources.of_script(f"{sources.megatron_folder()}core/utils.py")
    finally:
        for function in cached:
            function.cache_clear()


def test_a_part_of_megatron_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Bridge may be a checkout of its own."""
    (tmp_path / "megatron" / "made").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    sources._parts.cache_clear()
    try:
        file = str(tmp_path / "megatron" / "made" / "x.py")
        assert sources.in_megatron(file)
        assert sources.relative(file) == "megatron/made/x.py"
        assert sources.in_megatron(f"{sources.megatron_folder()}core/x.py")
    finally:
        sources._parts.cache_clear()


def test_numbers_of_modules() -> None:
    """Those of layers are noted once where they are equal; what is no number, never."""
    layers = {f"decoder.layers.{number}": torch.nn.Module() for number in range(2)}
    for number, layer in enumerate(layers.values()):
        vars(layer).update(layer_number=number, is_moe=True, eps=1e-5, kind="x", none=None)
    layers["decoder"] = torch.nn.Dropout(math.nan)
    names = object.__new__(Names)
    object.__setattr__(names, "modules", layers)
    assert sources.attributes_of([names]) == {
        "decoder.layers.0": {"layer_number": (0.0,)},
        "decoder.layers.1": {"layer_number": (1.0,)},
        "decoder.layers.*": {"is_moe": (1.0,), "eps": (1e-5,)},
        "decoder": {"inplace": (0.0,)},
    }


def line_of(function: object) -> int:
    """The first line of a function."""
    return function.__code__.co_firstlineno  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("kind", [Own, Heir])
def test_class(kind: type) -> None:
    """The class that defines the method."""
    place = sources.class_place(kind, "forward")
    assert place.endswith(f"{HERE}:{line_of(Own.forward)} (Own.forward)")


def test_no_place() -> None:
    """Neither PyTorch's nor this package's code is what a user should look at."""
    assert sources.class_place(torch.nn.Linear, "forward") == ""
    assert sources.function_place(torch.no_grad) == ""
    assert sources.function_place(len) == ""
    assert sources.function_place(None) == ""
    assert sources.is_own(base.__file__)


def test_megatron_is_relative_to_its_package() -> None:
    """Wherever it is installed."""
    result = importlib.util.find_spec("megatron.core")
    assert result is not None
    assert result.origin is not None
    assert sources.in_megatron(result.origin)
    code = compile("pass", str(Path(result.origin).with_name("utils.py")), "exec")
    assert sources.shown(code, 12) == "megatron/core/utils.py:12 (<module>)"


@pytest.mark.parametrize(
    ("file", "operation", "phase"),
    [
        ("core/distributed/param_and_grad_buffer.py", Operation.ALL_REDUCE, Phase.GRADIENTS),
        ("core/distributed/param_and_grad_buffer.py", Operation.ALL_GATHER, Phase.PARAMETERS),
        ("core/optimizer/clip_grads.py", Operation.ALL_REDUCE, Phase.OPTIMIZER),
        ("core/optimizer/clip_grads.py", Operation.ALL_GATHER, Phase.OPTIMIZER),
        ("core/tensor_parallel/mappings.py", Operation.ALL_REDUCE, None),
    ],
)
def test_phase(file: str, operation: Operation, phase: Phase | None) -> None:
    """By the folder of Megatron."""
    assert sources.phase_of(sources.megatron_folder() + file, operation) is phase


def test_names_of_factors() -> None:
    """Those that a function names, and those that it computes itself."""

    def reduce(scale: float, config: Any) -> Any:
        weight_factor = scale * config.loss_coeff
        return forward_step(gradient_scale=weight_factor)

    file = f"{sources.megatron_folder()}core/made.py"
    function = sources.function_of(reduce.__code__.replace(co_filename=file))
    assert {*function.factors} == {"scale", "loss_coeff", "weight_factor", "gradient_scale"}
    assert function.sets == ("weight_factor",)


def test_texts_of_the_users_functions_are_not_kept() -> None:
    """They are stored with a trace, and may be secret."""

    def log_in(scale: float) -> Any:
        return forward_step(("alice", "scalpel"), key="hunter2", group="sequence_parallel")

    function = sources.function_of(log_in.__code__)
    kept = json.dumps(dataclasses.asdict(function), default=str)
    assert not any(text in kept for text in ("alice", "scalpel", "hunter2"))
    assert (function.strings, function.factors, function.marks) == (
        (),
        ("scale",),
        ("sequence_parallel",),
    )
    file = f"{sources.megatron_folder()}core/made.py"
    theirs = sources.function_of(log_in.__code__.replace(co_filename=file))
    assert "hunter2" in theirs.strings


def test_marks_in_a_list() -> None:
    """A function that copies marks may have their names in a list."""

    def copy(old: Any, new: Any) -> None:
        for name in ["requires_grad", "shared", "sequence_parallel"]:
            setattr(new, name, getattr(old, name))

    assert sources.function_of(copy.__code__).marks == ("sequence_parallel", "shared")


def test_options_are_no_marks() -> None:
    """A module has an option of the same name; its parameter has the mark."""

    def options(self: Any, config: Any) -> Any:
        self.sequence_parallel = config.sequence_parallel
        return self.config.sequence_parallel and self.sequence_parallel

    def mark(self: Any) -> Any:
        self.weight.sequence_parallel = self.config.sequence_parallel

    assert sources.function_of(options.__code__).marks == ()
    constructor = options.__code__.replace(co_name="__init__")
    assert sources.function_of(constructor).marks == ("sequence_parallel",)
    assert sources.function_of(mark.__code__).marks == ("sequence_parallel",)


@pytest.mark.parametrize(
    ("attributes", "marks"),
    [({}, ()), ({"allreduce": True}, ()), ({"allreduce": False}, ("allreduce",))],
)
def test_marks(attributes: dict[str, bool], marks: tuple[str, ...]) -> None:
    """What Megatron takes for set if it is missing is a mark if it is not set."""
    parameter = torch.nn.Parameter(torch.ones(1))
    vars(parameter).update(attributes)
    assert sources.marks_of(parameter) == marks


def test_sources() -> None:
    """A module without code of its own has that of the module that calls it; equal ones once."""
    modules = {
        "decoder": Own(),
        "decoder.norm": torch.nn.LayerNorm(2),
        "decoder.0": Own(),
        "decoder.1": Heir(),
    }
    functions = {"decoder.0": ModuleCode(backward="back.py:1 (f)")}
    result = sources.sources_of(
        [Names(modules, {}, {}, frozenset())],
        lambda name: functions.get(name, ModuleCode()),
        optimizer=Optimizer(),
        finalize=functools.partial(forward_step),
        step=None,
    )
    forward = sources.class_place(Own, "forward")
    assert result.codes == (ModuleCode(forward), ModuleCode(forward, "back.py:1 (f)"))
    assert result.modules == {"decoder": 0, "decoder.norm": 0, "decoder.0": 1, "decoder.1": 0}
    assert result.of("decoder.norm.deeper") == ModuleCode(forward)
    assert result.of("elsewhere") is None
    assert result.finalize.endswith(f"{HERE}:{line_of(forward_step)} (forward_step)")
    assert result.optimizer == sources.class_place(Optimizer, "step") != ""
    assert result.step == ""
