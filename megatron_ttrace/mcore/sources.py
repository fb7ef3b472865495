# SPDX-License-Identifier: Apache-2.0
"""Where the code is that ran: files and lines of the Megatron that was imported."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import opcode
import os
import re
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from megatron_ttrace.mcore.contents import packages_of
from megatron_ttrace.mcore.names import Names
from megatron_ttrace.mcore.optimizer import leaves_of
from megatron_ttrace.trace.collectives import (
    Function,
    ModuleCode,
    Numbers,
    Operation,
    Phase,
    Sources,
    pattern,
)
from megatron_ttrace.trace.executed import Edit
from megatron_ttrace.trace.states import SCHEDULER

_OWN = str(Path(__file__).parents[1]) + os.sep
_LAUNCH = str(Path(__file__).resolve().parents[2] / "launch") + os.sep
"""In a checkout of this package: Megatron-LM's own script, patched."""
_TORCH = str(Path(torch.__file__).parent) + os.sep
_STDLIB = sysconfig.get_path("stdlib") + os.sep
_PROGRAMS = sysconfig.get_path("scripts") + os.sep
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")

_PHASES = (
    ("core/distributed/", Phase.GRADIENTS),
    ("core/optimizer/", Phase.OPTIMIZER),
)
"""Folders of Megatron whose collectives belong to no module."""


@functools.cache
def megatron_folder() -> str:
    """The folder of the package ``megatron`` that is imported, with a separator at its end."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        return ""
    return str(Path(spec.origin).parents[1]) + os.sep


@functools.cache
def _checkout() -> str:
    return str(Path(megatron_folder()).parent) + os.sep


@functools.cache
def in_megatron(file: str) -> bool:
    """Whether a source file is one of Megatron's, or of Megatron-Bridge's, wherever that is."""
    return file.startswith(_parts())


@functools.cache
def _parts() -> tuple[str, ...]:
    """The folders of the package ``megatron``, which may be several, with separators."""
    spec = importlib.util.find_spec("megatron")
    folders = (spec and spec.submodule_search_locations) or ()
    return tuple(os.path.join(folder, "") for folder in folders)


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is neither Megatron's, this package's, Python's, nor installed."""
    return bool(file) and not (in_megatron(file) or is_own(file) or is_installed(file))


@functools.cache
def is_installed(file: str) -> bool:
    """Whether a source file is Python's, or one of a package that pip installed."""
    standard = file.startswith((_STDLIB, _TORCH, _PROGRAMS, *_targets(tuple(sys.path[1:]))))
    return standard or _INSTALLED.search(file) is not None


@functools.cache
def _targets(path: tuple[str, ...]) -> list[str]:
    """Folders on the path that pip installed into (``--target``): it describes packages there."""
    return [os.path.join(folder, "") for folder in path if [*Path(folder).glob("*.dist-info")]]


@functools.cache
def _script_folder() -> str:
    """The folder of the training script, with a separator at its end."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return str(Path(file).absolute().parent) + os.sep if file else ""


@functools.cache
def of_script(file: str) -> bool:
    """Whether a source file is the training script, one below its folder, or a user's module.

    A library that is installed as a checkout may look like the user's, but Megatron imports it.
    """
    if not is_users(file):
        return False
    below = bool(folder := _script_folder()) and os.path.abspath(file).startswith(folder)
    return below or _package_of(file) not in libraries()


def libraries() -> frozenset[str]:
    """The packages that Megatron's modules import, and those that are called as it is."""
    return _libraries(len(sys.modules))


@functools.cache
def _libraries(_: int) -> frozenset[str]:
    files = {str(getattr(module, "__file__", "")) for module in [*sys.modules.values()]}
    sources = (file for file in files if file.endswith(".py") and in_megatron(file))
    return frozenset({"megatron"}.union(*map(packages_of, sources)))


