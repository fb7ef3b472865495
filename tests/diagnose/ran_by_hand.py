# SPDX-License-Identifier: Apache-2.0
"""The record of a step that no job ran."""

from __future__ import annotations

from typing import Any

from megatron_ttrace.trace.collectives import (
    Calls,
    Collective,
    Function,
    FunctionCall,
    Ledger,
    Lookup,
    ModuleCode,
    Operation,
    Phase,
    Sources,
    pattern,
)
from megatron_ttrace.trace.counted import Statistic
from megatron_ttrace.trace.findings import Cause, ConstantFactor, Finding, Lack, Miscounted
from megatron_ttrace.trace.judged import Judged
from megatron_ttrace.trace.records import Kind, Outcome
from tests.diagnose.judged_by_hand import judged

LINEAR, NORM, MODEL = "decoder.layers.0.linear", "decoder.layers.0.norm", "model"
LAYER, WEIGHT = "decoder.layers.0", f"{LINEAR}.weight"

F, B, G = Phase.FORWARD, Phase.BACKWARD, Phase.GRADIENTS
U, S, C = Phase.OPTIMIZER, Phase.SCHEDULE, Phase.CONSTRUCTION


def where(name: str, line: int = 1) -> str:
    """A function of the file ``m.py``."""
    return f"m.py:{line} ({name})"


FUNCTIONS: dict[str, dict[str, Any]] = {
    "Linear.forward": {"axes": ("tp",), "size": 400},
    "reduce": {"size": 100, "factors": ("scaling_factor",)},
    "gather": {"axes": ("tp",)},
    "Norm.forward": {"size": 100},
    "Product.forward": {"size": 300, "factors": ("scaling_factor",)},
    "Product.backward": {"size": 300, "scales": True},
    "Product.set_scale": {"factors": ("scaling_factor",)},
    "run": {"part": S, "scales": True, "axes": ("microbatches",), "size": 800},
    "Linear.__init__": {"marks": ("sequence_parallel",), "size": 400},
    "offset": {"axes": ("pp",), "scales": True, "size": 100},
    "Linear.reset_parameters": {"moves": True, "size": 100},
    "set_seed": {},
    "finalize": {"part": G, "size": 400, "loops": True},
    "reduce_norms": {"part": G, "marks": ("sequence_parallel",), "axes": ("tp",), "size": 400},
    "sync_grads": {
        "part": G,
        "axes": ("dp",),
        "size": 400,
        "scales": True,
        "factors": ("scaling_factor",),
    },
    "step": {"part": U, "size": 400},
    "clip_by_norm": {"part": U, "scales": True, "size": 200},
    "log": {"size": 200},
    "aggregate": {"size": 200, "scales": True},
    "report": {"size": 200},
    "Tracker.aggregate": {"size": 200},
    "Tracker.record": {"size": 100},
    "attach": {"size": 100, "factors": ("aux_loss_coeff",), "scales": True},
    "Layer.forward": {"size": 200},
    "Layer.__call__": {"size": 100},
    "scale_loss": {"part": U, "factors": ("get_loss_scale",), "scales": True},
    "build_groups": {"part": U, "size": 400},
    "Buffer.__init__": {
        "part": G,
        "factors": ("scaling_factor",),
        "moves": True,
        "size": 6400,
    },
    "wrap": {
        "part": G,
        "axes": ("dp",),
        "factors": ("scaling_factor",),
        "sets": ("scaling_factor",),
    },
    "router_loss": {"strings": ("z_loss",), "size": 200},
    "all_to_all_heads": {},
    "copy_grads": {"part": U, "size": 100},
    "sync_params": {"part": G, "size": 100},
    "apply_aux_loss": {"scales": True},
    "Model.__init__": {},
    "pipeline_layers": {"axes": ("pp",)},
    "filter_grads": {"part": U, "size": 100},
    "is_shared": {"marks": ("shared",), "size": 100},
    "count_zeros": {"part": U, "size": 100},
    "checkpoint": {"size": 200},
    "get_rng_states": {"size": 200},
    "set_rng_seed": {},
    "get_rng_tracker": {},
    "Linear.forward.<genexpr>": {"size": 300},
    "divide_batch": {"size": 200},
    "get_batch": {"part": Phase.SCRIPT, "size": 200},
    "hook": {"part": Phase.SCRIPT, "size": 200},
    "loss_func": {"part": Phase.SCRIPT, "size": 200},
    "divide_parameters": {"part": U, "marks": ("is_embedding_parameter",), "size": 400},
    "calc_params_norm": {"size": 200},
    "sum_of_squares": {"size": 100},
    "Calculator.update_microbatches": {"size": 100},
    "Linear.backward_dw": {"size": 100},
    "Optimizer._copy_model_params_to_main_params": {"part": U, "size": 100},
    "Config.__post_init__": {},
    "scaled_init_method": {},
    "prepare": {"size": 32},
    "train": {},
    "Scheduler.step": {},
    "freeze_layers": {},
}
_NUMBERS = {name: number for number, name in enumerate(FUNCTIONS)}
_CALLS = [
    *[("get_batch", "", "", Phase.SCRIPT), ("prepare", "", MODEL, F)],
    *[("Linear.forward", "", LINEAR, F), ("reduce", "Linear.forward", LINEAR, F)],
    *[("Norm.forward", "", NORM, F), ("reduce", "Norm.forward", NORM, F)],
    ("Product.forward", "Linear.forward", LINEAR, F),
    *[("Product.backward", "", LINEAR, B), ("reduce", "Product.backward", LINEAR, B)],
    ("gather", "Product.backward", LINEAR, B),
    ("Calculator.update_microbatches", "", "", Phase.CONSTRUCTION),
    *[("run", "train", "", S), ("Product.set_scale", "run", "", S)],
    *[("Linear.__init__", "", "", C), ("offset", "Linear.__init__", "", C)],
    *[("Linear.reset_parameters", "Linear.__init__", "", C), ("set_seed", "", "", C)],
    *[
        ("finalize", "", "", G),
        ("reduce_norms", "finalize", "", G),
        ("sync_grads", "finalize", "", G),
    ],
    *[("step", "", "", U), ("clip_by_norm", "step", "", U)],
    *[("filter_grads", "clip_by_norm", "", U), ("is_shared", "filter_grads", "", U)],
    *[("checkpoint", "", LAYER, B), ("get_rng_states", "checkpoint", LAYER, B)],
    *[("set_rng_seed", "", "", C), ("get_rng_tracker", "Layer.forward", LAYER, F)],
    *[("Linear.forward.<genexpr>", "Linear.forward", LINEAR, F), ("divide_batch", "", "", S)],
    *[("count_zeros", "step", "", U), ("divide_parameters", "", "", C)],
    *[("report", "", "", Phase.OTHER), ("log", "report", "", Phase.OTHER)],
    ("aggregate", "report", "", Phase.OTHER),
    ("router_loss", "", MODEL, F),
    *[("Tracker.aggregate", "report", "", Phase.OTHER), ("Tracker.record", "attach", MODEL, F)],
    ("attach", "", MODEL, F),
    *[("Layer.forward", "", LAYER, F), ("Layer.__call__", "Layer.forward", LAYER, F)],
    *[("Linear.forward", "Layer.__call__", LINEAR, F), ("hook", "Layer.forward", LAYER, F)],
    ("scale_loss", "run", "", U),
    *[("all_to_all_heads", "gather", LINEAR, B), ("copy_grads", "step", "", U)],
    *[("sync_params", "finalize", "", G), ("apply_aux_loss", "", MODEL, F)],
    *[("build_groups", "", "", C), ("wrap", "", "", C), ("Buffer.__init__", "wrap", "", C)],
    *[("Model.__init__", "", "", C), ("pipeline_layers", "Model.__init__", "", C)],
    ("loss_func", "run", "", Phase.SCRIPT),
    ("Linear.backward_dw", "run", "", S),
    ("Optimizer._copy_model_params_to_main_params", "", "", C),
    ("calc_params_norm", "", "", Phase.OTHER),
    ("sum_of_squares", "calc_params_norm", "", Phase.OTHER),
    *[("Config.__post_init__", "", "", C), ("scaled_init_method", "Config.__post_init__", "", C)],
    ("scaled_init_method", "Model.__init__", "", C),
    *[("train", "", "", Phase.OTHER), ("Scheduler.step", "train", "", Phase.OTHER)],
    ("freeze_layers", "", "", C),
]
CODES = (
    ModuleCode(
        forward=where("Linear.forward"),
        backward=where("Product.backward"),
        built=where("Linear.__init__"),
        user=where("run"),
    ),
    ModuleCode(forward=where("Norm.forward")),
    ModuleCode(forward="script.py:9 (Model.forward)", built=where("Model.__init__")),
)


