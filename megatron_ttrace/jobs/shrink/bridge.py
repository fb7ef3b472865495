# SPDX-License-Identifier: Apache-2.0
"""A configuration of Megatron-Bridge as the flags of a Megatron-LM command, and back.

``jobs/shrink`` shrinks flags; what it changes is set in the configuration.
"""

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_ttrace.jobs.shrink import patterns
from megatron_ttrace.jobs.shrink.axes import borrowed
from megatron_ttrace.jobs.shrink.case import ENDS
from megatron_ttrace.jobs.shrink.command_flags import CommandFlags
from megatron_ttrace.mcore.fronts import bridge_small
from megatron_ttrace.mcore.fronts.bridge_options import Options
from megatron_ttrace.mcore.options.roles import ROLES, Role

VOCABULARY = bridge_small.VOCABULARY
DATA = "--data"
"""Before the folder of a small job's data, among its flags."""
_ROLES = (Role.SIZE, Role.AXIS, Role.CODE, Role.LAYOUT, Role.DATA)
"""Of options that are a job's; the others are about its length, files and logs."""
_OWN = frozenset({"vocab_size", "padded_vocab_size", "dataloader_type"})
"""Options that the driver sets."""
_LEFT = frozenset({"load", "pretrained_checkpoint", "save", "tokenizer_type"})
"""Options that a small job does without, so that the account of it names them."""
_STAGES = "pipeline_model_parallel_layout"
_CHUNKS = "num_virtual_stages_per_pipeline_rank"
_PRECISION = (
    *("fp8", "fp8_recipe", "fp4", "first_last_layers_bf16"),
    *("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16"),
)
"""Fields of ``mixed_precision`` that ``runtime_config_update`` copies to the model."""
_MAIN_WEIGHTS = "main_params_dtype"
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}


def words(cfg: Any) -> list[str]:
    """The flags that a ``ConfigContainer`` stands for."""
    bridge_small.resolve(cfg)
    values = {
        option: value
        for option, value in vars(Options(cfg)).items()
        if option in _LEFT or (ROLES.get(option) in _ROLES and option not in _OWN)
    }
    chunks = getattr(cfg.model, "virtual_pipeline_model_parallel_size", None)
    if values.get(_STAGES) is not None:
        values[_STAGES] = _layout(values[_STAGES])
    elif chunks and chunks > 1:
        values[_CHUNKS] = chunks
        if not values.get("overlap_p2p_comm"):
            # Its only flag switches it off.
            values["no_overlap_p2p_communication"] = True
    values.pop("overlap_p2p_comm", None)
    if (weights := values.pop(_MAIN_WEIGHTS, None)) is not None and weights.itemsize < 4:
        values[_MAIN_WEIGHTS] = "fp16"
    values |= {name: getattr(cfg.mixed_precision, name, None) for name in _PRECISION}
    if values.get("num_query_groups") is not None:
        values["group_query_attention"] = True
    return [word for option, value in values.items() for word in _flag(option, value)]


def divisible(cfg: Any) -> list[str]:
    """The flag for as many layers as pipeline stages can share.

    The model's own number is on the hub, and a recipe has a layout that suits it.
    """
    flags = CommandFlags.parse(words(cfg))
    stages = flags.integer("pipeline_model_parallel_size", 1) * flags.integer(_CHUNKS, 1)
    if stages == 1 or any(map(flags.has, (_STAGES, "hybrid_layer_pattern", *ENDS))):
        return []
    layers = max(2, -(-flags.integer("num_layers") // stages))
    return ["--num-layers", str(layers * stages - borrowed(flags))]


def _flag(option: str, value: Any) -> Iterator[str]:
    name = "--" + option.replace("_", "-")
    if value is True:
        yield name
    elif isinstance(value, list | tuple) and value and all(isinstance(v, int | str) for v in value):
        if ROLES.get(option) is not Role.SIZE or option == "mrope_section":
            yield from (name, *map(str, value))
        elif option == "window_size":
            yield from (name, ",".join(map(str, value)))
        else:
            yield from (name, f"[{','.join(str(int(v)) for v in value)}]")
    elif value is not False and ((isinstance(value, int | str) and value != "") or option == "lr"):
        yield from (name, str(value))


def _layout(value: Any) -> str:
    """Lists of layers, one per stage, as the text that Megatron reads too."""
    if isinstance(value, str):
        return value
    return "|".join("".join(_LETTERS[layer] for layer in stage) for stage in value)


def make_small(cfg: Any, arguments: Sequence[str], iterations: int = 2) -> None:
    """Make a configuration that of a small job, on data of its own, that trains ``iterations``.

    ``arguments`` are as of :func:`apply`, and ``--data FOLDER``. Raises ``TTraceError`` for a model
    that is not one of text.
    """
    flags = CommandFlags.parse(arguments).flags
    data = next((flag.values[0] for flag in flags if flag.name == DATA), "")
    apply(cfg, [word for flag in flags if flag.name != DATA for word in flag.words()])
    bridge_small.detach(cfg, Path(data), iterations)


def apply(cfg: Any, arguments: Sequence[str]) -> None:
    """Make a configuration, a ``ConfigContainer``, that of a small job with these arguments.

    What :func:`words` says and the arguments do not is switched off.
    """
    before, after = CommandFlags.parse(words(cfg)), CommandFlags.parse(arguments)
    options = Options(cfg)
    for flag in after.flags:
        option = flag.option or ""
        earlier = before.flag(option)
        if option in _OWN or (earlier is not None and earlier.values == flag.values):
            continue
        current = getattr(options, option, None) if option != _CHUNKS else None
        _set(cfg, option, _value(option, flag.values, current))
    for flag in before.flags:
        option = flag.option or ""
        if not after.has(option):
            _set(cfg, option, None if flag.values else False)
    if after.has(_STAGES):
        stages = len(patterns.stages(after.text(_STAGES)))
        chunks = stages // after.integer("pipeline_model_parallel_size", 1)
        _set(cfg, _CHUNKS, chunks if chunks > 1 else None)
    elif not after.has(_CHUNKS):
        _set(cfg, _CHUNKS, None)


def _set(cfg: Any, option: str, value: Any) -> None:
    if option == _CHUNKS:
        cfg.model.virtual_pipeline_model_parallel_size = value
        return
    setattr(Options(cfg), option, value)
    if option in _PRECISION and hasattr(cfg.mixed_precision, option):
        setattr(cfg.mixed_precision, option, value)


def _value(option: str, values: Sequence[str], current: Any) -> Any:
    """The words of a flag as the field has it."""
    if not values:
        return option != "overlap_p2p_comm"
    text = " ".join(values)
    if option == _STAGES:
        return text
    if option == _MAIN_WEIGHTS:
        return importlib.import_module("torch").float32
    if (pattern := patterns.layers(text)) is not None:
        return pattern
    if option == "window_size" and "," in text:
        return tuple(map(int, text.split(",")))
    if isinstance(current, list | tuple) and option != "moe_layer_freq":
        return type(current)(map(_number, values))
    return _number(text)


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