def replacements(codes: Iterable[CodeType]) -> list[Edit]:
    """The user's functions that this code belongs to."""
    lines = {(relative(c.co_filename), outermost(c)): c.co_firstlineno for c in codes}
    # Whether they were seen to run is not known: they can run before anything is recorded.
    return [
        Edit(file, name, line, is_seen=False, replaces=True) for (file, name), line in lines.items()
    ]


@functools.cache
def in_torch(file: str) -> bool:
    """Whether a source file is one of PyTorch's."""
    return file.startswith(_TORCH)


@functools.cache
def is_own(file: str) -> bool:
    """Whether a source file is one of this package's, or has no place on disk."""
    return file.startswith((_OWN, "<"))


def phase_of(file: str, operation: Operation) -> Phase | None:
    """The part of the step that code of Megatron belongs to; ``None`` if it is a module's."""
    phase = _phase_of_folder(file)
    gathers = phase is Phase.GRADIENTS and operation is Operation.ALL_GATHER
    return Phase.PARAMETERS if gathers else phase


@functools.cache
def _phase_of_folder(file: str) -> Phase | None:
    inside = file.removeprefix(megatron_folder())
    return next((phase for folder, phase in _PHASES if inside.startswith(folder)), None)


@functools.cache
def part_of(file: str) -> Phase | None:
    """The part of the step that all code of a file belongs to; ``None`` if none."""
    if of_script(file):
        return Phase.SCRIPT
    return Phase.SCHEDULE if is_schedule(file) else _phase_of_folder(file)


MARKS = (
    *("allreduce", "average_gradients_across_tp_domain", "expert_tp", "is_embedding_parameter"),
    *("is_embedding_or_output_parameter", "is_qkv", "sequence_parallel", "shared"),
    *("shared_embedding", "tensor_model_parallel", "use_muon"),
)
"""Attributes by which Megatron selects parameters for reductions, norms, shards and optimizers."""

_AXES = {
    "tp": ("tp", "tensor"),
    "pp": ("pp", "pipeline", "embd"),
    "cp": ("cp", "context"),
    "ep": ("ep", "expert", "expt"),
    "dp": ("dp", "data"),
    "microbatches": ("microbatch", "microbatches"),
    "tokens": ("token", "tokens"),
}
"""Words in names of Megatron's that stand for an axis of the mesh, or another divisor."""
_AXIS_OF = {word: axis for axis, words in _AXES.items() for word in words}
_WORD = re.compile(r"[A-Za-z]\w*")
_SCALING = frozenset(("mul", "div", "scale", "scaled", "scaling"))
_FACTOR = re.compile(r"scal|factor|coeff")
"""In the names of factors."""
_MOVING = frozenset(("copy_", "zero_", "fill_", "clone"))
_BINARY_OP, _FOR_ITER = opcode.opmap["BINARY_OP"], opcode.opmap["FOR_ITER"]
_CACHE, _EXTENDED_ARG = opcode.opmap["CACHE"], opcode.opmap["EXTENDED_ARG"]
_ATTRIBUTES = {opcode.opmap["LOAD_ATTR"]: 1, opcode.opmap["STORE_ATTR"]: 0}
"""Operations on attributes, and what their operands have below the number of the name."""
_VARIABLES = {
    number: 15 if name.count("_FAST") > 1 else -1
    for name, number in opcode.opmap.items()
    if name == "LOAD_DEREF" or re.search(r"LOAD_FAST(_BORROW|_CHECK)?$", name)
}
"""Operations that load a variable last, and the bits of their operands that number it."""
_PRODUCTS = frozenset(
    (_BINARY_OP, number)
    for number, (_, sign) in enumerate(getattr(opcode, "_nb_ops", ()))
    if sign in ("*", "/", "//", "*=", "/=", "//=")
)
"""Operations that multiply or divide, and their operands."""
_SHARDING = "_build_gbuf_range_map"
"""The method of ``DistributedOptimizer`` that divides a buffer's buckets among ranks."""
_UNRELATED = ("training", "call_super_init", "dump_patches")
"""Attributes of every module of PyTorch's."""
_UNMARKED = {"allreduce": True, "use_muon": True}
"""What Megatron takes a mark for where it is not set, if not for false."""
_NO_PARAMETERS = ("self", "config", "args")
"""Names of what has options, some of which are called like marks."""