def lookup(name: str, group: str, size: int = 2, phase: Phase = G) -> Lookup:
    """A function chooses a group."""
    return Lookup(_NUMBERS[name], 7, group, size, phase)


def collective(name: str, group: str = "tp", **more: Any) -> Collective:
    """A reduction that a function calls in its seventh line."""
    known = {"module": "", "direction": G, "bytes": 64, "operation": Operation.ALL_REDUCE}
    known["reduction"] = "sum"
    return Collective(
        iteration=1,
        group=group,
        size=2,
        dtype="float32",
        where=where(name, 7),
        count=1,
        ranks=(0, 1),
        **(known | more),
    )


def record(
    *collectives: Collective,
    marks: dict[str, tuple[str, ...]] | None = None,
    factors: dict[str, float] | None = None,
    lookups: tuple[Lookup, ...] = (),
) -> Ledger:
    """With all functions, each the first of its file's lines; some are given factors."""
    return Ledger(
        collectives,
        sources=Sources(
            {LINEAR: 0, NORM: 1, MODEL: 2},
            CODES,
            optimizer=where("step"),
            finalize=where("finalize"),
            step="script.py:1 (forward_step)",
            metrics={"z_loss": where("log")},
            calls=Calls(
                tuple(Function("m.py", 1, name, **known) for name, known in FUNCTIONS.items()),
                tuple(
                    FunctionCall(_NUMBERS[name], _NUMBERS.get(caller, -1), pattern(module), phase)
                    for name, caller, module, phase in _CALLS
                ),
                marks or {},
                lookups,
            ),
        ),
        numbers={where(name): {"scaling_factor": (f,)} for name, f in (factors or {}).items()},
    )


def large(*axes: str) -> Finding:
    """A factor by the size of axes."""
    return ConstantFactor(Cause.TOO_LARGE, axes, ratio=2.0)


def never(lack: Lack | None) -> Miscounted:
    """A norm lacks elements."""
    return Miscounted(
        Cause.NEVER_COUNTED, statistic=Statistic.GRAD_NORM, least=0, most=0, names=(), lack=lack
    )


def wrong(
    kind: Kind, name: str = WEIGHT, index: int = 0, outcome: Outcome = Outcome.DIVERGED
) -> Judged:
    """A failure."""
    return judged(kind, name, outcome, index=index)
