# SPDX-License-Identifier: Apache-2.0
"""Where the code is that ran: files and lines of the Megatron that was imported."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.optimizer import leaves_of
from megatron_ttrace.trace.collectives import ModuleCode, Operation, Phase, Sources
from megatron_ttrace.trace.findings import Cause, Finding
from megatron_ttrace.trace.states import SCHEDULER

_OWN = str(Path(__file__).parents[1]) + os.sep
_TORCH = str(Path(torch.__file__).parent) + os.sep

_PHASES = (
    ("core/distributed/", Phase.GRADIENTS),
    ("core/optimizer/", Phase.OPTIMIZER),
)
"""Folders of Megatron whose collectives belong to no module."""


@functools.cache
def megatron_folder() -> str:
    """The folder of the package ``megatron`` that is imported, with a separator at its end."""
    found = importlib.util.find_spec("megatron.core")
    if found is None or found.origin is None:
        return ""
    return str(Path(found.origin).parents[1]) + os.sep


def in_megatron(file: str) -> bool:
    """Whether a source file is one of Megatron's."""
    folder = megatron_folder()
    return bool(folder) and file.startswith(folder)


def in_torch(file: str) -> bool:
    """Whether a source file is one of PyTorch's."""
    return file.startswith(_TORCH)


def is_own(file: str) -> bool:
    """Whether a source file is one of this package's, or has no place on disk."""
    return file.startswith((_OWN, "<"))


def phase_of(file: str, operation: Operation) -> Phase | None:
    """The part of the step that code of Megatron belongs to; ``None`` if it is a module's."""
    inside = file.removeprefix(megatron_folder())
    for folder, phase in _PHASES:
        if inside.startswith(folder):
            gathers = phase is Phase.GRADIENTS and operation is Operation.ALL_GATHER
            return Phase.PARAMETERS if gathers else phase
    return None


def is_schedule(file: str) -> bool:
    """Whether a source file is of Megatron's schedules, which run the model."""
    return file.startswith(f"{megatron_folder()}core/pipeline_parallel/") and in_megatron(file)


def scales_loss(function: type) -> bool:
    """Whether an autograd function adds the gradient of a loss of its own.

    All of Megatron's do it with a scale that schedules set (``MoEAuxLossAutoScaler`` in
    megatron/core/transformer/moe/moe_utils.py).
    """
    return hasattr(function, "set_loss_scale")


def enters_autograd(code: CodeType) -> bool:
    """Whether a function starts autograd's engine: what it calls was called by the engine.

    Megatron calls the engine itself in ``custom_backward``
    (megatron/core/pipeline_parallel/schedules.py).
    """
    return code.co_name in ("_engine_run_backward", "custom_backward")


def shown(code: CodeType, line: int = 0) -> str:
    """``megatron/core/tensor_parallel/layers.py:123 (ColumnParallelLinear.forward)``."""
    function = code.co_qualname.replace(".<locals>", "")
    return f"{_relative(code.co_filename)}:{line or code.co_firstlineno} ({function})"


def _relative(file: str) -> str:
    """A path from the folder that the package was imported from."""
    if in_megatron(file):
        return "megatron/" + Path(file.removeprefix(megatron_folder())).as_posix()
    folders = [folder for folder in sys.path if folder and file.startswith(folder + os.sep)]
    return Path(file.removeprefix(max(folders, key=len, default="") + os.sep)).as_posix()


def function_place(function: Any) -> str:
    """Where a function was defined; empty if it is not Python, or this package's own."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return "" if code is None or is_own(code.co_filename) else shown(code)


def class_place(kind: type, method: str) -> str:
    """Where ``kind.method`` is: of Megatron's own classes among its bases, the first.

    A layer of TransformerEngine is a base of Megatron's; the bare one is used where Megatron has
    no class in between.
    """
    places = [
        (code.co_filename, shown(code))
        for base in kind.__mro__
        if method in vars(base)
        and (code := getattr(inspect.unwrap(_plain(vars(base)[method])), "__code__", None))
    ]
    megatrons = [place for file, place in places if in_megatron(file)]
    others = [place for file, place in places if not is_own(file) and not in_torch(file)]
    return next(iter(megatrons or others), "")


def _plain(function: Any) -> Any:
    return getattr(function, "__func__", function)


def sources_of(
    chunks: Iterable[Names],
    functions: Callable[[str], ModuleCode],
    *,
    optimizer: Any,
    finalize: Any,
    step: Any,
) -> Sources:
    """The code that runs on this rank.

    Args:
        chunks: names of its model chunks.
        functions: the code that was seen in the module of a name, but its class's.
        optimizer: Megatron's, chained or not.
        finalize: what reduces the gradients after the last microbatch.
        step: the training script's forward step.
    """
    codes: dict[ModuleCode, int] = {}
    modules: dict[str, int] = {}
    inputs: list[str] = []
    places: dict[type, str] = {}
    for names in chunks:
        inputs = inputs or names.inputs
        for name, module in names.modules.items():
            kind = type(module)
            if kind not in places:
                places[kind] = class_place(kind, "forward")
            if not (place := places[kind]):
                # A layer that Megatron takes from elsewhere: the module that calls it.
                outer = modules.get(name.rpartition(".")[0])
                place = "" if outer is None else list(codes)[outer].forward
            code = dataclasses.replace(
                functions(name),
                forward=place,
                built=class_place(kind, "__init__"),
                described=class_place(kind, "sharded_state_dict"),
            )
            modules.setdefault(name, codes.setdefault(code, len(codes)))
    leaf = type(next(leaves_of(optimizer)))
    return Sources(
        modules,
        tuple(codes),
        class_place(leaf, "step_with_ready_grads") or class_place(leaf, "step"),
        function_place(finalize),
        function_place(step),
        inputs=tuple(inputs),
        optimizer_state=class_place(leaf, "sharded_state_dict"),
        loaders=_loaders(leaf),
    )


def _loaders(optimizer: type) -> dict[str, str]:
    """What loads a number of a checkpoint, by beginnings of their names; the last is any."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training import checkpointing

    return {
        SCHEDULER: class_place(OptimizerParamScheduler, "load_state_dict"),
        "param_groups[": class_place(optimizer, "load_state_dict"),
        "": function_place(checkpointing.load_checkpoint),
    }


BUILDERS = {
    Cause.LAYERS: "core/transformer/transformer_block.py:get_num_layers_to_build",
    Cause.RANDOM_STATE: "core/tensor_parallel/random.py:model_parallel_cuda_manual_seed",
}
"""``file:function``, relative to the package ``megatron``, of faults that happen while the model is
built: nothing that is traced leads to the function that went wrong."""


def builder_place(finding: Finding | None) -> str:
    """The place of a fault of the model's construction; empty for any other fault."""
    if finding is None or finding.cause not in BUILDERS:
        return ""
    file, _, function = BUILDERS[finding.cause].partition(":")
    line = _lines(file).get(function)
    return f"megatron/{file}" + (f":{line}" if line else "") + f" ({function})"


@functools.cache
def _lines(file: str) -> dict[str, int]:
    """Line of each function and class of a file of the imported Megatron."""
    try:
        source = Path(megatron_folder(), file).read_text(encoding="utf-8")
        nodes = list(ast.walk(ast.parse(source)))
    except (ImportError, OSError, ValueError, SyntaxError):
        return {}
    kinds = ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef
    return {node.name: node.lineno for node in reversed(nodes) if isinstance(node, kinds)}