def marks_of(parameter: Any) -> tuple[str, ...]:
    """The marks of a parameter that are not as on one without marks."""
    usual = ((mark, _UNMARKED.get(mark, False)) for mark in MARKS)
    return tuple(mark for mark, none in usual if bool(getattr(parameter, mark, none)) != none)


def function_of(code: CodeType) -> Function:
    """What the code of a function that ran says about it.

    This is stored with a trace, so of texts only Megatron's: the user's may be secret.
    """
    strings = [text for text in code.co_consts if isinstance(text, str) and _WORD.fullmatch(text)]
    tuples = [constant for constant in code.co_consts if isinstance(constant, tuple)]
    keywords = [word for words in tuples for word in words if isinstance(word, str)]
    # Python makes these anew each time.
    instructions, locals_, cells = code.co_code, code.co_varnames, code.co_cellvars
    names = [*code.co_names, *locals_, *cells, *code.co_freevars]
    words = {*"_".join((*names, *strings, *keywords)).lower().split("_")}
    axes = {_AXIS_OF[word] for word in words & _AXIS_OF.keys()}
    arguments = code.co_argcount + code.co_kwonlyargcount
    local = {*locals_[arguments:], *cells} - {*locals_[:arguments]}
    operations, operands = instructions[::2], instructions[1::2]
    is_megatrons = in_megatron(code.co_filename)
    names += [*strings, *keywords] if is_megatrons else []
    mentioned = {*strings, *keywords, *_attributes(code)}
    return Function(
        file=relative(code.co_filename),
        line=code.co_firstlineno,
        name=code.co_qualname.replace(".<locals>", ""),
        part=part_of(code.co_filename),
        own=of_script(code.co_filename) and not code.co_filename.startswith((_checkout(), _LAUNCH)),
        size=len(instructions),
        scales=not _PRODUCTS.isdisjoint(zip(operations, operands, strict=True))
        or not _SCALING.isdisjoint("_".join(code.co_names).split("_")),
        moves=not _MOVING.isdisjoint(code.co_names),
        loops=_FOR_ITER in operations,
        marks=tuple(mark for mark in MARKS if mark in mentioned),
        axes=tuple(axis for axis in _AXES if axis in axes),
        strings=tuple(dict.fromkeys(strings)) if is_megatrons else (),
        sets=tuple(filter(_FACTOR.search, sorted(local))),
        factors=tuple(dict.fromkeys(filter(_FACTOR.search, names))),
    )


def _attributes(code: CodeType) -> set[str]:
    """Names of attributes that a function uses, but a module's own, and options of a job.

    Constructors mark parameters by such options. ``dis`` takes a second for a step's functions.
    """
    if code.co_name == "__init__" or {*code.co_names}.isdisjoint(MARKS):
        return {*code.co_names}
    cells = [name for name in code.co_cellvars if name not in code.co_varnames]
    variables = *code.co_varnames, *cells, *code.co_freevars
    used, owner, high = set(), "", 0
    for operation, low in zip(code.co_code[::2], code.co_code[1::2], strict=True):
        operand = high | low
        high = operand << 8 if operation == _EXTENDED_ARG else 0
        if operation in _ATTRIBUTES:
            name = code.co_names[operand >> _ATTRIBUTES[operation]]
            if owner not in _NO_PARAMETERS:
                used.add(name)
            owner = name
        elif operation in _VARIABLES:
            owner = variables[operand & _VARIABLES[operation]]
        elif operation not in (_CACHE, _EXTENDED_ARG):
            owner = ""
    return used


def is_schedule(file: str) -> bool:
    """Whether a source file is of Megatron's schedules, which run the model."""
    return file.startswith(f"{megatron_folder()}core/pipeline_parallel/") and in_megatron(file)


def enters_autograd(code: CodeType) -> bool:
    """Whether a function starts autograd's engine: what it calls was called by the engine.

    Megatron calls the engine itself in ``custom_backward``
    (megatron/core/pipeline_parallel/schedules.py).
    """
    return code.co_name in ("_engine_run_backward", "custom_backward")


def shown(code: CodeType, line: int = 0) -> str:
    """``megatron/core/tensor_parallel/layers.py:123 (ColumnParallelLinear.forward)``."""
    function = code.co_qualname.replace(".<locals>", "")
    return f"{relative(code.co_filename)}:{line or code.co_firstlineno} ({function})"


def outermost(code: CodeType) -> str:
    """The function that code belongs to, which may be inside of it."""
    return code.co_qualname.partition(".<locals>")[0]


@functools.cache
def relative(file: str) -> str:
    """A path from the folder that the package was imported from."""
    if in_megatron(file):
        folder = next(part for part in _parts() if file.startswith(part))
        return "megatron/" + Path(file.removeprefix(folder)).as_posix()
    folders = [folder for folder in sys.path if folder and file.startswith(folder + os.sep)]
    return Path(file.removeprefix(max(folders, key=len, default="") + os.sep)).as_posix()


def _package_of(file: str) -> str:
    """What a program imports that the file is, or is in."""
    return relative(file).partition("/")[0].removesuffix(".py")


def function_place(function: Any) -> str:
    """Where a function was defined; empty if it is not Python, or this package's own."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    return "" if code is None or is_own(code.co_filename) else shown(code)


def class_place(kind: type, method: str) -> str:
    """Where ``kind.method`` is: in the first class of Megatron's or the user's among its bases.

    A layer of TransformerEngine is a base of Megatron's; the bare one is used where Megatron has
    no class in between.
    """
    definitions = [vars(base)[method] for base in kind.__mro__ if method in vars(base)]
    functions = [getattr(function, "__func__", function) for function in definitions]
    codes = [getattr(inspect.unwrap(function), "__code__", None) for function in functions]
    places = [(code.co_filename, shown(code)) for code in codes if code]
    near = [place for file, place in places if in_megatron(file) or is_users(file)]
    foreign = [place for file, place in places if not is_own(file) and not in_torch(file)]
    return next(iter(near or foreign), "")


def attributes_of(chunks: Iterable[Names]) -> Numbers:
    """The numbers that modules have as attributes, by module.

    What is equal in all layers is noted once, for the name with ``*`` in the place of the layer.
    """
    named = [item for names in chunks for item in names.modules.items()]
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for name, module in named:
        for attribute, value in vars(module).items():
            if type(value) in (int, float, bool) and attribute not in _UNRELATED:
                found[pattern(name), attribute][name] = float(value)
    numbers: Numbers = defaultdict(dict)
    for (alike, attribute), values in found.items():
        is_one = len({*values.values()}) == 1
        for name, value in values.items() if math.isfinite(sum(values.values())) else ():
            numbers[alike if is_one else name][attribute] = (value,)
    return dict(numbers)


def sources_of(
    chunks: Iterable[Names],
    functions: Callable[[str], ModuleCode],
    *,
    optimizer: Any,
    finalize: Any,
    step: Any,
) -> Sources:
    """The code that runs on this rank.

    ``functions`` is the code that was seen in the module of a name, but its class's. ``finalize``
    reduces the gradients after the last microbatch, ``step`` is the script's forward step.
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
        sharding=next(
            filter(None, (class_place(type(part), _SHARDING) for part in leaves_of(optimizer))), ""
        ),
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
